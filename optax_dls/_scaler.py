"""The scaler: what it remembers, and how a step changes it."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from . import _types, rules


class ScalerState(NamedTuple):
    """What the loss scaler remembers. Each field has a buffer of its own.

    Attributes:
      loss_scale: S, the factor for the next loss.
      grads_finite: whether the unscaled gradients of the last step were all finite;
        True before the first step.
      consecutive_skips: skipped steps since the last applied one. Above 0 exactly
        if the last step was skipped.
      total_skips: skipped steps since ``init``. Both counters saturate at 2**31 - 1.
      rule_state: what the rule remembers, for instance a ``DynamicRuleState``.
    """

    loss_scale: jax.Array  # shape=(), dtype=float32
    grads_finite: jax.Array  # shape=(), dtype=bool
    consecutive_skips: jax.Array  # shape=(), dtype=int32
    total_skips: jax.Array  # shape=(), dtype=int32
    rule_state: optax.OptState


class LossScalingState(NamedTuple):
    """State of the loss-scaling transformations.

    Attributes:
      scaler: the scale and its counters.
      inner_state: state of the wrapped optimizer.
    """

    scaler: ScalerState
    inner_state: optax.OptState


def holds_scaler(tree: object) -> bool:
    """Whether a tree contains the state of a loss-scaling transformation."""
    return any(
        isinstance(node, LossScalingState)
        for node in jax.tree.leaves(
            tree, is_leaf=lambda node: isinstance(node, LossScalingState)
        )
    )


def next_scaler(
    rule: rules.Rule,
    scaler: ScalerState,
    grads_finite: jax.Array,
    *,
    largest_gradient: jax.Array | None,
    applied: jax.Array,
    heard: jax.Array,
) -> ScalerState:
    """The scaler after a step that was applied or not.

    The rule hears of it unless it failed for a reason that no scale could have helped.
    """
    before = (scaler.loss_scale, scaler.rule_state)
    facts = {
        "last_finite": scaler.grads_finite,
        "largest_gradient": largest_gradient,
    }
    after = _types.keep(
        rule.update(applied, *before, **{name: facts[name] for name in rule.needs}),
        before,
        "rule.update",
        "Give back (loss_scale, rule_state), the latter as rule.init made it.",
    )
    loss_scale, rule_state = _types.select(heard, after, before)
    consecutive_skips = optax.safe_increment(scaler.consecutive_skips)
    total_skips = optax.safe_increment(scaler.total_skips)
    new = ScalerState(
        loss_scale=loss_scale,
        grads_finite=grads_finite,
        consecutive_skips=jnp.where(applied, 0, consecutive_skips),
        total_skips=jnp.where(applied, scaler.total_skips, total_skips),
        rule_state=rule_state,
    )
    # The flags are equal on all devices that axis_name names; the scalers need not be.
    return _types.keep(new, scaler, "the scaler", "Restore it as init made it.")
