"""A rule that grows a little at every finite step."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from . import _settings
from ._rule import (
    DEFAULT_GROWTH_INTERVAL,
    DEFAULT_MAX_SCALE,
    DEFAULT_MIN_SCALE,
    Rule,
)

LARGEST_INTERVAL = 100_000


class GradualRuleState(NamedTuple):
    """State of :func:`gradual`.

    Attributes:
      has_overflowed: whether a step has overflowed since ``init``.
    """

    has_overflowed: jax.Array  # shape=(), dtype=bool


def gradual(
    *,
    init_scale: ArrayLike = 1.0,
    growth_factor: ArrayLike = 2.0,
    backoff_factor: ArrayLike = 0.5,
    growth_interval: ArrayLike = DEFAULT_GROWTH_INTERVAL,
    min_scale: ArrayLike = DEFAULT_MIN_SCALE,
    max_scale: ArrayLike = DEFAULT_MAX_SCALE,
) -> Rule:
    r"""Grows by a fraction at every finite step, and fast until the first overflow.

    .. math::

      S_{t+1} = \mathrm{clip}(S_t \cdot \begin{cases}
        \text{backoff\_factor} & \text{overflow} \\
        \text{growth\_factor} & \text{finite, and none has overflowed yet} \\
        \text{growth\_factor}^{1/N} & \text{finite otherwise}
      \end{cases})

    It grows as fast as :func:`dynamic`, but in N smaller steps. Its scales are no powers
    of two, so unscaling rounds. Prefer :func:`dynamic` where you can choose.

    Args:
      init_scale: the first scale. It may be low, since the first steps double it.
      growth_factor: at least 1.
      backoff_factor: between 0 and 1.
      growth_interval: N, a whole number from 1 to 100 000. With a longer one float32
        would round the growth of a step away.
      min_scale: the floor.
      max_scale: the ceiling.

    Returns:
      A :class:`Rule` whose state is a :class:`GradualRuleState`.

    Raises:
      TypeError, ValueError: as :func:`dynamic`.

    Example:
      >>> import jax.numpy as jnp
      >>> import optax_dls as dls
      >>> rule = dls.rules.gradual(growth_interval=2)
      >>> scale, state = rule.init()
      >>> for finite in (True, True, False, True):
      ...     scale, state = rule.update(jnp.array(finite), scale, state)
      ...     print(f"{scale:.3f}")
      2.000
      4.000
      2.000
      2.828

    References:
      Tokui et al., `Chainer <https://arxiv.org/abs/1908.00213>`_, 2019
    """
    _settings.check_scales(init_scale, min_scale, max_scale)
    _settings.check_factors(growth_factor, backoff_factor)
    _settings.check_steps(
        "growth_interval", growth_interval, "Use 2000.", LARGEST_INTERVAL
    )

    def init() -> tuple[jax.Array, optax.OptState]:
        loss_scale = _settings.first_scale(init_scale, min_scale, max_scale)
        return loss_scale, GradualRuleState(has_overflowed=jnp.array(False))

    def update(
        grads_finite: jax.Array, loss_scale: jax.Array, rule_state: optax.OptState
    ) -> tuple[jax.Array, optax.OptState]:
        growth = _settings.clamp(growth_factor, 1, np.inf)
        interval = _settings.steps(growth_interval, LARGEST_INTERVAL)
        fraction = growth ** (1 / interval.astype(jnp.float32))
        backoff = _settings.clamp(backoff_factor, 0, 1)
        growth = jnp.where(rule_state.has_overflowed, fraction, growth)
        loss_scale = loss_scale * jnp.where(grads_finite, growth, backoff)
        return _settings.clip(loss_scale, min_scale, max_scale), GradualRuleState(
            has_overflowed=rule_state.has_overflowed | jnp.logical_not(grads_finite)
        )

    settings = _settings.known(
        init_scale=init_scale,
        min_scale=min_scale,
        max_scale=max_scale,
        growth_interval=growth_interval,
    )
    return Rule(init, update, settings=settings)
