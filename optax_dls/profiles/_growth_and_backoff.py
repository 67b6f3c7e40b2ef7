"""The rules of other systems, built from ours."""

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from .. import rules
from ..rules import _settings
from ..rules._rule import LARGEST_SCALE, SMALLEST_SCALE


def torch(
    init_scale: ArrayLike = 2.0**16,
    growth_factor: ArrayLike = 2.0,
    backoff_factor: ArrayLike = 0.5,
    growth_interval: ArrayLike = 2000,
) -> rules.Rule:
    """``torch.amp.GradScaler``, and FSDP's ``ShardedGradScaler``.

    With two optimizers under one scaler torch lets the one whose gradients are finite
    step; here one wrapper is one optimizer.

    Example:
      >>> import optax_dls as dls
      >>> scale, _ = dls.profiles.torch().init()
      >>> float(scale)
      65536.0
    """
    return _classic(init_scale, growth_factor, backoff_factor, growth_interval)


def megatron(
    initial_scale: ArrayLike = 2.0**32,
    min_scale: ArrayLike = 1.0,
    growth_factor: ArrayLike = 2.0,
    backoff_factor: ArrayLike = 0.5,
    growth_interval: ArrayLike = 1000,
    hysteresis: ArrayLike = 2,
) -> rules.Rule:
    """Megatron's ``DynamicGradScaler``: growth alone makes the hysteresis whole again."""
    return _classic(
        initial_scale,
        growth_factor,
        backoff_factor,
        growth_interval,
        min_scale=min_scale,
        hysteresis=hysteresis,
    )


def colossalai(
    initial_scale: ArrayLike = 2.0**16,
    growth_factor: ArrayLike = 2.0,
    backoff_factor: ArrayLike = 0.5,
    growth_interval: ArrayLike = 1000,
    min_scale: ArrayLike | None = None,
    max_scale: ArrayLike | None = None,
    hysteresis: ArrayLike = 2,
) -> rules.Rule:
    """ColossalAI's ``DynamicGradScaler``: Megatron's, with bounds."""
    return _classic(
        initial_scale,
        growth_factor,
        backoff_factor,
        growth_interval,
        min_scale=SMALLEST_SCALE if min_scale is None else min_scale,
        max_scale=LARGEST_SCALE if max_scale is None else max_scale,
        hysteresis=hysteresis,
    )


def deepspeed(
    init_scale: ArrayLike = 2.0**16,
    scale_window: ArrayLike = 1000,
    min_scale: ArrayLike = 1.0,
    delayed_shift: ArrayLike = 2,
    consecutive_hysteresis: bool = False,
    raise_error_at_min_scale: bool = True,
) -> rules.Rule:
    """DeepSpeed's ``DynamicLossScaler``: the first growth comes one step late.

    After an overflow, and at the start, it takes ``scale_window`` + 1 finite steps to
    grow, and ``scale_window`` from then on. ``raise_error_at_min_scale`` is taken for the
    sake of its configurations and does nothing here.
    """
    del raise_error_at_min_scale
    rule = _classic(
        init_scale,
        2.0,
        0.5,
        _one_more("scale_window", scale_window),
        hysteresis=delayed_shift,
        hysteresis_refill="finite" if consecutive_hysteresis else "growth",
    )
    rule = _with_floor_for_backoffs(rule, "min_scale", min_scale)

    def update(
        grads_finite: jax.Array,
        loss_scale: jax.Array,
        rule_state: optax.OptState,
        **told: jax.Array,
    ) -> tuple[jax.Array, optax.OptState]:
        loss_scale, new = rule.update(grads_finite, loss_scale, rule_state, **told)
        has_grown = grads_finite & (new.growth_count == 0)
        count = jnp.where(has_grown, 1, new.growth_count)
        return loss_scale, new._replace(growth_count=count)

    return rule._replace(update=update)


def fairseq(
    init_scale: ArrayLike = 2.0**15,
    scale_factor: ArrayLike = 2.0,
    scale_window: ArrayLike = 2000,
    tolerance: ArrayLike = 0.0,
    threshold: ArrayLike | None = None,
    min_loss_scale: ArrayLike = 1e-4,
) -> rules.Rule:
    """fairseq's ``DynamicLossScaler``: backs off at a share of overflows, to ``threshold``.

    ``min_loss_scale`` is where fairseq raises an error.
    """
    rule = _overflow_rate(init_scale, scale_factor, scale_window, tolerance)
    if threshold is not None:
        return _with_floor_for_backoffs(rule, "threshold", threshold)
    return _with_floor_for_backoffs(rule, "min_loss_scale", min_loss_scale)


