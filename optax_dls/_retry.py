"""Retries: the gradient of one batch again, at a lower scale, until it is finite."""

import math
import numbers
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from . import rules
from ._devices import agree
from ._finite import all_finite
from ._scaler_state import ScalerState, scaling_is_off
from ._stable_types import zeros_of_type
from ._unscale import Mask, scaled_leaves, unscale, unscaled_dtypes
from .rules._rule import LARGEST_SCALE, SMALLEST_SCALE

INT32_MAX = jnp.iinfo(jnp.int32).max
MOST_RETRIES = int(math.log2(LARGEST_SCALE / SMALLEST_SCALE))
Output = tuple[tuple[jax.Array, Any], optax.Updates]  # ((loss, aux), scaled grads)
Carry = tuple[jax.Array, jax.Array, jax.Array, Output]


def with_retries(
    attempt: Callable[[ScalerState], Output],
    scaler: ScalerState,
    max_retries: int,
    mask: Mask | None = None,
) -> tuple[Output, ScalerState]:
    """Takes a gradient, and again at half the scale while it overflows.

    It stops once the gradients are finite, after ``max_retries`` retries, or where the
    loss is not finite, since no scale changes the loss.

    Args:
      attempt: the gradient at the scale of a scaler.
      scaler: the scaler, with the scale S of the first attempt.
      max_retries: the most attempts after the first.
      mask: False for gradients that are not linear in the loss, which pass as they are.

    Returns:
      The output of the last attempt, and the scaler with the retries counted. The
      gradients are in at least float32 and belong to S: those of an attempt at S / 2**k
      were multiplied by 2**k.
    """
    if scaling_is_off(scaler):
        return attempt(scaler), scaler
    _check_rule(scaler)

    def try_at(halvings: jax.Array) -> tuple[jax.Array, jax.Array, Output]:
        loss_scale = jnp.ldexp(scaler.loss_scale, -halvings)
        (loss, aux), grads = attempt(scaler._replace(loss_scale=loss_scale))
        dtypes = unscaled_dtypes(grads, mask)
        with jax.named_scope("rescale"):
            # A power of two is exact, and in float32 there is room for it.
            fraction = jnp.ldexp(jnp.ones_like(loss_scale), -halvings)
            grads = unscale(grads, fraction, dtypes)
        with jax.named_scope("check_finite"):
            flags = [all_finite(scaled_leaves(grads, dtypes)), all_finite(loss)]
            grads_finite, loss_finite = agree(flags, scaler.loss_scale, None)
        return grads_finite, loss_finite, ((loss, aux), grads)

    def goes_on(carry: Carry) -> jax.Array:
        attempts, grads_finite, loss_finite, _ = carry
        # Below the smallest scale float32 would flush gradients to zero.
        is_left = jnp.ldexp(scaler.loss_scale, -attempts) >= SMALLEST_SCALE
        again = loss_finite & ~grads_finite & (attempts <= max_retries) & is_left
        return (attempts == 0) | again

    def body(carry: Carry) -> Carry:
        attempts, *_ = carry
        return (attempts + 1, *try_at(attempts))

    # The first attempt is in the loop too, so that the program holds one backward pass.
    attempts = jnp.zeros_like(scaler.loss_scale, jnp.int32)
    with jax.named_scope("retry"):
        outputs = jax.tree.map(zeros_of_type, jax.eval_shape(try_at, attempts))
        attempts, grads_finite, _, output = lax.while_loop(
            goes_on, body, (attempts, *outputs)
        )
    return output, _with_counts(scaler, attempts - 1, grads_finite)


def _with_counts(
    scaler: ScalerState, retries: jax.Array, grads_finite: jax.Array
) -> ScalerState:
    """The scaler with the retries of one gradient counted."""
    counts = scaler.rule_state
    # Where no retry helped, the scale was not to blame.
    helpful = jnp.where(grads_finite, retries, 0)
    rule_state = counts._replace(
        # Each gradient of a step starts at the same scale, so their retries do not add up.
        pending_retries=jnp.maximum(counts.pending_retries, helpful),
        total_retries=counts.total_retries
        + jnp.minimum(retries, INT32_MAX - counts.total_retries),
    )
    return scaler._replace(rule_state=rule_state)


def _check_rule(scaler: ScalerState) -> None:
    if not isinstance(scaler.rule_state, rules.RetryingRuleState):
        raise TypeError(
            "max_retries needs a state that counts retries, got one whose rule state is a "
            f"{type(scaler.rule_state).__name__}. Build the optimizer with "
            "loss_scaling(optimizer, rules.retrying(rules.dynamic()))."
        )


def check_max_retries(max_retries: int | None) -> None:
    """Raises unless it counts retries, or is None for none at all."""
    if max_retries is None:
        return
    if isinstance(max_retries, bool) or not isinstance(max_retries, numbers.Integral):
        raise TypeError(
            "max_retries must be a whole number of at least 0, or None, got "
            f"{max_retries!r}."
        )
    if max_retries < 0:
        raise ValueError(
            f"max_retries must be at least 0, or None, got {max_retries}. None returns "
            "(loss, grads) without the state."
        )
    if max_retries > MOST_RETRIES:
        raise ValueError(
            f"max_retries must be at most {MOST_RETRIES}, got {max_retries}. So many "
            "halvings lead from the largest loss scale, 2**126, to the smallest, 2**-100."
        )
