"""Where to start: the gradient at many powers of two, and what is lost at each."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .. import rules
from .._dtypes import is_inexact
from .._finite import all_finite
from .._grad import value_and_scaled_grad
from .._scaler_state import first_scaler
from ..rules._rule import LARGEST_SCALE, SMALLEST_SCALE

# The scale may grow this much before a gradient like today's overflows.
HEADROOM = 4.0
# Below this share of lost entries, a difference is noise.
NEGLIGIBLE = 1e-3
# The default bounds of the rules: a gradient that is finite nowhere between them needs
# something else than a scale.
WIDE_RANGE = (-14, 32)


class ScaleSearch(NamedTuple):
    """What :func:`find_scale` found; NumPy arrays with one entry for each scale.

    Attributes:
      scales: the powers of two that were tried, in rising order: those that were asked
        for, and the recommended one.
      finite: whether the gradient was finite there.
      lost: the share of entries that are zero there, among those that are not zero at
        the scale that keeps most; NaN where the gradient is not finite.
      recommended: a first scale, ``init_scale``, one of ``scales``. None where the loss
        is not finite, and where the gradient is finite at no scale or zero at all.
      reason: for the recommendation, in words.
      loss: the true loss of this batch, which no scale changes.
    """

    scales: np.ndarray
    finite: np.ndarray
    lost: np.ndarray
    recommended: float | None
    reason: str
    loss: float = np.nan

    @property
    def largest_finite(self) -> float | None:
        """The last scale before the first overflow; None if no gradient is finite.

        A gradient that is not finite at lower scales, where 0/0 of values that underflowed
        is NaN, does not count as an overflow.
        """
        if not self.finite.any():
            return None
        return float(self.scales[_finite_run(self.finite).stop - 1])

    def __str__(self) -> str:
        lines = ["    scale  gradient   lost"]
        for scale, finite, lost in zip(
            self.scales, self.finite, self.lost, strict=True
        ):
            state = f"finite {lost:8.1%}" if finite else "not finite"
            lines.append(f"{_power(scale):>9}  {state}")
        return "\n".join([*lines, self.reason])


# The loss at one scale, whether the gradient is finite, and how many entries of each leaf
# are not zero.
_Measured = tuple[jax.Array, jax.Array, list[jax.Array]]


def find_scale(
    loss_fn: Callable,
    params: optax.Params,
    *args: object,
    exponents: Sequence[int] = range(33),
    has_aux: bool = False,
    value_and_grad: Callable = jax.value_and_grad,
    **kwargs: object,
) -> ScaleSearch:
    r"""The scale range test: the gradient of one batch at many scales.

    Compiles one program and runs it once for each scale, so it needs the memory of a
    single training step. What overflows and what is lost depends on the dtypes that
    ``loss_fn`` computes in. (Where XLA fuses operations it may keep more digits than the
    dtype has, so another program can lose a little more or less.)

    Every array among ``params``, ``args`` and ``kwargs`` is an argument of that program,
    as it is of a jitted train step. Everything else, such as a string, a number or the
    functions in an Equinox model, reaches ``loss_fn`` as it is. A model is rebuilt around
    the arrays of the program, so the caller's one keeps its batch statistics and random
    streams. An array that two layers share becomes one for each.

    Args:
      loss_fn: the true loss, ``loss_fn(params, *args, **kwargs)``, as for
        :func:`value_and_scaled_grad`.
      params: what to differentiate: a tree of arrays, or a model of the framework whose
        ``value_and_grad`` you name.
      *args: further arguments, such as a batch.
      exponents: which powers of two to try.
      has_aux: whether ``loss_fn`` returns auxiliary data beside the loss.
      value_and_grad: as for :func:`value_and_scaled_grad`. ``nnx.value_and_grad`` takes
        the module itself, also one with dropout or batch normalisation. A module in
        parts, or one made with ``pytree=False``, is merged inside ``loss_fn``:
        ``nnx.merge(graphdef, params, rest, copy=True)``. ``eqx.filter_value_and_grad``
        takes the Equinox model.
      **kwargs: further keyword arguments.

    Returns:
      A :class:`ScaleSearch`; ``print`` it, or draw it with
      ``optax_dls.plot.underflow``. It recommends the middle, in powers of two, between
      the smallest scale at which less than 0.1 % is lost and the largest finite one, and
      leaves room for gradients four times larger: one batch is not all of them. Where
      ``exponents`` leave that scale out, it is tried as well.

    Raises:
      ValueError: ``exponents`` is empty, not whole, or beyond -100 or 126.
      TypeError: called inside ``jit`` or another transformation, where there are no
        values to look at.
      TypeError, ValueError: as :func:`value_and_scaled_grad`.

    Example:
      >>> import jax.numpy as jnp
      >>> import optax_dls as dls
      >>> def loss_fn(w):
      ...     small = w.astype(jnp.float16) * jnp.float16(2.0**-10)
      ...     return jnp.sum(small.astype(jnp.float32)) * 2.0**-18
      >>> search = dls.find_scale(loss_fn, jnp.ones(3), exponents=range(0, 40))
      >>> print(search.reason.replace(": ", ":\n"))
      Start at 2^18:
      a gradient like this one is finite up to 2^33, and 0.0% of its entries are lost at the start, against 100.0% at 2^0.

    References:
      The idea is that of the learning-rate range test: Smith, `Cyclical Learning Rates
      for Training Neural Networks <https://arxiv.org/abs/1506.01186>`_, 2017
    """
    scales = np.exp2(sorted(set(exponents))).astype(np.float32)
    if (
        not scales.size
        or any(int(exponent) != exponent for exponent in exponents)
        or not (SMALLEST_SCALE <= scales[0] <= scales[-1] <= LARGEST_SCALE)
    ):
        raise ValueError(
            f"exponents must be some whole numbers from -100 to 126, got {exponents!r}."
        )
    grad_fn = value_and_scaled_grad(
        loss_fn, has_aux=has_aux, value_and_grad=value_and_grad
    )
    arrays, put_back = _take_arrays_out(((params, *args), kwargs))

    @jax.jit
    def measure(scale: jax.Array, arrays: Sequence[jax.Array]) -> _Measured:
        args, kwargs = put_back(arrays)
        state = first_scaler(rules.static(1.0))._replace(loss_scale=scale)
        value, grads = grad_fn(*args, state=state, **kwargs)
        leaves = [leaf for leaf in jax.tree.leaves(grads) if is_inexact(leaf)]
        kept = [jnp.sum(leaf != 0, dtype=jnp.int32) for leaf in leaves]
        return value[0] if has_aux else value, all_finite(leaves), kept

    def on_host(scale: float) -> _Measured:
        # At once, so that no two of them take memory together.
        return jax.device_get(measure(np.float32(scale), arrays))

    measured = {scale: on_host(scale) for scale in scales.tolist()}
    while True:
        search = _recommend(_table(measured))
        start = search.recommended
        if start is None or start in measured:
            return search
        measured[start] = on_host(start)


def _take_arrays_out(
    tree: object,
) -> tuple[list[jax.Array], Callable[[Sequence[jax.Array]], tuple]]:
    """The arrays in a tree, and a function that puts others in their places."""
    leaves, treedef = jax.tree.flatten(tree)
    places = [i for i, leaf in enumerate(leaves) if _is_array(leaf)]
    arrays = [leaves[i] for i in places]
    if any(isinstance(array, jax.core.Tracer) for array in arrays):
        raise TypeError(
            "find_scale looks at values, so it runs on the host: call it outside jit, "
            "grad, vmap and scan. It compiles the gradient itself."
        )

    def put_back(arrays: Sequence[jax.Array]) -> tuple:
        filled = dict(enumerate(leaves)) | dict(zip(places, arrays, strict=True))
        return jax.tree.unflatten(treedef, filled.values())

    return arrays, put_back


def _is_array(leaf: object) -> bool:
    """Whether JAX can trace it: NumPy's arrays of strings, objects and dates it cannot."""
    if isinstance(leaf, np.ndarray):
        return leaf.dtype == np.bool_ or jnp.issubdtype(leaf.dtype, jnp.number)
    return isinstance(leaf, jax.Array)


