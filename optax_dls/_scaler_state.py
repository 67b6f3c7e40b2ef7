"""The scaler: what it remembers, and how a step changes it."""

import contextlib
from typing import NamedTuple

import jax
import jax.export
import jax.numpy as jnp
import optax

from . import rules
from ._one_kernel import in_one_array
from ._stable_types import keep_types, strongly_typed, tree_where


class ScalerState(NamedTuple):
    """What the loss scaler remembers. Each field has a buffer of its own.

    Attributes:
      loss_scale: S, the factor for the next loss.
      grads_finite: whether the unscaled gradients of the last step were all finite;
        True before the first step.
      consecutive_skips: skipped steps since the last applied one. Above 0 exactly
        if the last step was skipped.
      total_skips: skipped steps since ``init``. Both counters saturate at 2**31 - 1.
      rule_state: what the rule remembers, for instance a ``LevelRuleState``.
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


class StepInfo(NamedTuple):
    """What a step has shown, before it is applied or skipped.

    Attributes:
      grads_finite: whether the unscaled gradients are finite.
      largest_gradient: their largest finite magnitude, if the rule asks for it.
    """

    grads_finite: jax.Array  # shape=(), dtype=bool
    largest_gradient: jax.Array | None  # shape=(), dtype=float32


def first_scaler(rule: rules.Rule) -> ScalerState:
    """The scaler before the first step."""
    loss_scale, rule_state = rule.init()
    return ScalerState(
        loss_scale=jnp.asarray(loss_scale, jnp.float32),
        grads_finite=jnp.array(True),
        consecutive_skips=jnp.zeros((), jnp.int32),
        total_skips=jnp.zeros((), jnp.int32),
        rule_state=rule_state,
    )


def strongly_typed_state(state: LossScalingState) -> LossScalingState:
    """The state in the types of ``init``, also where a user has set a number in it."""
    state = jax.tree.map(strongly_typed, state)
    loss_scale = state.scaler.loss_scale.astype(jnp.float32)
    return state._replace(scaler=state.scaler._replace(loss_scale=loss_scale))


@jax.named_scope("move_scale")
def caught_up(rule: rules.Rule, scaler: ScalerState, step: StepInfo) -> ScalerState:
    """The scaler when the outcome of the step is about to move it."""
    if rule.catch_up is None:
        return scaler
    before = (scaler.loss_scale, scaler.rule_state)
    info = _info_for(rule, scaler, step)
    loss_scale, rule_state = keep_types(
        rule.catch_up(*before, **info), before, "rule.catch_up", _PAIR
    )
    return in_one_array(scaler._replace(loss_scale=loss_scale, rule_state=rule_state))


@jax.named_scope("move_scale")
def next_scaler(
    rule: rules.Rule,
    scaler: ScalerState,
    step: StepInfo,
    *,
    applied: jax.Array,
    updates_rule: jax.Array,
) -> ScalerState:
    """The scaler after a step.

    Args:
      rule: how the scale moves.
      scaler: the scaler before the step, caught up.
      step: what the step has shown.
      applied: whether the step was applied.
      updates_rule: false where a loss or an update that is not finite made it skip. No
        scale could have helped there, so the scale stays. A rule that asks for this flag
        sees to that itself.
    """
    before = (scaler.loss_scale, scaler.rule_state)
    info = _info_for(rule, scaler, step)
    if "updates_rule" in rule.needs:
        info["updates_rule"] = updates_rule
    after = keep_types(
        rule.update(applied, *before, **info), before, "rule.update", _PAIR
    )
    if "updates_rule" not in rule.needs:
        after = tree_where(updates_rule, after, before)
    loss_scale, rule_state = after
    consecutive_skips = optax.safe_increment(scaler.consecutive_skips)
    total_skips = optax.safe_increment(scaler.total_skips)
    new = ScalerState(
        loss_scale=loss_scale,
        grads_finite=step.grads_finite,
        consecutive_skips=jnp.where(applied, 0, consecutive_skips),
        total_skips=jnp.where(applied, scaler.total_skips, total_skips),
        rule_state=rule_state,
    )
    # The flags are equal on all devices that axis_name names; the scalers need not be.
    return keep_types(new, scaler, "the scaler", "Restore it as init made it.")


_PAIR = "Give back (loss_scale, rule_state), the latter as rule.init made it."


def _info_for(
    rule: rules.Rule, scaler: ScalerState, step: StepInfo
) -> dict[str, jax.Array | None]:
    """What the rule asks to know of the step, as far as it is known before its outcome."""
    known = {
        "last_finite": scaler.grads_finite,
        "largest_gradient": step.largest_gradient,
    }
    return {name: value for name, value in known.items() if name in rule.needs}


def scaling_is_off(scaler: ScalerState) -> bool:
    """Whether this is the scaler of ``no_loss_scaling``, which scales and checks nothing."""
    return isinstance(scaler.rule_state, rules.NoScalingState)


def holds_scaler(tree: object) -> bool:
    """Whether a tree contains the state of a loss-scaling transformation."""
    return any(
        isinstance(node, LossScalingState)
        for node in jax.tree.leaves(
            tree, is_leaf=lambda node: isinstance(node, LossScalingState)
        )
    )


# A train step takes and returns these: jax.export has to know how to write them down.
for _state in (
    LossScalingState,
    ScalerState,
    rules.DynamicRuleState,
    rules.GradualRuleState,
    rules.HysteresisRuleState,
    rules.LevelRuleState,
    rules.LogNormalRuleState,
    rules.NoScalingState,
    rules.OverflowRateRuleState,
    rules.RetryingRuleState,
):
    with contextlib.suppress(ValueError):  # where a notebook loads this module again
        jax.export.register_namedtuple_serialization(
            _state, serialized_name=f"optax_dls.{_state.__name__}"
        )
