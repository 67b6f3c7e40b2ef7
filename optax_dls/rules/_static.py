"""Scales that do not move: a fixed one, and none at all."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from ._rule import LARGEST_SCALE, SMALLEST_SCALE, Rule
from ._settings import check_scale, clamp, known


def static(scale: ArrayLike) -> Rule:
    r"""A fixed scale, :math:`S_t = S`; steps that overflow are still skipped.

    If a restored state holds another scale, the first step uses that one, and from the
    second step on the scale is that of the rule.

    Args:
      scale: the factor itself (not its exponent). A power of two is exact.

    Returns:
      A :class:`Rule` without state.

    Raises:
      TypeError: ``scale`` is not a real number.
      ValueError: ``scale`` is outside [2**-100, 2**126], NaN or inf.

    Example:
      >>> import optax_dls as dls
      >>> scale, state = dls.rules.static(128.0).init()
      >>> float(scale)
      128.0
    """
    check_scale("scale", scale)

    def init() -> tuple[jax.Array, optax.OptState]:
        return jnp.asarray(clamp(scale, SMALLEST_SCALE, LARGEST_SCALE)), ()

    def update(
        grads_finite: jax.Array, loss_scale: jax.Array, rule_state: optax.OptState
    ) -> tuple[jax.Array, optax.OptState]:
        del grads_finite, loss_scale, rule_state
        return init()

    return Rule(
        init,
        update,
        settings=known(init_scale=scale, min_scale=scale, max_scale=scale),
    )


class NoScalingState(NamedTuple):
    """State of :func:`none`: empty. Its type says that nothing is scaled or skipped."""


def none() -> Rule:
    """No scaling: the scale is 1, and nothing is checked, unscaled or skipped.

    Returns:
      A :class:`Rule` with the empty :class:`NoScalingState`.

    Example:
      >>> import optax_dls as dls
      >>> scale, state = dls.rules.none().init()
      >>> float(scale)
      1.0
    """
    return Rule(
        lambda: (jnp.ones((), jnp.float32), NoScalingState()),
        lambda grads_finite, loss_scale, rule_state: (loss_scale, rule_state),
        settings=known(init_scale=1.0, min_scale=1.0, max_scale=1.0),
    )
