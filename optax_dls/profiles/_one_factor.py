"""Systems that multiply by one factor to grow and divide by it to back off."""

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from .. import rules
from ..rules import _settings
from ..rules._rule import LARGEST_SCALE, SMALLEST_SCALE
from ._building_blocks import check_factor, classic, one_more

LARGEST_FLOAT16 = 65504.0


def apex_amp(
    init_scale: ArrayLike = 2.0**16,
    scale_factor: ArrayLike = 2.0,
    scale_window: ArrayLike = 2000,
    min_loss_scale: ArrayLike | None = None,
    max_loss_scale: ArrayLike = 2.0**24,
) -> rules.Rule:
    """apex's ``amp.LossScaler``: the factor is 2, whatever ``scale_factor`` says."""
    del scale_factor
    _settings.check_scale("init_scale", init_scale)
    return _one_factor(
        jnp.minimum(init_scale, max_loss_scale),
        2.0,
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
    return _one_factor(init_scale, scale_factor, scale_window, min_scale=1.0)


def tensorflow(
    initial_loss_scale: ArrayLike = 2.0**15,
    increment_period: ArrayLike = 2000,
    multiplier: ArrayLike = 2.0,
) -> rules.Rule:
    """TensorFlow 1's ``DynamicLossScale``, with a floor of 1."""
    return _one_factor(
        initial_loss_scale,
        multiplier,
        increment_period,
        name="multiplier",
        min_scale=1.0,
    )


def tf_keras(
    initial_scale: ArrayLike = 2.0**15, dynamic_growth_steps: ArrayLike = 2000
) -> rules.Rule:
    """The ``LossScaleOptimizer`` of Keras 2, with a floor of 1."""
    return _one_factor(initial_scale, 2.0, dynamic_growth_steps, min_scale=1.0)


def keras(
    initial_scale: ArrayLike = 2.0**15, dynamic_growth_steps: ArrayLike = 2000
) -> rules.Rule:
    """The ``LossScaleOptimizer`` of Keras 3."""
    return _one_factor(initial_scale, 2.0, dynamic_growth_steps)


def jmp(
    loss_scale: ArrayLike = 2.0**15,
    period: ArrayLike = 2000,
    factor: ArrayLike = 2.0,
    min_loss_scale: ArrayLike = 1.0,
) -> rules.Rule:
    """jmp's ``DynamicLossScale``. Under ``jit`` jmp itself takes 1 for every floor."""
    return _one_factor(
        loss_scale, factor, period, name="factor", min_scale=min_loss_scale
    )


def jamp(
    loss_scale: ArrayLike = 2.0**15,
    period: ArrayLike = 2000,
    factor: ArrayLike = 2.0,
    min_loss_scale: ArrayLike = 1.0,
) -> rules.Rule:
    """jamp's ``DynamicLossScale``: that of jmp, with its floor under ``jit`` too."""
    return jmp(loss_scale, period, factor, min_loss_scale)


def mpx(
    loss_scaling: ArrayLike = 2.0**15,
    min_loss_scaling: ArrayLike = 1.0,
    factor: ArrayLike = 2.0,
    period: ArrayLike = 2000,
) -> rules.Rule:
    """mpx's ``DynamicLossScaling``, with a ceiling of 65504.

    The first scale may be above the ceiling, for one step.
    """
    _settings.check_scale("loss_scaling", loss_scaling)
    rule = _one_factor(
        jnp.minimum(loss_scaling, LARGEST_FLOAT16),
        factor,
        period,
        name="factor",
        min_scale=min_loss_scaling,
        max_scale=LARGEST_FLOAT16,
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
    interval = one_more("patience", patience)
    return _one_factor(scaler, adjust_factor, interval, name="adjust_factor")


def mindspore(
    scale_value: ArrayLike, scale_factor: ArrayLike, scale_window: ArrayLike
) -> rules.Rule:
    """MindSpore's ``amp.DynamicLossScaler``, with a floor of 1 and without defaults."""
    return _one_factor(scale_value, scale_factor, scale_window, min_scale=1.0)


def mindspore_manager(
    init_loss_scale: ArrayLike = 2.0**24,
    scale_factor: ArrayLike = 2.0,
    scale_window: ArrayLike = 2000,
) -> rules.Rule:
    """MindSpore's ``DynamicLossScaleManager``, with a floor of 1."""
    return _one_factor(init_loss_scale, scale_factor, scale_window, min_scale=1.0)


def openseq2seq_backoff(
    scale_min: ArrayLike = 1.0,
    scale_max: ArrayLike = 2.0**14,
    step_factor: ArrayLike = 2.0,
    step_window: ArrayLike = 2000,
) -> rules.Rule:
    """OpenSeq2Seq's ``BackoffScaler``, which starts at its ceiling."""
    return _one_factor(
        scale_max,
        step_factor,
        step_window,
        name="step_factor",
        min_scale=scale_min,
        max_scale=scale_max,
    )


def _one_factor(
    init_scale: ArrayLike,
    factor: ArrayLike,
    growth_interval: ArrayLike,
    *,
    name: str = "scale_factor",
    min_scale: ArrayLike = SMALLEST_SCALE,
    max_scale: ArrayLike = LARGEST_SCALE,
) -> rules.Rule:
    check_factor(name, factor)
    return classic(
        init_scale,
        factor,
        1 / factor,
        growth_interval,
        min_scale=min_scale,
        max_scale=max_scale,
    )