def metaseq(
    init_scale: ArrayLike = 4.0,
    scale_factor: ArrayLike = 2.0,
    scale_window: ArrayLike = 256,
    tolerance: ArrayLike = 0.0,
    threshold: ArrayLike | None = None,
    min_loss_scale: ArrayLike = 2.0**-5,
) -> rules.Rule:
    """metaseq's ``DynamicLossScaler``: fairseq's, with a window that follows the scale.

    A backoff that would end below ``min_loss_scale`` shortens the window alone.
    """
    rule = _overflow_rate(
        init_scale, scale_factor, scale_window, tolerance, interval_follows_scale=True
    )
    if threshold is not None:
        rule = _with_floor_for_backoffs(rule, "threshold", threshold)
    _settings.check_scale("min_loss_scale", min_loss_scale)

    def update(
        grads_finite: jax.Array, loss_scale: jax.Array, rule_state: optax.OptState
    ) -> tuple[jax.Array, optax.OptState]:
        new_scale, rule_state = rule.update(grads_finite, loss_scale, rule_state)
        is_low = ~grads_finite & (new_scale < jnp.asarray(min_loss_scale, jnp.float32))
        return jnp.where(is_low, loss_scale, new_scale), rule_state

    return rule._replace(update=update)


def apex_amp(
    init_scale: ArrayLike = 2.0**16,
    scale_factor: ArrayLike = 2.0,
    scale_window: ArrayLike = 2000,
    min_loss_scale: ArrayLike | None = None,
    max_loss_scale: ArrayLike = 2.0**24,
) -> rules.Rule:
    """apex's ``amp.LossScaler``, which ignores its ``scale_factor``."""
    del scale_factor
    _settings.check_scale("init_scale", init_scale)
    return _classic(
        jnp.minimum(init_scale, max_loss_scale),
        2.0,
        0.5,
        scale_window,
        min_scale=SMALLEST_SCALE if min_loss_scale is None else min_loss_scale,
        max_scale=jnp.minimum(max_loss_scale, LARGEST_SCALE),
    )


def apex_fp16_utils(
    init_scale: ArrayLike = 2.0**32,
    scale_factor: ArrayLike = 2.0,
    scale_window: ArrayLike = 1000,
) -> rules.Rule:
    """apex's ``fp16_utils.DynamicLossScaler``, with a floor of 1."""
    return _one_factor(
        init_scale, "scale_factor", scale_factor, scale_window, min_scale=1.0
    )


def apex_hysteresis(
    init_scale: ArrayLike,
    growth_factor: ArrayLike,
    backoff_factor: ArrayLike,
    growth_interval: ArrayLike,
    hysteresis: ArrayLike,
) -> rules.Rule:
    """apex's ``update_scale_hysteresis``: a finite step makes the hysteresis whole again.

    The function has no defaults.
    """
    return _classic(
        init_scale,
        growth_factor,
        backoff_factor,
        growth_interval,
        hysteresis=hysteresis,
        hysteresis_refill="finite",
    )


def tensorflow(
    initial_loss_scale: ArrayLike = 2.0**15,
    increment_period: ArrayLike = 2000,
    multiplier: ArrayLike = 2.0,
) -> rules.Rule:
    """TensorFlow 1's ``DynamicLossScale``, with a floor of 1."""
    return _one_factor(
        initial_loss_scale, "multiplier", multiplier, increment_period, min_scale=1.0
    )


def tf_keras(
    initial_scale: ArrayLike = 2.0**15, dynamic_growth_steps: ArrayLike = 2000
) -> rules.Rule:
    """The ``LossScaleOptimizer`` of Keras 2, with a floor of 1."""
    return _one_factor(
        initial_scale, "factor", 2.0, dynamic_growth_steps, min_scale=1.0
    )


def keras(
    initial_scale: ArrayLike = 2.0**15, dynamic_growth_steps: ArrayLike = 2000
) -> rules.Rule:
    """The ``LossScaleOptimizer`` of Keras 3."""
    return _one_factor(initial_scale, "factor", 2.0, dynamic_growth_steps)


def flax(
    scale: ArrayLike = 2.0**16,
    growth_factor: ArrayLike = 2.0,
    backoff_factor: ArrayLike = 0.5,
    growth_interval: ArrayLike = 2000,
    minimum_scale: ArrayLike | None = None,
) -> rules.Rule:
    """Flax's ``DynamicScale``: it grows after ``growth_interval`` + 1 finite steps.

    Its own ``minimum_scale`` of the smallest float32 is our floor, like None.
    """
    return _classic(
        scale,
        growth_factor,
        backoff_factor,
        _one_more("growth_interval", growth_interval),
        min_scale=SMALLEST_SCALE if minimum_scale is None else minimum_scale,
    )


