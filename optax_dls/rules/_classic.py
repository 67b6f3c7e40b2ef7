"""The classic way: each overflow sets the count of finite steps back to zero."""

from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from ._hysteresis import HysteresisRuleState
from ._movement import Movement


class DynamicRuleState(NamedTuple):
    """State of :func:`dynamic` without a ``recovery_interval``.

    Attributes:
      growth_count: finite steps since the last growth or overflow.
    """

    growth_count: jax.Array  # shape=(), dtype=int32


State = TypeVar("State", DynamicRuleState, HysteresisRuleState)


def after_step(
    grads_finite: jax.Array,
    backs_off: jax.Array,
    loss_scale: jax.Array,
    state: State,
    move: Movement,
) -> tuple[jax.Array, State, jax.Array]:
    """The scale and the state after a step, and whether a finite one makes it grow.

    Args:
      grads_finite: whether the step was finite.
      backs_off: whether an overflow makes the scale back off.
      loss_scale: the scale of the step.
      state: what the rule remembered at the step.
      move: the settings.
    """
    # Compare before counting, so that no interval can overflow the counter. A state set
    # by hand may hold a count below zero.
    count = jnp.maximum(state.growth_count, 0)
    is_due = count >= move.growth_interval - 1
    grown = move.grown(loss_scale)
    # Where it does not fit, a new interval begins. Trying again at the next step would
    # only wait for an unusually small gradient.
    grows = is_due & move.fits(grown)
    new_scale = jnp.where(
        grads_finite,
        jnp.where(grows, grown, loss_scale),
        jnp.where(backs_off, move.backed_off(loss_scale), loss_scale),
    )
    new_count = jnp.where(grads_finite & ~is_due, count + 1, 0)
    return move.clip(new_scale), state._replace(growth_count=new_count), grows
