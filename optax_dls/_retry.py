"""Retries: the gradient of one batch again, at a lower scale, until it is finite."""

import numbers
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax import lax

from . import rules
from ._devices import agree
from ._finite import all_finite
from ._scaler_state import ScalerState, scaling_is_off
from ._stable_types import zeros_of_type
from ._unscale import unscale, unscaled_dtypes
from .rules._rule import SMALLEST_SCALE

INT32_MAX = jnp.iinfo(jnp.int32).max
Output = tuple[tuple[jax.Array, object], optax.Updates]  # ((loss, aux), scaled grads)


def with_retries(
    attempt: Callable[[ScalerState], Output], scaler: ScalerState, max_retries: int
) -> tuple[Output, ScalerState]:
    """Halves the scale and tries again, up to ``max_retries`` times.

    It stops once the gradients are finite. It also stops once the loss is not finite,
    since no scale changes the loss.

    Returns:
      The output of the last attempt, and the scaler with the retries counted. The
      gradients are in at least float32 and those of the scale S: what an attempt at
      S / 2**k gave was multiplied by 2**k.
    """
    if scaling_is_off(scaler):
        return attempt(scaler), scaler
    if not isinstance(scaler.rule_state, rules.RetryingRuleState):
        raise TypeError(
            "max_retries needs a state that counts retries, got one whose rule state is a "
            f"{type(scaler.rule_state).__name__}. Build the optimizer with "
            "loss_scaling(optimizer, rules.retrying(rules.dynamic()))."
        )

    def try_at(halvings: jax.Array) -> tuple[jax.Array, jax.Array, Output]:
        loss_scale = jnp.ldexp(scaler.loss_scale, -halvings)
        (loss, aux), grads = attempt(scaler._replace(loss_scale=loss_scale))
        # A power of two is exact, and in float32 there is room for it.
        fraction = jnp.ldexp(jnp.ones_like(loss_scale), -halvings)
        grads = unscale(grads, fraction, unscaled_dtypes(grads))
        flags = [all_finite(grads), all_finite(loss)]
        grads_finite, loss_finite = agree(flags, scaler.loss_scale, None)
        return grads_finite, loss_finite, ((loss, aux), grads)

    def overflowed(carry: tuple[jax.Array, jax.Array, jax.Array, Output]) -> jax.Array:
        attempts, grads_finite, loss_finite, _ = carry
        # No scale makes a loss finite, and below the smallest scale float32 gives up.
        is_left = jnp.ldexp(scaler.loss_scale, -attempts) >= SMALLEST_SCALE
        again = loss_finite & ~grads_finite & (attempts <= max_retries) & is_left
        return (attempts == 0) | again

    def body(
        carry: tuple[jax.Array, jax.Array, jax.Array, Output],
    ) -> tuple[jax.Array, jax.Array, jax.Array, Output]:
        attempts, *_ = carry
        return (attempts + 1, *try_at(attempts))

    # The first attempt is in the loop too, so that the program holds one backward pass.
    attempts = jnp.zeros_like(scaler.loss_scale, jnp.int32)
    outputs = jax.tree.map(zeros_of_type, jax.eval_shape(try_at, attempts))
    attempts, grads_finite, _, output = lax.while_loop(
        overflowed, body, (attempts, *outputs)
    )
    retries = attempts - 1
    rule_state = scaler.rule_state
    rule_state = rule_state._replace(
        # Where no retry helped, the scale was not to blame, and the rule hears of the one
        # overflow alone.
        pending_retries=rule_state.pending_retries
        + jnp.where(grads_finite, retries, 0),
        total_retries=rule_state.total_retries
        + jnp.minimum(retries, INT32_MAX - rule_state.total_retries),
    )
    return output, scaler._replace(rule_state=rule_state)


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
