"""What the gradients hold: which leaf is not finite, and what a dtype loses."""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from .._dtypes import at_least_float32, is_inexact
from .._lookup import loss_scale


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GradientReport:
    """Counts for every leaf of a gradient; a pytree, so ``jit`` and ``scan`` return it.

    Attributes:
      paths: of the inexact leaves, in the order of the tree; "grads" for a bare array.
      entries: of each leaf; both parts of a complex one count.
      dtype: the name of the dtype that is asked about.
      loss_scale: that the gradients were scaled by; shape (), float32.
      nan: entries that are NaN; like all counts of shape (leaves,) and dtype int32, so
        for leaves of less than 2**31 entries.
      positive_inf: entries that are inf.
      negative_inf: entries that are -inf.
      zero: entries that are exactly zero. In a float16 backward pass what underflowed
        on the way is among them.
      flushed_unscaled: further entries that ``dtype`` would round to zero without scaling.
      flushed: further entries that it rounds to zero at ``loss_scale``.
      subnormal: entries that it holds at ``loss_scale``, but with fewer digits.
      largest: the largest finite magnitude of the true gradient; 0 if there is none;
        shape (leaves,), float32.
      smallest: the smallest one above zero; 0 if there is none.
    """

    paths: tuple[str, ...] = dataclasses.field(metadata={"static": True})
    entries: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    dtype: str = dataclasses.field(metadata={"static": True})
    loss_scale: jax.Array
    nan: jax.Array
    positive_inf: jax.Array
    negative_inf: jax.Array
    zero: jax.Array
    flushed_unscaled: jax.Array
    flushed: jax.Array
    subnormal: jax.Array
    largest: jax.Array
    smallest: jax.Array

    def nonfinite(self) -> np.ndarray:
        """Entries of each leaf that are NaN or infinite, on the host."""
        return self._host(self.nan + self.positive_inf + self.negative_inf)

    def first_nonfinite(self) -> str | None | list[str | None]:
        """The path of the first leaf that is not finite, or None.

        For the stacked reports of ``lax.scan``, a list with one for each step.
        """
        bad = np.asarray(self.nan + self.positive_inf + self.negative_inf) > 0

        def first(leaves: np.ndarray) -> str | None:
            return self.paths[int(np.argmax(leaves))] if leaves.any() else None

        return first(bad) if bad.ndim == 1 else [first(step) for step in bad]

    def zero_share(self) -> float:
        """The share of all entries that are exactly zero; NaN if there are no entries.

        In float16 gradients these are the entries that underflowed in the backward pass,
        and those whose derivative is zero, as behind a ReLU: nothing tells them apart.
        """
        return _ratio(self._host(self.zero), np.array(self.entries))

    def underflow_share(self, *, scaled: bool = True) -> float:
        """The share of the entries other than zero that the dtype rounds to zero.

        Ask it of gradients that were computed in float32. A float16 backward pass has
        made zeros of what underflowed there, and no report knows what a zero has been:
        see :meth:`zero_share`. Where every entry is zero or not finite, nothing is known,
        and the share is NaN.

        Args:
          scaled: at ``loss_scale``, or without scaling.
        """
        flushed = self.flushed if scaled else self.flushed_unscaled
        return _ratio(self._host(flushed), self._nonzero())

    def subnormal_share(self) -> float:
        """The share of the entries other than zero that the dtype holds with fewer digits.

        These lie below its smallest normal number, 2**-14 in float16: each halving there
        costs one of its 11 digits, and a larger scale gives it back. NaN where every
        entry is zero or not finite.
        """
        return _ratio(self._host(self.subnormal), self._nonzero())

    def __str__(self) -> str:
        """A table, the worst leaf first: not finite, then by what is flushed."""
        entries = np.array(self.entries, np.int64)
        bad, nonzero = self.nonfinite(), self._nonzero()
        share = self._host(self.flushed) / np.maximum(entries, 1)
        width = max([len(path) for path in self.paths] + [4])
        names = ("nan", "inf", "-inf", "zero", "flushed", "(at 1)", "subnorm")
        lines = [
            f"scale {float(self.loss_scale):g}, {self.dtype}; magnitudes are unscaled",
            f"{'leaf':{width}} {'entries':>9} "
            + " ".join(f"{name:>7}" for name in names)
            + f" {'largest':>9} {'smallest':>9}",
        ]
        for i in np.lexsort((-share, -bad)):
            n = max(entries[i], 1)
            shares = (self.zero, self.flushed, self.flushed_unscaled, self.subnormal)
            largest = f"{float(self.largest[i]):.1e}" if bad[i] < entries[i] else "-"
            smallest = f"{float(self.smallest[i]):.1e}" if nonzero[i] else "-"
            lines.append(
                f"{self.paths[i]:{width}} {entries[i]:9d} {int(self.nan[i]):7d} "
                f"{int(self.positive_inf[i]):7d} {int(self.negative_inf[i]):7d} "
                + " ".join(f"{int(count[i]) / n:7.1%}" for count in shares)
                + f" {largest:>9} {smallest:>9}"
            )
        if nonzero.sum():
            lines.append(
                f"{self.zero_share():.1%} of all entries are zero; of the other finite ones "
                f"{self.underflow_share():.1%} are flushed and {self.subnormal_share():.1%} "
                "subnormal"
            )
        elif entries.sum():
            lines.append(
                "every entry is zero or not finite, so nothing shows what underflowed"
            )
        return "\n".join(lines)

    def _nonzero(self) -> np.ndarray:
        """Finite entries of each leaf other than zero."""
        return np.array(self.entries) - self._host(self.zero) - self.nonfinite()

    def _host(self, counts: jax.Array) -> np.ndarray:
        if counts.ndim != 1:
            raise ValueError(
                f"This holds the reports of several steps, of shape {counts.shape[:-1]}. "
                "Look at one: jax.tree.map(lambda x: x[-1], report)."
            )
        return np.asarray(counts)


