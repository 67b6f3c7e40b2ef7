"""Hysteresis: the scale backs off only after several overflows."""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from . import _settings

Refill = Literal["growth", "finite", "backoff"]


class HysteresisRuleState(NamedTuple):
    """State of :func:`dynamic` with ``hysteresis``.

    Attributes:
      growth_count: as in :class:`DynamicRuleState`.
      overflows_left: how many overflows it takes until the scale backs off, at first
        ``hysteresis``. At 0 and below every overflow backs off. With the refill
        ``"backoff"`` only every ``hysteresis``-th does, where this is a multiple of it.
    """

    growth_count: jax.Array  # shape=(), dtype=int32
    overflows_left: jax.Array  # shape=(), dtype=int32


def count_overflow(
    left: jax.Array, hysteresis: ArrayLike, refill: Refill
) -> tuple[jax.Array, jax.Array]:
    """Counts an overflow: the overflows left, and whether the scale backs off."""
    left = jnp.maximum(left - 1, -(2**30))  # so that it never wraps around
    if refill == "backoff":
        return left, left % _settings.steps(hysteresis) == 0
    return left, left <= 0


def count_finite(
    left: jax.Array, hysteresis: ArrayLike, refill: Refill, grows: jax.Array
) -> jax.Array:
    """The overflows left after a finite step."""
    full = jnp.asarray(_settings.steps(hysteresis))
    return jnp.where(grows, full, left) if refill == "growth" else full
