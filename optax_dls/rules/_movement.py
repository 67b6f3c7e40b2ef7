"""How far and how fast the settings let a scale move."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from . import _settings


class Movement(NamedTuple):
    """The settings of :func:`dynamic` at one step, in their legal ranges.

    Attributes:
      growth_factor: of at least 1.
      backoff_factor: between 0 and 1.
      bounds: the floor and the ceiling of the scale.
      growth_interval: finite steps before a growth.
      recovery_interval: finite steps before a scale goes back up; at most
        ``growth_interval``.
      largest_gradient: of this step; it means something only where there is a limit.
      gradient_limit: what it must not pass after a growth, or None.
    """

    growth_factor: _settings.Scalar
    backoff_factor: _settings.Scalar
    bounds: tuple[ArrayLike, ArrayLike]
    growth_interval: _settings.Scalar
    recovery_interval: _settings.Scalar
    largest_gradient: ArrayLike
    gradient_limit: ArrayLike | None

    def clip(self, loss_scale: ArrayLike) -> jax.Array:
        return _settings.clip(loss_scale, *self.bounds)

    def grown(self, loss_scale: jax.Array) -> jax.Array:
        return self.clip(loss_scale * self.growth_factor)

    def backed_off(self, loss_scale: jax.Array) -> jax.Array:
        return self.clip(loss_scale * self.backoff_factor)

    def fits(self, loss_scale: jax.Array) -> jax.Array:
        """Whether the largest gradient stays within its limit under this scale."""
        if self.gradient_limit is None:
            return jnp.array(True)
        limit = _settings.float32(self.gradient_limit)
        return loss_scale * self.largest_gradient <= limit
