"""Systems with rules of their own: overflow rates, statistics, fractions, no scale."""

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from .. import rules
from ..rules import _settings
from ..rules._rule import LARGEST_SCALE, SMALLEST_SCALE
from ._building_blocks import check_factor, with_floor_for_backoffs


def fairseq(
    init_scale: ArrayLike = 2.0**15,
    scale_factor: ArrayLike = 2.0,
    scale_window: ArrayLike = 2000,
    tolerance: ArrayLike = 0.0,
    threshold: ArrayLike | None = None,
    min_loss_scale: ArrayLike = 1e-4,
) -> rules.Rule:
    """fairseq's ``DynamicLossScaler``: it backs off at a share of overflows.

    No backoff ends below ``threshold``, or below ``min_loss_scale`` where ``threshold`` is
    None. At ``min_loss_scale`` fairseq itself raises an error.
    """
    rule = _overflow_rate(init_scale, scale_factor, scale_window, tolerance)
    if threshold is not None:
        return with_floor_for_backoffs(rule, "threshold", threshold)
    return with_floor_for_backoffs(rule, "min_loss_scale", min_loss_scale)


def metaseq(
    init_scale: ArrayLike = 4.0,
    scale_factor: ArrayLike = 2.0,
    scale_window: ArrayLike = 256,
    tolerance: ArrayLike = 0.0,
    threshold: ArrayLike | None = None,
    min_loss_scale: ArrayLike = 2.0**-5,
) -> rules.Rule:
    """metaseq's ``DynamicLossScaler``: fairseq's, with a window that follows the scale.

    A backoff that would end below ``min_loss_scale`` leaves the scale where it is, and
    only the window shrinks.
    """
    rule = _overflow_rate(
        init_scale, scale_factor, scale_window, tolerance, interval_follows_scale=True
    )
    if threshold is not None:
        rule = with_floor_for_backoffs(rule, "threshold", threshold)
    _settings.check_scale("min_loss_scale", min_loss_scale)

    def update(
        grads_finite: jax.Array, loss_scale: jax.Array, rule_state: optax.OptState
    ) -> tuple[jax.Array, optax.OptState]:
        new_scale, rule_state = rule.update(grads_finite, loss_scale, rule_state)
        is_low = ~grads_finite & (new_scale < jnp.asarray(min_loss_scale, jnp.float32))
        return jnp.where(is_low, loss_scale, new_scale), rule_state

    return rule._replace(update=update)


def chainer(interval: ArrayLike = 1000) -> rules.Rule:
    """Chainer's: a fractional growth at every finite step, between 1 and 65504."""
    return rules.gradual(
        init_scale=1.0, growth_interval=interval, min_scale=1.0, max_scale=65504.0
    )


def openseq2seq_logmax(
    scale_min: ArrayLike = 1.0,
    scale_max: ArrayLike = 2.0**14,
    beta1: ArrayLike = 0.99,
    beta2: ArrayLike = 0.999,
    overflow_std_dev: ArrayLike = 3.09,
) -> rules.Rule:
    """OpenSeq2Seq's ``LogMaxScaler``, to a percent, until the first overflow.

    OpenSeq2Seq takes an overflow for a gradient of 2**65536 and stays at its floor from
    then on. Here an overflow counts as in :func:`rules.log_normal`, and the scale recovers.
    """
    # Imported here: it takes longer than the rest of the package.
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


def optax_apply_if_finite(max_consecutive_errors: int = 0) -> rules.Rule:
    """``optax.apply_if_finite``: it has no scale, and it skips.

    ``max_consecutive_errors`` has no effect. After so many skips in a row Optax applies
    NaN; here a bad step is always skipped.
    """
    del max_consecutive_errors
    return rules.static(1.0)


def _overflow_rate(
    init_scale: ArrayLike,
    scale_factor: ArrayLike,
    scale_window: ArrayLike,
    tolerance: ArrayLike,
    *,
    interval_follows_scale: bool = False,
) -> rules.Rule:
    check_factor("scale_factor", scale_factor)
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
