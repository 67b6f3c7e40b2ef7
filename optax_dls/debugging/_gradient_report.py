"""What the gradients hold: which leaf is not finite, and what a dtype loses."""

import dataclasses

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
      paths: of the inexact leaves, in the order of the tree.
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
      smallest: the smallest one above zero; inf if there is none.
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

    def underflow_share(self, *, scaled: bool = True) -> float:
        """The share of the entries above zero that the dtype rounds to zero.

        Ask it of gradients that were computed in float32: a float16 backward pass has
        made zeros of what underflowed, and a zero tells nothing.

        Args:
          scaled: at ``loss_scale``, or without scaling.
        """
        flushed = self._host(self.flushed if scaled else self.flushed_unscaled)
        left = sum(self.entries) - int(np.sum(self._host(self.zero)))
        return float(np.sum(flushed)) / left if left else 0.0

    def __str__(self) -> str:
        """A table, the worst leaf first: not finite, then by what is flushed."""
        share = self._host(self.flushed) / np.maximum(self.entries, 1)
        order = np.lexsort((-share, -self.nonfinite()))
        width = max([len(path) for path in self.paths] + [4])
        names = ("nan", "inf", "-inf", "zero", "flushed", "(at 1)", "subnorm")
        lines = [
            f"scale {float(self.loss_scale):g}, {self.dtype}; magnitudes are unscaled",
            f"{'leaf':{width}} {'entries':>9} "
            + " ".join(f"{name:>7}" for name in names)
            + f" {'largest':>9} {'smallest':>9}",
        ]
        for i in order:
            n = max(self.entries[i], 1)
            shares = (self.zero, self.flushed, self.flushed_unscaled, self.subnormal)
            lines.append(
                f"{self.paths[i]:{width}} {self.entries[i]:9d} {int(self.nan[i]):7d} "
                f"{int(self.positive_inf[i]):7d} {int(self.negative_inf[i]):7d} "
                + " ".join(f"{int(count[i]) / n:7.1%}" for count in shares)
                + f" {float(self.largest[i]):9.1e} {float(self.smallest[i]):9.1e}"
            )
        return "\n".join(lines)

    def _host(self, counts: jax.Array) -> np.ndarray:
        if counts.ndim != 1:
            raise ValueError(
                f"This holds the reports of several steps, of shape {counts.shape[:-1]}. "
                "Look at one: jax.tree.map(lambda x: x[-1], report)."
            )
        return np.asarray(counts)


def gradient_report(
    grads: optax.Updates, state: object = None, dtype: DTypeLike = jnp.float16
) -> GradientReport:
    """Counts what is not finite and what ``dtype`` would lose, leaf by leaf.

    Works inside ``jit``, ``scan`` and ``vmap`` and on sharded gradients. On one device it
    reads every gradient once; with several, XLA decides how often, and may need memory for
    it. Call it when you want to know, not on every step.

    Args:
      grads: the gradients of a scaled loss, or true ones if ``state`` is None. None,
        integer and float0 leaves are left out.
      state: the state whose scale multiplied the loss, i.e. from *before*
        ``tx.update``, or anything that holds exactly one scaler.
      dtype: whose range is asked about.

    Returns:
      A :class:`GradientReport`. ``print`` it, or ask ``first_nonfinite()`` and
      ``underflow_share()``.

    Raises:
      TypeError: ``dtype`` is not a real floating-point one.
      TypeError, ValueError: as :func:`scaler_state`.

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
    scale = jnp.float32(1) if state is None else loss_scale(state)
    leaves, _ = jax.tree_util.tree_flatten_with_path(grads)
    leaves = [(path, leaf) for path, leaf in leaves if is_inexact(leaf)]
    columns = [_leaf_counts(leaf, scale, dtype) for _, leaf in leaves]
    counts = {name: [column[name] for column in columns] for name in _leaf_fields()}
    return GradientReport(
        paths=tuple(jax.tree_util.keystr(path) for path, _ in leaves),
        entries=tuple(
            int(np.size(leaf)) * (2 if jnp.iscomplexobj(leaf) else 1)
            for _, leaf in leaves
        ),
        dtype=jnp.dtype(dtype).name,
        loss_scale=scale,
        **{
            name: jnp.stack(values) if values else jnp.zeros(0, jnp.int32)
            for name, values in counts.items()
        },
    )


def _leaf_fields() -> list[str]:
    return [field.name for field in dataclasses.fields(GradientReport)][4:]


def _leaf_counts(
    leaf: ArrayLike, scale: jax.Array, dtype: DTypeLike
) -> dict[str, jax.Array]:
    info = jnp.finfo(dtype)
    leaf = jnp.asarray(leaf)
    if jnp.iscomplexobj(leaf):  # entries are complex, parts are what overflows
        leaf = jnp.stack([leaf.real, leaf.imag])
    scaled = leaf.astype(at_least_float32(leaf.dtype))
    scale = scale.astype(scaled.dtype)
    magnitude = jnp.abs(scaled)
    # Half of the smallest subnormal number still rounds to even, that is to zero.
    half = jnp.asarray(float(info.smallest_subnormal) / 2, scaled.dtype)
    tiny = jnp.asarray(float(info.tiny), scaled.dtype)
    infinity = jnp.asarray(jnp.inf, scaled.dtype)
    finite = magnitude < infinity
    nonzero = finite & (magnitude > 0)
    # Compared with bounds times S, not divided by S: so nothing is written out.
    masks = {
        "nan": jnp.isnan(scaled),
        "positive_inf": scaled == infinity,
        "negative_inf": scaled == -infinity,
        "zero": magnitude == 0,
        "flushed_unscaled": nonzero & (magnitude <= half * scale),
        "flushed": nonzero & (magnitude <= half),
        "subnormal": (magnitude > half) & (magnitude < tiny),
    }
    ends = [jnp.where(finite, magnitude, 0), jnp.where(nonzero, magnitude, infinity)]
    reduce = _in_one_pass if jax.device_count() == 1 else _each_by_itself
    *counts, largest, smallest = reduce(
        [mask.astype(jnp.int32) for mask in masks.values()], *ends
    )
    largest, smallest = (x / scale for x in (largest, smallest))
    return {
        **dict(zip(masks, counts, strict=True)),
        "largest": largest.astype(jnp.float32),
        "smallest": smallest.astype(jnp.float32),
    }


def _in_one_pass(
    masks: list[jax.Array], largest: jax.Array, smallest: jax.Array
) -> tuple[jax.Array, ...]:
    """Sums, a maximum and a minimum in one reduction, which reads every entry once."""
    operands = (*masks, largest, smallest)
    starts = [0] * len(masks) + [0, jnp.inf]
    combine = [lax.add] * len(masks) + [lax.max, lax.min]
    return tuple(
        lax.reduce(
            operands,
            tuple(
                np.asarray(start, x.dtype)
                for start, x in zip(starts, operands, strict=True)
            ),
            lambda a, b: tuple(f(x, y) for f, x, y in zip(combine, a, b, strict=True)),
            tuple(range(largest.ndim)),
        )
    )


def _each_by_itself(
    masks: list[jax.Array], largest: jax.Array, smallest: jax.Array
) -> tuple[jax.Array, ...]:
    """The same, one by one: of sharded arrays XLA gathers what a joint reduction reads."""
    return (
        *(jnp.sum(mask, dtype=jnp.int32) for mask in masks),
        jnp.max(largest, initial=0),
        jnp.min(smallest, initial=jnp.inf),
    )
