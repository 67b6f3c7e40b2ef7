"""A rule that tolerates a share of overflows."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from . import _settings
from ._rule import (
    DEFAULT_GROWTH_INTERVAL,
    DEFAULT_INIT_SCALE,
    DEFAULT_MAX_SCALE,
    DEFAULT_MIN_SCALE,
    Rule,
)

# Up to here float32 counts exactly.
LARGEST_COUNT = 2**24 - 1


class OverflowRateRuleState(NamedTuple):
    """State of :func:`overflow_rate`.

    Attributes:
      growth_count: finite steps since the last growth or overflow. With
        ``interval_follows_scale`` it counts them since the last overflow, up to
        2**24 - 1.
      growth_interval: the scale grows where ``growth_count`` is a multiple of this. It
        changes only with ``interval_follows_scale``.
      overflow_count: overflows since the last backoff.
      step_count: steps since the scale last moved.
    """

    growth_count: jax.Array  # shape=(), dtype=int32
    growth_interval: jax.Array  # shape=(), dtype=float32
    overflow_count: jax.Array  # shape=(), dtype=int32
    step_count: jax.Array  # shape=(), dtype=int32


def overflow_rate(
    *,
    tolerance: ArrayLike,
    init_scale: ArrayLike = DEFAULT_INIT_SCALE,
    growth_factor: ArrayLike = 2.0,
    backoff_factor: ArrayLike = 0.5,
    growth_interval: ArrayLike = DEFAULT_GROWTH_INTERVAL,
    min_scale: ArrayLike = DEFAULT_MIN_SCALE,
    max_scale: ArrayLike = DEFAULT_MAX_SCALE,
    interval_follows_scale: bool = False,
) -> Rule:
    r"""Backs off only where the share of overflows reaches ``tolerance``.

    .. math::

      \text{back off} \iff \frac{\text{overflows since the last backoff}}
        {\text{steps since the scale last moved}} \ge \text{tolerance}

    Every overflow is skipped all the same. The scale grows as in :func:`dynamic` without
    recovery, on every N-th finite step in a row.

    Args:
      tolerance: from 0 (every overflow backs off) to 1. At 0.25 the first overflow in
        eight steps is ignored and a second one backs off. An overflow of the very first
        step is a share of 1.
      init_scale: the first scale, as in :func:`dynamic`.
      growth_factor: at least 1.
      backoff_factor: between 0 and 1.
      growth_interval: N, a whole number from 1 to 2**24 - 1.
      min_scale: the floor.
      max_scale: the ceiling.
      interval_follows_scale: whether N is multiplied by ``growth_factor`` when the scale
        grows, and by ``backoff_factor`` when it backs off (rounded down to a whole number
        of at least 1). Then low scales grow fast, and high ones seldom overflow.

    Returns:
      A :class:`Rule` whose state is an :class:`OverflowRateRuleState`.

    Raises:
      TypeError, ValueError: as :func:`dynamic`.

    Example:
      >>> import jax.numpy as jnp
      >>> import optax_dls as dls
      >>> rule = dls.rules.overflow_rate(tolerance=0.25, init_scale=8.0)
      >>> scale, state = rule.init()
      >>> for finite in (True,) * 6 + (False, False):
      ...     scale, state = rule.update(jnp.array(finite), scale, state)
      >>> float(scale), int(state.overflow_count)
      (4.0, 0)

    References:
      Ott et al., `fairseq <https://arxiv.org/abs/1904.01038>`_, 2019; Zhang et al.,
      `OPT <https://arxiv.org/abs/2205.01068>`_, 2022
    """
    _settings.check(
        "tolerance", tolerance, "from 0 to 1", lambda x: 0 <= x <= 1, "Use 0.25."
    )
    _settings.check_scales(init_scale, min_scale, max_scale)
    _settings.check_factors(growth_factor, backoff_factor)
    _settings.check_steps(
        "growth_interval", growth_interval, "Use 2000.", LARGEST_COUNT
    )
    if not isinstance(interval_follows_scale, bool):
        raise TypeError(
            "interval_follows_scale must be True or False, got "
            f"{interval_follows_scale!r}."
        )

    def init() -> tuple[jax.Array, optax.OptState]:
        loss_scale = _settings.first_scale(init_scale, min_scale, max_scale)
        count = jnp.zeros((), jnp.int32)
        interval = jnp.asarray(
            _settings.steps(growth_interval, LARGEST_COUNT), jnp.float32
        )
        return loss_scale, OverflowRateRuleState(count, interval, count, count)

    def update(
        grads_finite: jax.Array, loss_scale: jax.Array, rule_state: optax.OptState
    ) -> tuple[jax.Array, optax.OptState]:
        growth = _settings.clamp(growth_factor, 1, np.inf)
        backoff = _settings.clamp(backoff_factor, 0, 1)
        interval = rule_state.growth_interval

        growth_count = jnp.minimum(rule_state.growth_count + 1, LARGEST_COUNT)
        growth_count = jnp.where(grads_finite, growth_count, 0)
        grows = grads_finite & (growth_count.astype(jnp.float32) % interval == 0)

        steps = optax.safe_increment(rule_state.step_count)
        overflows = optax.safe_increment(rule_state.overflow_count)
        overflows = jnp.where(grads_finite, rule_state.overflow_count, overflows)
        share = overflows.astype(jnp.float32) / steps.astype(jnp.float32)
        is_intolerable = share >= _settings.float32(tolerance)
        backs_off = jnp.logical_not(grads_finite) & is_intolerable

        if interval_follows_scale:
            # The sum makes up for a product that rounds to just below a whole number.
            shorter = jnp.maximum(jnp.floor(interval * backoff + 1e-4), 1.0)
            interval = jnp.where(grows, interval * growth, interval)
            interval = jnp.where(backs_off, shorter, interval)
        else:
            growth_count = jnp.where(grows, 0, growth_count)
        factor = jnp.where(grows, growth, jnp.where(backs_off, backoff, 1.0))
        return _settings.clip(loss_scale * factor, min_scale, max_scale), (
            OverflowRateRuleState(
                growth_count=growth_count,
                growth_interval=interval,
                overflow_count=jnp.where(backs_off, 0, overflows),
                step_count=jnp.where(grows | backs_off, 0, steps),
            )
        )

    settings = _settings.known(
        init_scale=init_scale,
        min_scale=min_scale,
        max_scale=max_scale,
        growth_interval=growth_interval,
    )
    return Rule(init, update, settings=settings)
