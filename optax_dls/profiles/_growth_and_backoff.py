"""Systems with a growth factor, a backoff factor and, some of them, hysteresis."""

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from .. import rules
from ..rules._rule import LARGEST_SCALE, SMALLEST_SCALE
from ._building_blocks import classic, one_more, with_floor_for_backoffs


def torch(
    init_scale: ArrayLike = 2.0**16,
    growth_factor: ArrayLike = 2.0,
    backoff_factor: ArrayLike = 0.5,
    growth_interval: ArrayLike = 2000,
) -> rules.Rule:
    """``torch.amp.GradScaler``, and FSDP's ``ShardedGradScaler``.

    In torch several optimizers can share a scaler, and those whose gradients are finite
    step. Here a wrapper has one optimizer.

    Example:
      >>> import optax_dls as dls
      >>> scale, _ = dls.profiles.torch().init()
      >>> float(scale)
      65536.0
    """
    return classic(init_scale, growth_factor, backoff_factor, growth_interval)


def megatron(
    initial_scale: ArrayLike = 2.0**32,
    min_scale: ArrayLike = 1.0,
    growth_factor: ArrayLike = 2.0,
    backoff_factor: ArrayLike = 0.5,
    growth_interval: ArrayLike = 1000,
    hysteresis: ArrayLike = 2,
) -> rules.Rule:
    """Megatron's ``DynamicGradScaler``: only a growth restores the hysteresis."""
    return classic(
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
    """ColossalAI's ``DynamicGradScaler``: :func:`megatron` with optional bounds."""
    return classic(
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

    At the start and after an overflow the scale grows after ``scale_window`` + 1 finite
    steps, and then after every ``scale_window``. ``raise_error_at_min_scale`` has no
    effect. It is accepted so that DeepSpeed's configurations work as they are.
    """
    del raise_error_at_min_scale
    rule = classic(
        init_scale,
        2.0,
        0.5,
        one_more("scale_window", scale_window),
        hysteresis=delayed_shift,
        hysteresis_refill="finite" if consecutive_hysteresis else "growth",
    )
    rule = with_floor_for_backoffs(rule, "min_scale", min_scale)

    def update(
        grads_finite: jax.Array,
        loss_scale: jax.Array,
        rule_state: optax.OptState,
        **step_info: jax.Array,
    ) -> tuple[jax.Array, optax.OptState]:
        loss_scale, new = rule.update(grads_finite, loss_scale, rule_state, **step_info)
        has_grown = grads_finite & (new.growth_count == 0)
        count = jnp.where(has_grown, 1, new.growth_count)
        return loss_scale, new._replace(growth_count=count)

    return rule._replace(update=update)


def apex_hysteresis(
    init_scale: ArrayLike,
    growth_factor: ArrayLike,
    backoff_factor: ArrayLike,
    growth_interval: ArrayLike,
    hysteresis: ArrayLike,
) -> rules.Rule:
    """apex's ``update_scale_hysteresis``: each finite step restores the hysteresis.

    There are no defaults, as in apex.
    """
    return classic(
        init_scale,
        growth_factor,
        backoff_factor,
        growth_interval,
        hysteresis=hysteresis,
        hysteresis_refill="finite",
    )


def flax(
    scale: ArrayLike = 2.0**16,
    growth_factor: ArrayLike = 2.0,
    backoff_factor: ArrayLike = 0.5,
    growth_interval: ArrayLike = 2000,
    minimum_scale: ArrayLike | None = None,
) -> rules.Rule:
    """Flax's ``DynamicScale``: it grows after ``growth_interval`` + 1 finite steps.

    The floor is 2**-100 by default. In Flax it is the smallest normal float32.
    """
    return classic(
        scale,
        growth_factor,
        backoff_factor,
        one_more("growth_interval", growth_interval),
        min_scale=SMALLEST_SCALE if minimum_scale is None else minimum_scale,
    )


def paddle(
    init_loss_scaling: ArrayLike = 2.0**16,
    incr_ratio: ArrayLike = 2.0,
    decr_ratio: ArrayLike = 0.5,
    incr_every_n_steps: ArrayLike = 2000,
    decr_every_n_nan_or_inf: ArrayLike = 1,
) -> rules.Rule:
    """Paddle's ``GradScaler``: it backs off at each n-th overflow in a row."""
    return classic(
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
    return classic(
        init_loss_scaling,
        incr_ratio,
        decr_ratio,
        incr_every_n_steps,
        min_scale=1.0,
        hysteresis=decr_every_n_nan_or_inf,
        hysteresis_refill="backoff",
    )
