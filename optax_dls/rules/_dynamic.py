"""The usual rule: grow after many finite steps, back off at an overflow."""

import numbers

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from . import _classic, _hysteresis, _level, _settings
from ._hysteresis import HysteresisRuleState, Refill
from ._movement import Movement
from ._rule import (
    DEFAULT_GROWTH_INTERVAL,
    DEFAULT_INIT_SCALE,
    DEFAULT_MAX_SCALE,
    DEFAULT_MIN_SCALE,
    DEFAULT_RECOVERY_INTERVAL,
    Rule,
)


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
    r"""Grows after N finite steps, backs off at an overflow, and returns to its level.

    On a quiet run it is the usual rule: the scale doubles after 2000 finite steps, and an
    overflow that follows halves it. A bad batch now and then does not push it down, as long
    as R finite steps or more come for each of them. The usual rule counts finite steps in a
    row, and sinks to its floor.

    The level is the scale that has proved itself. At first it is ``init_scale``, which is
    untried until the first finite step: before that each overflow lowers the level.
    Let N be the growth interval, R the recovery interval, t the finite steps in a row at the
    present scale, and n the trial interval, at first N. To grow and to back off are one
    multiplication by a factor. Growth stops at the level, except for a trial.

    At the level.
      The growth count is the number of finite steps since the last trial began or failed.
      When it is n or more, and t is R or more, a trial begins: the scale grows above its
      level.
    On trial.
      Let t be what it was when the trial began. When the new scale has lasted min(t, n) / 2
      finite steps, it is the level. Then n becomes N if it was above N / 2; else it is
      halved, to 5 R at least. If the scale overflows before, it backs off, and n is doubled,
      to N at most. If n was N already and the first step of the trial was finite, n is
      3 N / 4, so that periodic bad batches do not meet every trial.
    An overflow at the level, or on the way back.
      It is a failure. The scale backs off and is *watched*: it grows after 3 t finite steps,
      at least R and at most N. At the fourth failure the level is given up instead: the
      lower scale is the level, the growth count is 0, and n is 100 t, at least 5 R and at
      most N.
    An overflow of a watched scale.
      The scale above was not to blame: failures are counted anew. If no finite step came
      between, the scale backs off again, and is watched for R finite steps. If one came, the
      scale stays, and grows after the next finite step.
    On the way back, below the level and not watched.
      The scale grows after R finite steps. Then failures are counted anew, as when a trial
      begins.

    A scale that is set to another value from outside, by
    ``optax.tree.set(state, loss_scale=...)``, is the level from then on, untried.
    ``benchmarks/rules.py`` shows what all this gains.

    ``recovery_interval=None`` gives the classic rule, that of PyTorch. With the scale
    :math:`S_t`, and the count :math:`c_t` of finite steps since the last growth or overflow:

    .. math::

      (S_{t+1}, c_{t+1}) = \begin{cases}
        (\mathrm{clip}(S_t \cdot \text{backoff\_factor}),\ 0)
          & \text{overflow} \\
        (\mathrm{clip}(S_t \cdot \text{growth\_factor}),\ 0)
          & \text{finite and } c_t + 1 = N \\
        (S_t,\ c_t + 1) & \text{otherwise}
      \end{cases}

    Args:
      init_scale: the first scale. 2**15 is the largest power of two that float16
        holds. A start that is too high costs one skipped step for each halving.
      growth_factor: at least 1 (1 never grows). 2 keeps the scale a power of two,
        so that scaling and unscaling are exact.
      backoff_factor: between 0 and 1, both excluded. 0.5, for the same reason.
      growth_interval: N, a whole number of at least 1: finite steps before the scale
        grows above its level. In the steady state every such growth leads to an overflow, so
        one step in N + 1 is skipped: 0.05 % at 2000.
      recovery_interval: R, finite steps at each scale on the way back to the level, a
        whole number of at least 1. ``growth_interval`` is used where it is shorter. 10 makes
        a burst of 20 bad batches good in 200 steps. After a lone overflow at the level it is
        3 t. None gives the classic rule.
      min_scale: the floor. A scale of 2**-14 still fits a loss far above the range of
        float16, and it is 14 growths away from 1.
      max_scale: the ceiling. A loss of order one overflows float16 long before 2**32,
        and 2**32 is far from the end of float32. A loss of tiny weight may need more.
      hysteresis: how many overflows it takes until the scale backs off, a whole number
        of at least 1. Each of them is skipped all the same, and ends the finite steps in a
        row. None means 1.
      hysteresis_refill: what restores the number of overflows left. ``"growth"``: only
        a growth of the scale (as in Megatron). ``"finite"``: every finite step (apex).
        ``"backoff"``: every finite step and every backoff (Paddle), so the scale backs
        off at each n-th overflow in a row.
      gradient_limit: the largest magnitude that gradients can hold, 65504 where they are
        computed in float16. The scale does not grow where it would take the largest
        gradient of the step above the limit. A trial waits for a new interval then, and
        the way back twice as long as before. So a growth rarely costs a step. It needs
        ``largest_gradient``, which is a second read of the gradients, so the default is
        None: no limit.

    Settings may be arrays or tracers, as ``optax.inject_hyperparams`` passes them. A
    traced value cannot be compared in Python, so arrays are not checked but clamped to the
    legal range where they are used. A ``max_scale`` or ``init_scale`` array that is not
    finite is replaced by the default, since float16 cannot hold a large scale.

    Returns:
      A :class:`Rule` whose state is a :class:`LevelRuleState`. Without a
      ``recovery_interval`` it is a :class:`DynamicRuleState`, or a
      :class:`HysteresisRuleState` where ``hysteresis`` is an array or above 1.

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
      <https://arxiv.org/abs/1710.03740>`_, 2018
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
            "Use 10, or None for the classic rule, which does not return to a level.",
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

    def init() -> tuple[jax.Array, optax.OptState]:
        first_scale = _settings.first_scale(init_scale, min_scale, max_scale)
        left = jnp.asarray(_settings.steps(allowed))
        if recovery_interval is not None:
            return first_scale, _level.first_state(first_scale, left)
        count = jnp.zeros((), jnp.int32)
        if has_hysteresis:
            return first_scale, HysteresisRuleState(count, left)
        return first_scale, _classic.DynamicRuleState(count)

    def update(
        grads_finite: jax.Array,
        loss_scale: jax.Array,
        rule_state: optax.OptState,
        *,
        largest_gradient: ArrayLike = 0.0,
    ) -> tuple[jax.Array, optax.OptState]:
        interval = _settings.steps(growth_interval)
        recovery = interval if recovery_interval is None else recovery_interval
        move = Movement(
            growth_factor=_settings.clamp(growth_factor, 1, np.inf),
            backoff_factor=_settings.clamp(backoff_factor, 0, 1),
            bounds=(min_scale, max_scale),
            growth_interval=interval,
            recovery_interval=_settings.steps(jnp.minimum(recovery, interval)),
            largest_gradient=largest_gradient,
            gradient_limit=gradient_limit,
        )
        way = _classic if recovery_interval is None else _level
        left, backs_off = None, jnp.array(True)
        if has_hysteresis:
            left, backs_off = _hysteresis.count_overflow(
                rule_state.overflows_left, allowed, hysteresis_refill
            )
        new_scale, new_state, grows = way.after_step(
            grads_finite, backs_off, loss_scale, rule_state, move
        )
        if left is not None:
            refilled = _hysteresis.count_finite(
                rule_state.overflows_left, allowed, hysteresis_refill, grows
            )
            left = jnp.where(grads_finite, refilled, left)
            new_state = new_state._replace(overflows_left=left)
        return new_scale, new_state

    needs = () if gradient_limit is None else ("largest_gradient",)
    settings = _settings.known(
        init_scale=init_scale,
        min_scale=min_scale,
        max_scale=max_scale,
        growth_interval=growth_interval,
    )
    return Rule(init, update, needs, settings)
