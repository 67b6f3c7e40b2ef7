"""The wrappers that most people use: a rule chosen, the rest from loss_scaling."""

import optax
from jax.typing import ArrayLike

from . import rules
from ._devices import AxisName
from ._transform import loss_scaling
from ._unscale import Mask
from .rules._rule import (
    DEFAULT_GROWTH_INTERVAL,
    DEFAULT_INIT_SCALE,
    DEFAULT_MAX_SCALE,
    DEFAULT_MIN_SCALE,
    DEFAULT_RECOVERY_INTERVAL,
)


def dynamic_loss_scaling(
    inner: optax.GradientTransformation,
    *,
    init_scale: ArrayLike = DEFAULT_INIT_SCALE,
    growth_factor: ArrayLike = 2.0,
    backoff_factor: ArrayLike = 0.5,
    growth_interval: ArrayLike = DEFAULT_GROWTH_INTERVAL,
    recovery_interval: ArrayLike | None = DEFAULT_RECOVERY_INTERVAL,
    min_scale: ArrayLike = DEFAULT_MIN_SCALE,
    max_scale: ArrayLike = DEFAULT_MAX_SCALE,
    hysteresis: ArrayLike | None = None,
    hysteresis_refill: rules.Refill = "growth",
    gradient_limit: ArrayLike | None = None,
    check_updates: bool = False,
    axis_name: AxisName | None = None,
    mask: Mask | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer for float16 training: the scale finds its own size.

    ``loss_scaling(inner, rules.dynamic(...))``: the scale doubles after 2000 finite
    steps. A step whose gradients overflow is skipped and halves it. The scale returns to
    its level, unless the level itself is too high, so bad batches do not push it down. See
    :func:`rules.dynamic` for the rule and the reasons of its defaults, and
    :func:`loss_scaling` for the skip.

    Args:
      inner: the whole optimizer, with clipping, weight decay and schedules inside.
      init_scale: the first scale.
      growth_factor: what the scale is multiplied by when it grows, at least 1.
      backoff_factor: what it is multiplied by at an overflow, between 0 and 1.
      growth_interval: finite steps before it grows above its level.
      recovery_interval: finite steps at each scale on the way back to the level; None for
        the classic rule, which has no level.
      min_scale: the floor.
      max_scale: the ceiling.
      hysteresis: overflows before the scale backs off; None is 1.
      hysteresis_refill: what makes that tolerance whole again: ``"growth"``,
        ``"finite"`` or ``"backoff"``.
      gradient_limit: no growth that would lift the largest gradient above it.
      check_updates: see :func:`loss_scaling`.
      axis_name: see :func:`loss_scaling`.
      mask: see :func:`loss_scaling`.

    Returns:
      A transformation with state :class:`LossScalingState`.

    Raises:
      TypeError: an argument is of the wrong kind.
      ValueError: a number is out of range or out of order.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import optax
      >>> import optax_dls as dls
      >>> tx = dls.dynamic_loss_scaling(optax.adam(0.1))
      >>> params = jnp.array([1.0, -2.0])
      >>> state = tx.init(params)
      >>> def loss_fn(params):  # gradients of 1e-8 are zero in float16
      ...     return 1e-8 * jnp.sum(params.astype(jnp.float16)).astype(jnp.float32)
      >>> @jax.jit
      ... def step(params, state):
      ...     loss, grads = dls.value_and_scaled_grad(loss_fn)(params, state=state)
      ...     updates, state = tx.update(grads, state, params)
      ...     return optax.apply_updates(params, updates), state, loss
      >>> params, state, loss = step(params, state)
      >>> print([round(float(p), 3) for p in params])
      [0.95, -2.05]
    """
    rule = rules.dynamic(
        init_scale=init_scale,
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        growth_interval=growth_interval,
        recovery_interval=recovery_interval,
        min_scale=min_scale,
        max_scale=max_scale,
        hysteresis=hysteresis,
        hysteresis_refill=hysteresis_refill,
        gradient_limit=gradient_limit,
    )
    return loss_scaling(
        inner, rule, check_updates=check_updates, axis_name=axis_name, mask=mask
    )


def static_loss_scaling(
    inner: optax.GradientTransformation,
    scale: ArrayLike,
    *,
    check_updates: bool = False,
    axis_name: AxisName | None = None,
    mask: Mask | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer with a fixed scale; overflowing steps are still skipped.

    ``loss_scaling(inner, rules.static(scale))``.

    Args:
      inner: the whole optimizer, with clipping, weight decay and schedules inside.
      scale: the factor itself, not its exponent. A power of two is exact.
      check_updates: see :func:`loss_scaling`.
      axis_name: see :func:`loss_scaling`.
      mask: see :func:`loss_scaling`.

    Returns:
      A transformation with state :class:`LossScalingState`.

    Raises:
      TypeError: an argument is of the wrong kind.
      ValueError: ``scale`` is outside [2**-100, 2**126].

    Example:
      >>> import jax.numpy as jnp
      >>> import optax
      >>> import optax_dls as dls
      >>> tx = dls.static_loss_scaling(optax.sgd(1.0), 16.0)
      >>> state = tx.init(jnp.zeros(()))
      >>> float(dls.scale_loss(3.0, state))
      48.0
    """
    rule = rules.static(scale)
    return loss_scaling(
        inner, rule, check_updates=check_updates, axis_name=axis_name, mask=mask
    )


def no_loss_scaling(
    inner: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """The bare optimizer behind the same interface, for float32 and bfloat16.

    ``loss_scaling(inner, rules.none())``: the scale is 1, nothing is checked or
    skipped, and ``inner`` works on the parameters as they are. So one train step
    serves every precision. A run moves between the wrappers by
    ``tx.init(params)._replace(inner_state=old.inner_state)``.

    Args:
      inner: the whole optimizer.

    Returns:
      A transformation with state :class:`LossScalingState`.

    Raises:
      TypeError: ``inner`` is not a gradient transformation.

    Example:
      >>> import jax.numpy as jnp
      >>> import optax
      >>> import optax_dls as dls
      >>> tx = dls.no_loss_scaling(optax.sgd(1.0))
      >>> updates, state = tx.update(jnp.array([2.0]), tx.init(jnp.zeros(1)))
      >>> print(updates, dls.loss_scale(state))
      [-2.] 1.0
    """
    return loss_scaling(inner, rules.none())
