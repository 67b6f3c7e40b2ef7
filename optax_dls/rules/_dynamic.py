"""The usual rule: grow after finite steps in a row, back off at an overflow."""

import numbers
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from . import _hysteresis, _settings
from ._hysteresis import HysteresisRuleState, Refill
from ._rule import (
    DEFAULT_GROWTH_INTERVAL,
    DEFAULT_INIT_SCALE,
    DEFAULT_MAX_SCALE,
    DEFAULT_MIN_SCALE,
    DEFAULT_RECOVERY_INTERVAL,
    Rule,
)

# The count of a recovery stops here, so that it never wraps around int32.
LOWEST_COUNT = -(2**30)


class DynamicRuleState(NamedTuple):
    """State of :func:`dynamic`.

    Attributes:
      growth_count: finite steps since the last growth or overflow. A negative count
        means that the scale is recovering: after that many finite steps it is back
        where the first overflow of the streak left it.
    """

    growth_count: jax.Array  # shape=(), dtype=int32


def dynamic(
    *,
    init_scale: ArrayLike = DEFAULT_INIT_SCALE,
    growth_factor: ArrayLike = 2.0,
    backoff_factor: ArrayLike = 0.5,
    growth_interval: ArrayLike = DEFAULT_GROWTH_INTERVAL,
    recovery_interval: ArrayLike | None = DEFAULT_RECOVERY_INTERVAL,
    min_scale: ArrayLike = DEFAULT_MIN_SCALE,
    max_scale: ArrayLike = DEFAULT_MAX_SCALE,
    hysteresis: ArrayLike | None = None,
    hysteresis_refill: Refill = "growth",
    gradient_limit: ArrayLike | None = None,
) -> Rule:
    r"""Grows after N finite steps in a row, backs off at every overflow.

    With the scale :math:`S_t`, the count :math:`c_t` of finite steps since the last
    growth or overflow, and N the growth interval:

    .. math::

      (S_{t+1}, c_{t+1}) = \begin{cases}
        (\mathrm{clip}(S_t \cdot \text{backoff\_factor}),\ 0)
          & \text{overflow} \\
        (\mathrm{clip}(S_t \cdot \text{growth\_factor}),\ 0)
          & \text{finite and } c_t + 1 = N \\
        (S_t,\ c_t + 1) & \text{otherwise}
      \end{cases}

    where clip keeps the scale in [min_scale, max_scale].

    Several overflows in a row are a streak, often a burst of bad batches. Let S be the scale
    at which it began. After a streak the scale recovers, as in TCP's slow start: it grows
    every ``recovery_interval`` finite steps until it is back at
    :math:`S \cdot \text{backoff\_factor}`, where a single overflow would have left it.
    From there on it grows every N finite steps again. An overflow during the recovery ends
    it. Where ``growth_factor`` and ``backoff_factor`` do not undo each other, the recovery
    ends a little below its goal.

    Args:
      init_scale: the first scale. 2**15 is the largest power of two that float16
        holds. A start that is too high costs one skipped step for each halving.
      growth_factor: at least 1 (1 never grows). 2 keeps the scale a power of two,
        so that scaling and unscaling are exact.
      backoff_factor: between 0 and 1, both excluded. 0.5, for the same reason.
      growth_interval: N, a whole number of at least 1. In the steady state every
        growth leads to an overflow, so one step in N + 1 is skipped: 0.05 % at 2000.
      recovery_interval: the growth interval while the scale recovers, a whole number of
        at least 1. ``growth_interval`` is used where it is shorter. None turns recovery
        off. ``benchmarks/rules.py`` shows what the default of 10 gains.
      min_scale: the floor. A scale of 2**-14 still fits a loss far above the range of
        float16, and it is 14 growths away from 1.
      max_scale: the ceiling. A loss of order one overflows float16 long before 2**32,
        and 2**32 is far from the end of float32. A loss of tiny weight may need more.
      hysteresis: how many overflows it takes until the scale backs off, a whole number
        of at least 1. Each of them is skipped all the same. None means 1.
      hysteresis_refill: what restores the number of overflows left. ``"growth"``: only
        a growth of the scale (as in Megatron). ``"finite"``: every finite step (apex).
        ``"backoff"``: every finite step and every backoff (Paddle), so the scale backs
        off at each n-th overflow in a row.
      gradient_limit: the largest magnitude that gradients can hold, 65504 where they are
        computed in float16. The scale does not grow where it would take the largest
        gradient of the step above the limit; a new interval begins instead. This saves
        at most one step in N + 1. It needs ``largest_gradient``, which is a second read
        of the gradients, so the default is None: no limit.

    Settings may be arrays or tracers, as ``optax.inject_hyperparams`` passes them. A
    traced value cannot be compared in Python, so arrays are not checked but clamped to the
    legal range where they are used. A ``max_scale`` or ``init_scale`` array that is not
    finite is replaced by the default, since float16 cannot hold a large scale.

    Returns:
      A :class:`Rule` whose state is a :class:`DynamicRuleState`, or a
      :class:`HysteresisRuleState` where ``hysteresis`` is an array or above 1. If
      ``update`` is called without ``last_finite``, no overflow belongs to a streak.

    Raises:
      TypeError: an argument is not a real number (bool is not), or a number of steps or
        overflows is not an integer.
      ValueError: an argument is out of range, NaN or inf, or the bounds and
        ``init_scale`` are out of order. The message says which.

    Example:
      >>> import jax.numpy as jnp
      >>> import optax_dls as dls
      >>> rule = dls.rules.dynamic(init_scale=8.0, growth_interval=2)
      >>> scale, state = rule.init()
      >>> for finite in (True, True, False):
      ...     scale, state = rule.update(jnp.array(finite), scale, state)
      ...     print(float(scale))
      8.0
      16.0
      8.0

    References:
      Micikevicius et al., `Mixed Precision Training
      <https://arxiv.org/abs/1710.03740>`_, 2018; Jacobson, `Congestion Avoidance and
      Control <https://doi.org/10.1145/52325.52356>`_, 1988
    """
    _settings.check_scales(init_scale, min_scale, max_scale)
    _settings.check_factors(growth_factor, backoff_factor)
    _settings.check_steps(
        "growth_interval",
        growth_interval,
        "Use 2000, or growth_factor=1.0 for a scale that never grows.",
    )
    if recovery_interval is not None:
        _settings.check_steps(
            "recovery_interval",
            recovery_interval,
            "Use 10, or None for the rule without recovery.",
        )
    if hysteresis is not None:
        _settings.check_steps(
            "hysteresis", hysteresis, "Use 2, or None to back off at each overflow."
        )
    if hysteresis_refill not in ("growth", "finite", "backoff"):
        raise ValueError(
            "hysteresis_refill must be 'growth', 'finite' or 'backoff', got "
            f"{hysteresis_refill!r}."
        )
    if gradient_limit is not None:
        _settings.check_gradient_limit(gradient_limit)
    allowed: ArrayLike = 1 if hysteresis is None else hysteresis
    has_hysteresis = not (isinstance(allowed, numbers.Integral) and allowed == 1)

    def clip(loss_scale: ArrayLike) -> jax.Array:
        return _settings.clip(loss_scale, min_scale, max_scale)

    def intervals() -> tuple[_settings.Scalar, jax.Array | None]:
        interval = _settings.steps(growth_interval)
        if recovery_interval is None:
            return interval, None
        return interval, jnp.minimum(_settings.steps(recovery_interval), interval)

    def init() -> tuple[jax.Array, optax.OptState]:
        first_scale = _settings.first_scale(init_scale, min_scale, max_scale)
        count = jnp.zeros((), jnp.int32)
        if not has_hysteresis:
            return first_scale, DynamicRuleState(growth_count=count)
        return first_scale, HysteresisRuleState(
            count, jnp.asarray(_settings.steps(allowed))
        )

    def update(
        grads_finite: jax.Array,
        loss_scale: jax.Array,
        rule_state: optax.OptState,
        *,
        last_finite: ArrayLike = True,
        largest_gradient: ArrayLike = 0.0,
    ) -> tuple[jax.Array, optax.OptState]:
        growth = _settings.clamp(growth_factor, 1, np.inf)
        backoff = _settings.clamp(backoff_factor, 0, 1)
        interval, recovery = intervals()
        grown, backed_off = loss_scale * growth, clip(loss_scale * backoff)

        count = rule_state.growth_count
        # last_finite speaks of the previous step even if its loss was not finite, and the
        # rule was not updated then. A count above 0 follows a finite step all the same.
        was_finite = jnp.asarray(last_finite) | (count > 0)
        if recovery is None:  # a restored state may have been recovering
            count = jnp.maximum(count, 0)
        fits: ArrayLike = True
        if gradient_limit is not None:
            limit = _settings.float32(gradient_limit)
            fits = clip(grown) * largest_gradient <= limit
        grows, finite_count = _count_finite(
            count, interval, recovery, last_finite=was_finite, fits=fits
        )
        backs_off, is_first = jnp.array(True), was_finite
        if has_hysteresis:
            left, backs_off, is_first = _hysteresis.count_overflow(
                rule_state.overflows_left, allowed, hysteresis_refill, was_finite
            )
        streak_count = jnp.where(was_finite, 0, jnp.minimum(count, 0))
        if recovery is not None:
            way_back = _steps_back(backed_off, loss_scale, growth, recovery)
            way_back = jnp.where(backs_off & ~is_first, way_back, 0)
            streak_count = jnp.maximum(streak_count - way_back, LOWEST_COUNT)

        new_scale = jnp.where(
            grads_finite,
            jnp.where(grows, grown, loss_scale),
            jnp.where(backs_off, backed_off, loss_scale),
        )
        new_count = jnp.where(grads_finite, finite_count, streak_count)
        if not has_hysteresis:
            return clip(new_scale), DynamicRuleState(growth_count=new_count)
        refilled = _hysteresis.count_finite(
            rule_state.overflows_left, allowed, hysteresis_refill, grows
        )
        return clip(new_scale), HysteresisRuleState(
            growth_count=new_count,
            overflows_left=jnp.where(grads_finite, refilled, left),
        )

    needs = ("last_finite",) if recovery_interval is not None or has_hysteresis else ()
    if gradient_limit is not None:
        needs = (*needs, "largest_gradient")
    settings = _settings.known(
        init_scale=init_scale,
        min_scale=min_scale,
        max_scale=max_scale,
        growth_interval=growth_interval,
    )
    return Rule(init, update, needs, settings)