def _ratio(part: np.ndarray, whole: np.ndarray) -> float:
    total = int(np.sum(whole, dtype=np.int64))
    return int(np.sum(part, dtype=np.int64)) / total if total else float("nan")


def gradient_report(
    grads: optax.Updates, state: object = None, dtype: DTypeLike = jnp.float16
) -> GradientReport:
    """Counts what is not finite and what ``dtype`` would lose, leaf by leaf.

    Works inside ``jit``, ``scan`` and ``vmap`` and on sharded gradients. It reads every
    gradient once and needs no memory for it. Outside ``jit`` it compiles once for each set
    of shapes. Call it when you want to know, not on every step.

    Args:
      grads: the gradients of a scaled loss, or true ones if ``state`` is None. None,
        integer and float0 leaves are left out.
      state: the state whose scale multiplied the loss, i.e. from *before*
        ``tx.update``, or anything that holds exactly one scaler.
      dtype: whose range is asked about.

    Returns:
      A :class:`GradientReport`. ``print`` it, or ask ``first_nonfinite()``,
      ``underflow_share()``, ``zero_share()`` and ``subnormal_share()``.

    Raises:
      TypeError: ``dtype`` is not a real floating-point one.
      TypeError, ValueError: as :func:`scaler_state`; ValueError also for the state of a
        population outside ``jax.vmap``.

    Example:
      >>> import jax.numpy as jnp
      >>> import optax
      >>> import optax_dls as dls
      >>> state = dls.static_loss_scaling(optax.sgd(0.1), 1024.0).init(jnp.zeros(3))
      >>> grads = {"w": jnp.array([1e-6, 1e-3, 1024.0]), "b": jnp.array([jnp.nan])}
      >>> report = dls.gradient_report(grads, state)
      >>> report.first_nonfinite(), int(report.subnormal[1]), float(report.largest[1])
      ("['b']", 1, 1.0)

    References:
      Micikevicius et al., `Mixed Precision Training
      <https://arxiv.org/abs/1710.03740>`_, 2018, section 3.2
    """
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(
            f"dtype must be a real floating-point dtype such as jnp.float16, got {dtype!r}."
        )
    scale = np.float32(1) if state is None else loss_scale(state)
    if scale.ndim:
        raise ValueError(
            f"state must hold one scale, got scales of shape {scale.shape}. Take the report "
            "of a population under jax.vmap: jax.vmap(gradient_report)(grads, state)."
        )
    found, _ = jax.tree_util.tree_flatten_with_path(grads)
    found = [(path, leaf) for path, leaf in found if is_inexact(leaf)]
    leaves = [leaf for _, leaf in found]
    return GradientReport(
        paths=tuple(jax.tree_util.keystr(path) or "grads" for path, _ in found),
        entries=tuple(
            int(np.size(leaf)) * (2 if jnp.iscomplexobj(leaf) else 1) for leaf in leaves
        ),
        dtype=jnp.dtype(dtype).name,
        **_counts(leaves, scale, jnp.dtype(dtype)),
    )