def jmp(
    loss_scale: ArrayLike = 2.0**15,
    period: ArrayLike = 2000,
    factor: ArrayLike = 2.0,
    min_loss_scale: ArrayLike = 1.0,
) -> rules.Rule:
    """jmp's ``DynamicLossScale``. Under ``jit`` it forgets its floor and uses 1."""
    return _one_factor(loss_scale, "factor", factor, period, min_scale=min_loss_scale)


def jamp(
    loss_scale: ArrayLike = 2.0**15,
    period: ArrayLike = 2000,
    factor: ArrayLike = 2.0,
    min_loss_scale: ArrayLike = 1.0,
) -> rules.Rule:
    """jamp's ``DynamicLossScale``: jmp's, with a floor that stays."""
    return jmp(loss_scale, period, factor, min_loss_scale)


def mpx(
    loss_scaling: ArrayLike = 2.0**15,
    min_loss_scaling: ArrayLike = 1.0,
    factor: ArrayLike = 2.0,
    period: ArrayLike = 2000,
) -> rules.Rule:
    """mpx's ``DynamicLossScaling``, with a ceiling of 65504, and powers of two below it.

    The first scale may be above the ceiling, for one step.
    """
    _settings.check_scale("loss_scaling", loss_scaling)
    rule = _one_factor(
        jnp.minimum(loss_scaling, 65504.0),
        "factor",
        factor,
        period,
        min_scale=min_loss_scaling,
        max_scale=65504.0,
    )

    def init() -> tuple[jax.Array, optax.OptState]:
        scale = _settings.first_scale(loss_scaling, min_loss_scaling, LARGEST_SCALE)
        return scale, rule.init()[1]

    return rule._replace(init=init)


def jaxamp(
    scaler: ArrayLike = 2.0**15,
    adjust_factor: ArrayLike = 2.0,
    patience: ArrayLike = 2000,
) -> rules.Rule:
    """jaxamp's scaler without retries: it grows after ``patience`` + 1 finite steps."""
    return _one_factor(
        scaler, "adjust_factor", adjust_factor, _one_more("patience", patience)
    )


def mindspore(
    scale_value: ArrayLike, scale_factor: ArrayLike, scale_window: ArrayLike
) -> rules.Rule:
    """MindSpore's ``amp.DynamicLossScaler``, with a floor of 1; it has no defaults."""
    return _one_factor(
        scale_value, "scale_factor", scale_factor, scale_window, min_scale=1.0
    )


def mindspore_manager(
    init_loss_scale: ArrayLike = 2.0**24,
    scale_factor: ArrayLike = 2.0,
    scale_window: ArrayLike = 2000,
) -> rules.Rule:
    """MindSpore's ``DynamicLossScaleManager``, with a floor of 1."""
    return _one_factor(
        init_loss_scale, "scale_factor", scale_factor, scale_window, min_scale=1.0
    )


def paddle(
    init_loss_scaling: ArrayLike = 2.0**16,
    incr_ratio: ArrayLike = 2.0,
    decr_ratio: ArrayLike = 0.5,
    incr_every_n_steps: ArrayLike = 2000,
    decr_every_n_nan_or_inf: ArrayLike = 1,
) -> rules.Rule:
    """Paddle's ``GradScaler``: it backs off at each n-th overflow in a row."""
    return _classic(
        init_loss_scaling,
        incr_ratio,
        decr_ratio,
        incr_every_n_steps,
        hysteresis=decr_every_n_nan_or_inf,
        hysteresis_refill="backoff",
    )


def paddle_static(
    init_loss_scaling: ArrayLike = 2.0**16,
    incr_ratio: ArrayLike = 2.0,
    decr_ratio: ArrayLike = 0.5,
    incr_every_n_steps: ArrayLike = 2000,
    decr_every_n_nan_or_inf: ArrayLike = 1,
) -> rules.Rule:
    """Paddle's operator ``update_loss_scaling``: :func:`paddle` with a floor of 1."""
    return _classic(
        init_loss_scaling,
        incr_ratio,
        decr_ratio,
        incr_every_n_steps,
        min_scale=1.0,
        hysteresis=decr_every_n_nan_or_inf,
        hysteresis_refill="backoff",
    )


def openseq2seq_backoff(
    scale_min: ArrayLike = 1.0,
    scale_max: ArrayLike = 2.0**14,
    step_factor: ArrayLike = 2.0,
    step_window: ArrayLike = 2000,
) -> rules.Rule:
    """OpenSeq2Seq's ``BackoffScaler``, which starts at its ceiling."""
    return _one_factor(
        scale_max,
        "step_factor",
        step_factor,
        step_window,
        min_scale=scale_min,
        max_scale=scale_max,
    )


