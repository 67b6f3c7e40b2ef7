"""Where to start: the gradient at every power of two, and what is lost at each."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

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


class ScaleSearch(NamedTuple):
    """What :func:`find_scale` found; NumPy arrays with one entry for each scale.

    Attributes:
      scales: the powers of two that were tried, in rising order.
      finite: whether the gradient was finite there.
      lost: the share of entries that are zero there, among those that are not zero at
        the scale that keeps most; NaN where the gradient is not finite.
      recommended: a first scale, ``init_scale``; None where the gradient is finite at none
        or zero at all of them.
      reason: for the recommendation, a sentence.
    """

    scales: np.ndarray
    finite: np.ndarray
    lost: np.ndarray
    recommended: float | None
    reason: str

    @property
    def largest_finite(self) -> float | None:
        """The largest scale up to which every gradient is finite, or None."""
        run = int(np.argmin(np.append(self.finite, False)))
        return float(self.scales[run - 1]) if run else None

    def __str__(self) -> str:
        lines = ["    scale  gradient   lost"]
        for scale, finite, lost in zip(
            self.scales, self.finite, self.lost, strict=True
        ):
            state = f"finite {lost:8.1%}" if finite else "not finite"
            lines.append(f"{_power(scale):>9}  {state}")
        return "\n".join([*lines, self.reason])


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

    Takes one gradient for each scale, one after the other in one compiled loop, so it
    needs the memory of a single training step. What overflows and what is lost depends on
    the dtypes that ``loss_fn`` computes in. (Where XLA fuses operations it may keep more
    digits than the dtype has, so another program can lose a little more or less.)

    Args:
      loss_fn: the true loss, ``loss_fn(params, *args, **kwargs)``, as for
        :func:`value_and_scaled_grad`.
      params: what to differentiate.
      *args: further arguments, such as a batch.
      exponents: which powers of two to try.
      has_aux: whether ``loss_fn`` returns auxiliary data beside the loss.
      value_and_grad: as for :func:`value_and_scaled_grad`.
      **kwargs: further keyword arguments.

    Returns:
      A :class:`ScaleSearch`; ``print`` it, or draw it with
      ``optax_dls.plot.underflow``. It recommends the middle, in powers of two, between
      the smallest scale at which less than 0.1 % is lost and the largest finite one, and
      leaves room for gradients four times larger: one batch is not all of them.

    Raises:
      ValueError: ``exponents`` is empty, not whole, or beyond -100 or 126.
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
    scaler = first_scaler(rules.static(1.0))
    grad_fn = value_and_scaled_grad(
        loss_fn, has_aux=has_aux, value_and_grad=value_and_grad
    )

    def at(scale: jax.Array) -> tuple[jax.Array, jax.Array]:
        state = scaler._replace(loss_scale=scale)
        _, grads = grad_fn(params, *args, state=state, **kwargs)
        kept = [
            jnp.sum(g != 0, dtype=jnp.float32)
            for g in jax.tree.leaves(grads)
            if is_inexact(g)
        ]
        return all_finite(grads), sum(kept, jnp.float32(0))

    finite, kept = map(np.asarray, jax.jit(lambda s: lax.map(at, s))(scales))
    most = np.max(kept, where=finite, initial=0)
    lost = np.where(finite, 1 - kept / max(most, 1), np.nan)
    return _recommend(ScaleSearch(scales, finite, lost, None, ""))


def _recommend(search: ScaleSearch) -> ScaleSearch:
    largest = search.largest_finite
    if largest is None:
        return search._replace(
            reason=(
                "The gradient is not finite even at the smallest scale, so the scale is "
                "not the cause: look for inf or NaN in the batch, or an operation that "
                "overflows in the forward pass."
            )
        )
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
    good = np.flatnonzero(search.finite & (search.lost < NEGLIGIBLE))
    smallest_good = float(search.scales[good[0]]) if good.size else largest
    middle = 2.0 ** np.floor((np.log2(smallest_good) + np.log2(largest)) / 2)
    recommended = max(min(middle, largest / HEADROOM), float(search.scales[0]))
    at = float(search.lost[np.searchsorted(search.scales, recommended)])
    return search._replace(
        recommended=recommended,
        reason=(
            f"Start at {_power(recommended)}: a gradient like this one is finite up to "
            f"{_power(largest)}, and {at:.1%} of its entries are lost at the start, against "
            f"{search.lost[0]:.1%} at {_power(search.scales[0])}."
        ),
    )


def _power(scale: float) -> str:
    return f"2^{np.log2(scale):.0f}"
