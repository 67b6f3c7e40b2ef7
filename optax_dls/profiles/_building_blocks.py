"""What several profiles are built from."""

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from .. import rules
from ..rules import _settings
from ..rules._rule import LARGEST_SCALE, SMALLEST_SCALE


def classic(
    init_scale: ArrayLike,
    growth_factor: ArrayLike,
    backoff_factor: ArrayLike,
    growth_interval: ArrayLike,
    *,
    min_scale: ArrayLike = SMALLEST_SCALE,
    max_scale: ArrayLike = LARGEST_SCALE,
    hysteresis: ArrayLike | None = None,
    hysteresis_refill: rules.Refill = "growth",
) -> rules.Rule:
    """The dynamic rule without recovery, and without bounds unless they are given."""
    return rules.dynamic(
        init_scale=init_scale,
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        growth_interval=growth_interval,
        recovery_interval=None,
        min_scale=min_scale,
        max_scale=max_scale,
        hysteresis=hysteresis,
        hysteresis_refill=hysteresis_refill,
    )


def check_factor(name: str, factor: ArrayLike) -> None:
    """Raises unless the scale can grow by the factor and shrink by its reciprocal."""
    _settings.check(name, factor, "above 1", lambda x: x > 1, "Use 2.0.")


def one_more(name: str, interval: ArrayLike) -> ArrayLike:
    """The interval plus one, still within int32."""
    _settings.check_steps(name, interval, "Use 2000.")
    return _settings.steps(interval, 2**31 - 2) + 1


def with_floor_for_backoffs(
    rule: rules.Rule, name: str, floor: ArrayLike
) -> rules.Rule:
    """The rule, except that no backoff ends below the floor.

    The first scale may be below it, unlike with ``min_scale``.
    """
    _settings.check_scale(name, floor)

    def update(
        grads_finite: jax.Array,
        loss_scale: jax.Array,
        rule_state: optax.OptState,
        **step_info: jax.Array,
    ) -> tuple[jax.Array, optax.OptState]:
        new_scale, rule_state = rule.update(
            grads_finite, loss_scale, rule_state, **step_info
        )
        floored = _settings.clip(new_scale, floor, LARGEST_SCALE)
        return jnp.where(new_scale < loss_scale, floored, new_scale), rule_state

    return rule._replace(update=update)
