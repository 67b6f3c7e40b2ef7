"""Hysteresis: so many overflows before the scale backs off."""

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
      overflows_left: overflows until the scale backs off, ``hysteresis`` when whole. At
        0 and below the tolerance is spent: every overflow backs off, or, with the refill
        ``"backoff"``, each at a multiple of ``hysteresis``.
    """

    growth_count: jax.Array  # shape=(), dtype=int32
    overflows_left: jax.Array  # shape=(), dtype=int32


def count_overflow(
    left: jax.Array, hysteresis: ArrayLike, refill: Refill, last_finite: ArrayLike
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What is left, whether to back off, and whether that is the streak's first time."""
    left = jnp.maximum(left - 1, -(2**30))  # so that it never wraps around
    is_first = jnp.asarray(last_finite) | (left == 0)
    if refill == "backoff":
        return left, left % _settings.steps(hysteresis) == 0, is_first
    return left, left <= 0, is_first


def count_finite(
    left: jax.Array, hysteresis: ArrayLike, refill: Refill, grows: jax.Array
) -> jax.Array:
    """What is left after a finite step."""
    whole = jnp.asarray(_settings.steps(hysteresis))
    return jnp.where(grows, whole, left) if refill == "growth" else whole
