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
      pending_retries: retries by which the rule inside has not moved the scale yet: the
        most that one gradient has needed since the last ``tx.update``, which sets it to 0.
      total_retries: retries since ``init``; saturates at 2**31 - 1.
      rule_state: state of the rule inside.
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

    Several gradients may be taken before one update, those of micro-batches for instance.
    They all start at the same scale, so r is the most that one of them needed.

    Where a loss or an update that is not finite makes the step skip, there is no outcome
    for ``rule``, as ever. The r overflows are real, and move the scale.

    The retries themselves halve the scale, whatever the backoff factor of ``rule`` is.

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

    def after_attempt(
        finite: jax.Array,
        before: tuple[jax.Array, optax.OptState],
        step_info: dict[str, jax.Array],
    ) -> tuple[jax.Array, optax.OptState]:
        info = {name: step_info[name] for name in rule.needs}
        return jax.tree.map(_in_type_of, before, rule.update(finite, *before, **info))

    def catch_up(
        loss_scale: jax.Array, rule_state: optax.OptState, **step_info: jax.Array
    ) -> tuple[jax.Array, optax.OptState]:
        def after_overflow(
            attempt: jax.Array, before: tuple[jax.Array, optax.OptState]
        ) -> tuple[jax.Array, optax.OptState]:
            info = {**step_info, "updates_rule": jnp.array(True)}
            if "last_finite" in info:
                info["last_finite"] &= attempt == 0
            return after_attempt(jnp.array(False), before, info)

        pending, total, inside = rule_state
        loss_scale, inside = lax.fori_loop(
            0, pending, after_overflow, (loss_scale, inside)
        )
        return loss_scale, RetryingRuleState(pending, total, inside)

    def update(
        grads_finite: jax.Array,
        loss_scale: jax.Array,
        rule_state: optax.OptState,
        *,
        updates_rule: jax.Array,
        **step_info: jax.Array,
    ) -> tuple[jax.Array, optax.OptState]:
        pending, total, inside = rule_state
        info = {**step_info, "updates_rule": updates_rule}
        if "last_finite" in info:
            info["last_finite"] &= pending == 0
        before = (loss_scale, inside)
        after = after_attempt(grads_finite, before, info)
        if "updates_rule" not in rule.needs:
            after = jax.tree.map(
                lambda new, old: jnp.where(updates_rule, new, old), after, before
            )
        loss_scale, inside = after
        return loss_scale, RetryingRuleState(jnp.zeros_like(pending), total, inside)

    needs = tuple(dict.fromkeys((*rule.needs, "updates_rule")))
    return Rule(init, update, needs, rule.settings, catch_up)


def _in_type_of(old: jax.Array, new: ArrayLike) -> jax.Array:
    """``new`` in the dtype of ``old``, and varying over the same devices."""
    return jnp.where(True, jnp.asarray(new, old.dtype), old)