def _table(measured: dict[float, _Measured]) -> ScaleSearch:
    """What was measured, without a recommendation."""
    scales = sorted(measured)
    losses, flags, kept = zip(*(measured[scale] for scale in scales), strict=True)
    finite, entries = np.array(flags), np.array(kept, np.int64).sum(1)
    most = np.max(entries, where=finite, initial=0)
    return ScaleSearch(
        scales=np.array(scales, np.float32),
        finite=finite,
        lost=np.where(finite, 1 - entries / max(most, 1), np.nan),
        recommended=None,
        reason="",
        loss=float(losses[0]),
    )


def _recommend(search: ScaleSearch) -> ScaleSearch:
    largest = search.largest_finite
    if not np.isfinite(search.loss):
        reason = (
            f"The loss of this batch is {search.loss} before it is scaled, so the scale is "
            "not the cause. Look for inf or NaN in the batch, or an operation that "
            "overflows in the forward pass: locate_nonfinite(loss_fn, params, ...) names it."
        )
        if largest is not None:
            reason += (
                f" The gradient is finite up to {_power(largest)} nonetheless, so a step "
                "like this one is skipped only if tx.update gets value=loss."
            )
        return search._replace(reason=reason)
    if largest is None:
        return search._replace(reason=_finite_nowhere(search))
    if np.nanmin(search.lost) > 1 - NEGLIGIBLE:
        return search._replace(
            reason=(
                f"The gradient is zero at every scale up to {_power(largest)} at which it "
                "is finite. Try larger exponents; or the loss does not depend on these "
                "parameters."
            )
        )
    if search.finite.all() and np.nanmax(search.lost) < NEGLIGIBLE:
        return search._replace(
            recommended=1.0,
            reason=(
                "No scaling is needed: at no scale tried is anything lost or not finite. "
                "no_loss_scaling keeps the train step as it is."
            ),
        )
    return _start_in_the_middle(search, largest)


