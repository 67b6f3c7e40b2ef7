"""A rule that takes each retry of a step for an overflow."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.typing import ArrayLike

from ._rule import Rule
from ._static import NoScalingState


class RetryingRuleState(NamedTuple):
    """State of :func:`retrying`.

    Attributes:
      pending_retries: retries of this step that the inner rule has not been updated with
        yet. It is 0 after ``tx.update``.
      total_retries: retries since ``init``. It saturates at 2**31 - 1.
      rule_state: state of the inner rule.
    """

    pending_retries: jax.Array  # shape=(), dtype=int32
    total_retries: jax.Array  # shape=(), dtype=int32
    rule_state: optax.OptState


def retrying(rule: Rule) -> Rule:
    r"""Lets ``value_and_scaled_grad(..., max_retries=k)`` count its retries.

    After r retries in a step, ``rule`` is updated with r overflows and then with the
    outcome of the last attempt. The scale moves as if each attempt had been a step:

    .. math:: S_{t+1} = \text{rule}(\text{outcome},
      \text{rule}(\text{overflow}, \ldots S_t))

    Each retry itself takes half the scale, whatever the backoff factor of ``rule`` is.

    Args:
      rule: any rule. ``none()`` is returned as it is, since it has nothing to retry.

    Returns:
      A :class:`Rule` whose state is a :class:`RetryingRuleState`.

    Raises:
      TypeError: ``rule`` is not a :class:`Rule`.

    Example:
      >>> import optax
      >>> import optax_dls as dls
      >>> rule = dls.rules.retrying(dls.rules.dynamic(growth_interval=100))
      >>> tx = dls.loss_scaling(optax.adam(3e-4), rule)
    """
    if not isinstance(rule, Rule):
        raise TypeError(
            f"rule must be a Rule, got {rule!r}. Call rules.dynamic(), for instance."
        )
    if isinstance(jax.eval_shape(rule.init)[1], NoScalingState):
        return rule

    def init() -> tuple[jax.Array, optax.OptState]:
        loss_scale, rule_state = rule.init()
        count = jnp.zeros((), jnp.int32)
        return loss_scale, RetryingRuleState(count, count, rule_state)

    def update(
        grads_finite: jax.Array,
        loss_scale: jax.Array,
        rule_state: optax.OptState,
        **step_info: jax.Array,
    ) -> tuple[jax.Array, optax.OptState]:
        pending, total, inside = rule_state

        def info_of(attempt: jax.Array) -> dict[str, jax.Array]:
            if "last_finite" not in step_info:
                return step_info
            # The attempt before any but the first was an overflow of this step.
            last_finite = step_info["last_finite"] & (attempt == 0)
            return {**step_info, "last_finite": last_finite}

        def overflow(
            attempt: jax.Array, before: tuple[jax.Array, optax.OptState]
        ) -> tuple[jax.Array, optax.OptState]:
            after = rule.update(jnp.array(False), *before, **info_of(attempt))
            return jax.tree.map(_in_type_of, before, after)

        before = lax.fori_loop(0, pending, overflow, (loss_scale, inside))
        loss_scale, inside = rule.update(grads_finite, *before, **info_of(pending))
        return loss_scale, RetryingRuleState(jnp.zeros_like(pending), total, inside)

    return rule._replace(init=init, update=update)


def _in_type_of(old: jax.Array, new: ArrayLike) -> jax.Array:
    """``new`` in the dtype of ``old``, varying over the devices that ``old`` varies over."""
    return jnp.where(True, jnp.asarray(new, old.dtype), old)
