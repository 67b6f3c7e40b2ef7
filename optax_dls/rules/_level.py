"""The steady way: the scale returns to its level, unless the level itself fails."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from . import _settings
from ._movement import Movement

# The scale below is watched for so many times the steps that the one above lasted.
WATCH = 3
# After so many failures the level is given up. One that nobody has tried yet begins with
# them, so that its first overflow is enough.
FAILURES = 4
# A level that is given up is tried again after so many times the steps that it lasted,
# and after this many recovery intervals at the earliest.
PATIENCE = 100
SOONEST = 5
MOST_STEPS = 2**31 - 1  # no count goes further, so that none wraps around int32


class LevelRuleState(NamedTuple):
    """State of :func:`dynamic`.

    Attributes:
      level: the scale that has proved itself, or the first. Below it the scale is on its
        way back, above it on trial.
      last_scale: the scale that the rule gave last. A different scale has been set from
        outside, and becomes the level.
      growth_count: finite steps since the last trial began or failed. Other overflows do
        not set it back.
      finite_steps: finite steps in a row at this scale.
      test_steps: how many of them it takes: below the level until the scale grows, above
        it until the scale is the level. 0 where nothing is tested.
      failures: overflows that are blamed on the scale, of which 4 give the level up; 4 as
        long as the level is untried.
      trial_interval: the growth count from which on a trial may begin; 2**31 - 1 stands
        for the growth interval.
      overflows_left: as in :class:`HysteresisRuleState`; 1 without ``hysteresis``.
    """

    level: jax.Array  # shape=(), dtype=float32
    last_scale: jax.Array  # shape=(), dtype=float32
    growth_count: jax.Array  # shape=(), dtype=int32
    finite_steps: jax.Array  # shape=(), dtype=int32
    test_steps: jax.Array  # shape=(), dtype=int32
    failures: jax.Array  # shape=(), dtype=int32
    trial_interval: jax.Array  # shape=(), dtype=int32
    overflows_left: jax.Array  # shape=(), dtype=int32


def first_state(loss_scale: jax.Array, overflows_left: jax.Array) -> LevelRuleState:
    """The level is a scale that nobody has tried yet."""
    zero = jnp.zeros((), jnp.int32)
    return LevelRuleState(
        level=loss_scale,
        last_scale=loss_scale,
        growth_count=zero,
        finite_steps=zero,
        test_steps=zero,
        failures=jnp.full((), FAILURES, jnp.int32),
        trial_interval=jnp.full((), MOST_STEPS, jnp.int32),
        overflows_left=overflows_left,
    )


def after_step(
    grads_finite: jax.Array,
    backs_off: jax.Array,
    loss_scale: jax.Array,
    state: LevelRuleState,
    move: Movement,
) -> tuple[jax.Array, LevelRuleState, jax.Array]:
    """As :func:`_classic.after_step`, with a level."""
    state = _as_found(loss_scale, state, move)
    loss_scale = move.clip(loss_scale)
    high, after_finite = _after_finite(loss_scale, state, move)
    low, after_overflow = _after_overflow(loss_scale, state, move)
    lowers = backs_off & ~grads_finite
    new = jax.tree.map(
        lambda finite, overflow, before: jnp.where(
            grads_finite, finite, jnp.where(lowers, overflow, before)
        ),
        after_finite._replace(last_scale=high),
        after_overflow._replace(last_scale=low),
        state._replace(
            last_scale=loss_scale, finite_steps=jnp.zeros_like(state.finite_steps)
        ),
    )
    return new.last_scale, new, high > loss_scale


def _as_found(
    loss_scale: jax.Array, state: LevelRuleState, move: Movement
) -> LevelRuleState:
    """The state in the bounds of today; a new one where the scale was set from outside."""
    new = first_state(loss_scale, state.overflows_left)
    is_ours = loss_scale == state.last_scale
    state = jax.tree.map(lambda old, new: jnp.where(is_ours, old, new), state, new)
    return state._replace(
        level=move.clip(state.level),
        growth_count=jnp.maximum(state.growth_count, 0),
        finite_steps=jnp.maximum(state.finite_steps, 0),
        test_steps=jnp.clip(state.test_steps, 0, move.growth_interval),
        failures=jnp.clip(state.failures, 0, FAILURES),
        trial_interval=jnp.maximum(state.trial_interval, 1),
    )


def _after_finite(
    loss_scale: jax.Array, state: LevelRuleState, move: Movement
) -> tuple[jax.Array, LevelRuleState]:
    """Goes back up to the level, ends a trial that went well, or begins one."""
    full, recovery = move.growth_interval, move.recovery_interval
    growth_count = jnp.minimum(state.growth_count, MOST_STEPS - 1) + 1
    finite_steps = jnp.minimum(state.finite_steps, MOST_STEPS - 1) + 1
    test_steps, interval = state.test_steps, state.trial_interval

    is_proved = (loss_scale > state.level) & (finite_steps >= test_steps)
    level = jnp.where(is_proved, loss_scale, state.level)
    shorter = jnp.maximum(interval // 2, _times(SOONEST, recovery))
    shorter = jnp.where(interval > full // 2, MOST_STEPS, shorter)
    interval = jnp.where(is_proved, shorter, interval)
    failures = jnp.where(state.failures >= FAILURES, 0, state.failures)  # it is tried

    is_below, is_watched = loss_scale < level, test_steps > 0
    wait = jnp.where(is_watched, test_steps, recovery)
    goes_back = is_below & (finite_steps >= wait)
    interval_now = jnp.minimum(interval, full)
    tries = (loss_scale == level) & (growth_count >= interval_now)
    tries &= finite_steps >= recovery
    higher = move.grown(loss_scale)
    higher = jnp.where(is_below, jnp.minimum(higher, level), higher)
    fits = move.fits(higher)
    grows = (goes_back | tries) & fits & (higher > loss_scale)
    # The gradient leaves no room for another bit: ask less and less often. At each step
    # it would only wait for an unusually small gradient.
    waits_longer = goes_back & ~fits

    trial = jnp.maximum(jnp.minimum(finite_steps, interval_now) // 2, 1)
    test_steps = jnp.where(is_proved | goes_back, 0, test_steps)
    test_steps = jnp.where(tries & grows, trial, test_steps)
    test_steps = jnp.where(waits_longer, jnp.minimum(_times(2, wait), full), test_steps)
    is_cleared = (goes_back & ~is_watched) | tries
    return jnp.where(grows, higher, loss_scale), state._replace(
        level=level,
        growth_count=jnp.where(tries, 0, growth_count),
        finite_steps=jnp.where(grows | waits_longer, 0, finite_steps),
        test_steps=test_steps,
        failures=jnp.where(is_cleared, 0, failures),
        trial_interval=interval,
    )


def _after_overflow(
    loss_scale: jax.Array, state: LevelRuleState, move: Movement
) -> tuple[jax.Array, LevelRuleState]:
    """Backs off, and asks the lower scale whether the higher one was to blame."""
    full, recovery = move.growth_interval, move.recovery_interval
    lower = move.backed_off(loss_scale)
    lasted = jnp.minimum(state.finite_steps, full)

    on_trial = loss_scale > state.level
    is_watched = (loss_scale < state.level) & (state.test_steps > 0)
    # In a streak of overflows the scale may be far too high.
    acquits = is_watched & (lasted > 0) & (move.grown(loss_scale) > loss_scale)
    is_untried = state.failures >= FAILURES
    failures = jnp.where(on_trial | is_watched, 0, state.failures + 1)
    gives_up = failures >= FAILURES
    level = jnp.where(gives_up, lower, state.level)

    watch = jnp.clip(_times(WATCH, lasted), recovery, full)
    watch = jnp.where(is_watched, recovery, watch)
    test_steps = jnp.where(lower < level, watch, 0)
    # A large growth factor leaves the scale above its level, and still on trial.
    left = jnp.where(lower > level, state.test_steps, 0)
    test_steps = jnp.where(on_trial, left, test_steps)

    patience = jnp.maximum(_times(PATIENCE, lasted), _times(SOONEST, recovery))
    interval = jnp.where(gives_up & ~is_untried, patience, state.trial_interval)
    # A bad batch in each so many steps must not meet every trial: so the next one comes
    # at another time where it was not the first step that failed.
    is_full = state.trial_interval >= full
    again = jnp.where(is_full & (lasted > 0), full - full // 4, _times(2, interval))
    interval = jnp.where(on_trial, again, interval)
    new_failures = jnp.where(is_untried, FAILURES, 0)
    return jnp.where(acquits, loss_scale, lower), state._replace(
        level=level,
        growth_count=jnp.where(on_trial | gives_up, 0, state.growth_count),
        finite_steps=jnp.zeros_like(state.finite_steps),
        test_steps=jnp.where(acquits, 1, test_steps),
        failures=jnp.where(gives_up, new_failures, failures),
        trial_interval=jnp.where(interval >= full, MOST_STEPS, interval),
    )


def _times(factor: int, steps: _settings.Scalar) -> jax.Array:
    return jnp.minimum(steps, MOST_STEPS // factor) * factor