@functools.partial(jax.jit, static_argnames="dtype")
def _counts(
    leaves: Sequence[ArrayLike], scale: jax.Array, dtype: np.dtype
) -> dict[str, jax.Array]:
    """The array fields of a report. One program, so that un-jitted calls compile once."""
    columns = [
        _leaf_counts(jnp.asarray(leaf), scale, dtype)
        for leaf in leaves or [np.zeros(0, np.float32)]
    ]
    return {"loss_scale": scale} | {
        name: jnp.stack([column[name] for column in columns])[: len(leaves)]
        for name in columns[0]
    }


def _leaf_counts(
    leaf: jax.Array, scale: jax.Array, dtype: np.dtype
) -> dict[str, jax.Array]:
    # Of complex entries the parts are what overflows.
    parts = (leaf.real, leaf.imag) if jnp.iscomplexobj(leaf) else (leaf,)
    entries = [_entry_counts(part, scale, dtype) for part in parts]
    operands = functools.reduce(_combine, (tuple(entry.values()) for entry in entries))
    zeros = [np.zeros((), x.dtype) for x in operands[:-1]]
    most = np.array(jnp.finfo(operands[-1].dtype).max)
    # One reduction for all reads every entry once. Of sharded leaves XLA reduces the
    # shards, and gathers what is left of each.
    reduced = lax.reduce(operands, (*zeros, most), _combine, tuple(range(leaf.ndim)))
    counts = dict(zip(entries[0], reduced, strict=True))
    largest, smallest = counts["largest"], counts["smallest"]
    smallest = jnp.where(largest > 0, smallest, 0)
    return counts | {
        "largest": (largest / scale).astype(jnp.float32),
        "smallest": (smallest / scale).astype(jnp.float32),
    }


def _entry_counts(
    part: jax.Array, scale: jax.Array, dtype: np.dtype
) -> dict[str, jax.Array]:
    """The counts of each entry by itself, 0 or 1, and its magnitude, still scaled."""
    scaled = part.astype(at_least_float32(part.dtype))
    magnitude = jnp.abs(scaled)
    info = jnp.finfo(dtype)
    # Half of the smallest subnormal number still rounds to even, that is to zero.
    half = jnp.asarray(float(info.smallest_subnormal) / 2, scaled.dtype)
    tiny = jnp.asarray(float(info.tiny), scaled.dtype)
    # Not an inf: under jax.debug_infs a report must not be what raises.
    most = jnp.finfo(scaled.dtype).max
    is_inf = jnp.isinf(scaled)
    is_zero = magnitude == 0  # float32 subnormals too, where XLA flushes them
    nonzero = jnp.isfinite(scaled) & ~is_zero
    # Compared with bounds times S, not divided by S: so nothing is written out.
    masks = {
        "nan": jnp.isnan(scaled),
        "positive_inf": is_inf & (scaled > 0),
        "negative_inf": is_inf & (scaled < 0),
        "zero": is_zero,
        "flushed_unscaled": nonzero & (magnitude <= half * scale.astype(scaled.dtype)),
        "flushed": nonzero & (magnitude <= half),
        "subnormal": nonzero & (magnitude > half) & (magnitude < tiny),
    }
    return {name: mask.astype(jnp.int32) for name, mask in masks.items()} | {
        "largest": jnp.where(nonzero, magnitude, 0),
        "smallest": jnp.where(nonzero, magnitude, most),
    }


def _combine(a: Sequence[jax.Array], b: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    """Counts are added; of the last two, the maximum and the minimum."""
    *counts, largest, smallest = zip(a, b, strict=True)
    return (*(x + y for x, y in counts), lax.max(*largest), lax.min(*smallest))