def _finite_nowhere(search: ScaleSearch) -> str:
    low, high = np.log2(search.scales[[0, -1]])
    tried = f"The gradient is not finite at any scale tried, from 2^{low:.0f} to 2^{high:.0f}"
    blame = (
        "the scale is not the cause: look for inf or NaN in the batch, or an operation "
        "whose derivative is not finite. locate_nonfinite(jax.grad(loss_fn), params, ...) "
        "names it."
    )
    first, last = WIDE_RANGE
    if low <= first and last <= high:
        return f"{tried}, so {blame}"
    return (
        f"{tried}. It may overflow at all of them, so try exponents=range({first}, "
        f"{last + 1}). If it is finite at none of those, {blame}"
    )


def _start_in_the_middle(search: ScaleSearch, largest: float) -> ScaleSearch:
    scales, lost, run = search.scales, search.lost, _finite_run(search.finite)
    good = scales[search.finite & (lost < NEGLIGIBLE)][0]
    middle = 2.0 ** float(np.floor((np.log2(good) + np.log2(largest)) / 2))
    start = max(min(middle, largest / HEADROOM), float(scales[run.start]))
    gap = run.stop < scales.size and scales[run.stop] > 2 * largest
    up_to = _power(largest) + (f" and not at {_power(scales[run.stop])}" if gap else "")
    at_start = float(lost[np.searchsorted(scales, start)])
    reason = (
        f"Start at {_power(start)}: a gradient like this one is finite up to {up_to}, and "
        f"{at_start:.1%} of its entries are lost at the start, against "
        f"{lost[run.start]:.1%} at {_power(scales[run.start])}."
    )
    if run.start:
        reason += (
            f" At {_power(scales[run.start - 1])} and below it is not finite either: "
            "something underflows there, as both sides of 0/0 do."
        )
    return search._replace(recommended=start, reason=reason)


def _finite_run(finite: np.ndarray) -> slice:
    """The first scales in a row at which the gradient is finite, of which there are some."""
    start = int(np.argmax(finite))
    length = int(np.argmin(np.append(finite[start:], False)))
    return slice(start, start + length)


def _power(scale: float) -> str:
    return f"2^{np.log2(scale):.0f}"