def openseq2seq_logmax(
    scale_min: ArrayLike = 1.0,
    scale_max: ArrayLike = 2.0**14,
    beta1: ArrayLike = 0.99,
    beta2: ArrayLike = 0.999,
    overflow_std_dev: ArrayLike = 3.09,
) -> rules.Rule:
    """OpenSeq2Seq's ``LogMaxScaler``, to a percent, until the first overflow.

    Theirs takes an overflow for a gradient of 2**65536 and stays at its floor from then
    on; this one takes it for what :func:`rules.log_normal` does, and goes on.
    """
    # Here, as it takes longer to import than all the rest.
    from jax.scipy.special import ndtr

    _settings.check(
        "overflow_std_dev", overflow_std_dev, "above 0", lambda x: x > 0, "Use 3.09."
    )
    return rules.log_normal(
        init_scale=jnp.clip(1.0, scale_min, scale_max),
        overflow_probability=ndtr(-jnp.asarray(overflow_std_dev, jnp.float32)),
        mean_decay=beta1,
        variance_decay=beta2,
        gradient_limit=2.0**16,
        growth_factor=float("inf"),
        min_scale=scale_min,
        max_scale=scale_max,
        power_of_two=False,
    )


def chainer(interval: ArrayLike = 1000) -> rules.Rule:
    """Chainer's: a fractional growth at every finite step, between 1 and 65504."""
    return rules.gradual(
        init_scale=1.0, growth_interval=interval, min_scale=1.0, max_scale=65504.0
    )


def optax_apply_if_finite(max_consecutive_errors: int = 0) -> rules.Rule:
    """``optax.apply_if_finite``: no scale, but it skips.

    Ours never gives up: theirs applies NaN after ``max_consecutive_errors``.
    """
    del max_consecutive_errors
    return rules.static(1.0)


def _classic(
    init_scale: ArrayLike,
    growth_factor: ArrayLike,
    backoff_factor: ArrayLike,
    growth_interval: ArrayLike,
    *,
    min_scale: ArrayLike = SMALLEST_SCALE,
    max_scale: ArrayLike = LARGEST_SCALE,
    hysteresis: ArrayLike | None = None,
    hysteresis_refill: rules.Refill = "growth",
) -> rules.Rule:
    """The rule without recovery, and without bounds where a system has none."""
    return rules.dynamic(
        init_scale=init_scale,
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        growth_interval=growth_interval,
        recovery_interval=None,
        min_scale=min_scale,
        max_scale=max_scale,
        hysteresis=hysteresis,
        hysteresis_refill=hysteresis_refill,
    )


def _one_factor(
    init_scale: ArrayLike,
    name: str,
    factor: ArrayLike,
    growth_interval: ArrayLike,
    *,
    min_scale: ArrayLike = SMALLEST_SCALE,
    max_scale: ArrayLike = LARGEST_SCALE,
) -> rules.Rule:
    """Of systems that multiply by the factor to grow and divide by it to back off."""
    _check_factor(name, factor)
    return _classic(
        init_scale,
        factor,
        1 / factor,
        growth_interval,
        min_scale=min_scale,
        max_scale=max_scale,
    )


def _overflow_rate(
    init_scale: ArrayLike,
    scale_factor: ArrayLike,
    scale_window: ArrayLike,
    tolerance: ArrayLike,
    *,
    interval_follows_scale: bool = False,
) -> rules.Rule:
    _check_factor("scale_factor", scale_factor)
    return rules.overflow_rate(
        tolerance=tolerance,
        init_scale=init_scale,
        growth_factor=scale_factor,
        backoff_factor=1 / scale_factor,
        growth_interval=scale_window,
        min_scale=SMALLEST_SCALE,
        max_scale=LARGEST_SCALE,
        interval_follows_scale=interval_follows_scale,
    )


def _check_factor(name: str, factor: ArrayLike) -> None:
    _settings.check(name, factor, "above 1", lambda x: x > 1, "Use 2.0.")


def _one_more(name: str, interval: ArrayLike) -> ArrayLike:
    """An interval and one, which is still an int32."""
    _settings.check_steps(name, interval, "Use 2000.")
    return _settings.steps(interval, 2**31 - 2) + 1


def _with_floor_for_backoffs(
    rule: rules.Rule, name: str, floor: ArrayLike
) -> rules.Rule:
    """A floor where the scale backs off to, which need not be below the first scale."""
    _settings.check_scale(name, floor)

    def update(
        grads_finite: jax.Array,
        loss_scale: jax.Array,
        rule_state: optax.OptState,
        **told: jax.Array,
    ) -> tuple[jax.Array, optax.OptState]:
        new_scale, rule_state = rule.update(
            grads_finite, loss_scale, rule_state, **told
        )
        floored = _settings.clip(new_scale, floor, LARGEST_SCALE)
        return jnp.where(new_scale < loss_scale, floored, new_scale), rule_state

    return rule._replace(update=update)
