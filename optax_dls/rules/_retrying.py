"""A rule that hears of the retries of a step."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from .. import _types
from ._rule import Rule
from ._static import NoScalingState


class RetryingRuleState(NamedTuple):
    """State of :func:`retrying`.

    Attributes:
      unheard_retries: retries of this step that the rule inside has yet to hear of; 0
        once ``tx.update`` has run.
      total_retries: retries since ``init``; saturates at 2**31 - 1.
      rule_state: state of the rule inside.
    """

    unheard_retries: jax.Array  # shape=(), dtype=int32
    total_retries: jax.Array  # shape=(), dtype=int32
    rule_state: optax.OptState


def retrying(rule: Rule) -> Rule:
    r"""Lets ``value_and_scaled_grad(..., max_retries=k)`` count its retries.

    After r retries in a step, ``rule`` hears of r overflows and then of the outcome, so
    the scale moves as if each attempt had been a step:

    .. math:: S_{t+1} = \text{rule}(\text{outcome},
      \text{rule}(\text{overflow}, \ldots S_t))

    The retries themselves halve the scale, whatever the backoff factor of ``rule`` is.

    Args:
      rule: any rule. ``none()`` comes back as it is: it has nothing to retry.

    Returns:
      A :class:`Rule` whose state is a :class:`RetryingRuleState`.

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
        **told: jax.Array,
    ) -> tuple[jax.Array, optax.OptState]:
        unheard, total, inside = rule_state

        def told_of(attempt: jax.Array) -> dict[str, jax.Array]:
            if "last_finite" not in told:
                return told
            return {**told, "last_finite": told["last_finite"] & (attempt == 0)}

        def overflow(
            attempt: jax.Array, before: tuple[jax.Array, optax.OptState]
        ) -> tuple[jax.Array, optax.OptState]:
            after = rule.update(jnp.array(False), *before, **told_of(attempt))
            return _types.keep(after, before, "rule.update", "Keep the state's types.")

        heard = lax.fori_loop(0, unheard, overflow, (loss_scale, inside))
        loss_scale, inside = rule.update(grads_finite, *heard, **told_of(unheard))
        return loss_scale, RetryingRuleState(jnp.zeros_like(unheard), total, inside)

    return Rule(init, update, rule.needs)