def _count_finite(
    count: jax.Array,
    interval: _settings.Scalar,
    recovery: jax.Array | None,
    *,
    last_finite: jax.Array,
    fits: ArrayLike,
) -> tuple[jax.Array, jax.Array]:
    """Whether the scale grows at a finite step, and the count after it."""
    if recovery is not None:
        # A streak ends here. A part of an interval would lead above the goal: drop it.
        whole = count + (-count) % recovery
        count = jnp.where(last_finite, count, whole)
    # Compare before counting, so that no interval can overflow the counter.
    is_due = count >= interval - 1
    if recovery is not None:
        is_due = jnp.where(count < 0, (count + 1) % recovery == 0, is_due)
    grows = is_due & fits
    # A gradient that does not fit ends a recovery, too. Trying again at the next step would
    # only wait for an unusually small gradient.
    restarts = is_due & ((count >= 0) | ~grows)
    return grows, jnp.where(restarts, 0, count + 1)


def _steps_back(
    low: jax.Array,
    high: jax.Array,
    growth_factor: _settings.Scalar,
    recovery: jax.Array,
) -> jax.Array:
    """How many finite steps a recovering scale needs from ``low`` to ``high``."""
    never_grows = growth_factor <= 1
    log2_growth = jnp.log2(jnp.where(never_grows, 2.0, growth_factor))
    growths = jnp.where(never_grows, 0.0, jnp.log2(high / low) / log2_growth)
    whole = jnp.round(growths)
    # The logarithms round: 2.9999 growths are meant to be 3.
    growths = jnp.where(jnp.abs(growths - whole) < 1e-3, whole, growths)
    steps = growths * recovery.astype(jnp.float32)
    return jnp.minimum(steps, -LOWEST_COUNT).astype(jnp.int32)
