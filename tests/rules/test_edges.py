"""Rules where rounding, saturation or a bound decides."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optax_dls import rules


@functools.partial(jax.jit, static_argnames="rule")
def states(rule, start, finite, largest):
    def step(carry, inputs):
        (scale, state), last_finite = carry
        is_finite, largest_gradient = inputs
        info = {"last_finite": last_finite, "largest_gradient": largest_gradient}
        info = {name: info[name] for name in rule.needs}
        after = rule.update(is_finite, scale, state, **info)
        return (after, is_finite), after

    _, after = jax.lax.scan(step, (start, jnp.array(True)), (finite, largest))
    return after


def follow(rule, flags, largest=1.0, start=None):
    """The scales and the states after each flag, . for finite and x for overflow."""
    finite = np.array([flag == "." for flag in flags])
    largest = np.broadcast_to(np.float32(largest), finite.shape)
    scales, state = states(
        rule, rule.init() if start is None else start, finite, largest
    )
    return np.asarray(scales), state


def test_a_growth_into_the_ceiling_is_judged_by_the_gradient_at_the_ceiling():
    """5 * 16 is below the limit of 100, and 5 * 24 is not."""
    rule = rules.dynamic(
        init_scale=12.0, max_scale=16.0, growth_interval=1, gradient_limit=100.0
    )
    scales, _ = follow(rule, ".", largest=5.0)
    assert scales.tolist() == [16.0]


def test_on_the_way_back_a_gradient_that_does_not_fit_is_asked_less_and_less_often():
    rule = rules.dynamic(
        init_scale=16.0, growth_interval=50, recovery_interval=2, gradient_limit=100.0
    )
    flags = "..xxx" + "." * 30
    fitting, _ = follow(rule, flags)
    assert fitting[5:11].tolist() == [2, 4, 4, 8, 8, 16]
    # Too large at the second and the sixth finite step, where it is asked.
    large = np.isin(np.arange(len(flags)), (6, 10))
    waiting, state = follow(rule, flags, np.where(large, 1e3, 1))
    assert waiting[5:22].tolist() == [2] * 13 + [4] * 2 + [8] * 2
    assert state.level.tolist() == [16.0] * len(flags)


@pytest.mark.parametrize("refill", ["growth", "backoff"])
def test_spent_hysteresis_stays_spent_however_many_overflows_follow(refill):
    rule = rules.dynamic(init_scale=8.0, hysteresis=2, hysteresis_refill=refill)
    scale, state = rule.init()
    spent = state._replace(overflows_left=jnp.int32(-(2**30)))
    scales, state = follow(rule, "xxx", start=(scale, spent))
    assert scales.tolist() == [4.0, 2.0, 1.0]
    assert state.overflows_left.tolist() == [-(2**30)] * 3


@pytest.mark.parametrize(("excess", "below"), [(1.0, 0), (1.001, 1)])
def test_log_normal_takes_the_power_of_two_that_just_fits(excess, below):
    rule = rules.log_normal()
    for exponent in range(-10, 20):
        largest = 65504.0 * excess / 2.0**exponent
        scales, _ = follow(rule, "." * 60, largest)
        assert scales[-1] == 2.0 ** (exponent - below)


RULE = rules.dynamic(recovery_interval=2, growth_interval=50)
UPDATE = jax.jit(RULE.update)


@functools.partial(jax.jit, static_argnums=0)
def after_retries(rule, outcome, scale, state, **info):
    caught_up = rule.catch_up(scale, state, **info)
    return rule.update(outcome, *caught_up, **info, updates_rule=True)


@pytest.mark.parametrize("last_finite", [True, False])
@pytest.mark.parametrize("outcome", [True, False])
@pytest.mark.parametrize("retries", [0, 1, 2, 3])
def test_retries_and_their_outcome_move_the_scale_as_steps_would(
    retries, outcome, last_finite
):
    before = UPDATE(last_finite, *RULE.init())
    as_steps = before
    for flag in [False] * retries + [outcome]:
        as_steps = UPDATE(flag, *as_steps)

    scale, state = before
    state = rules.RetryingRuleState(jnp.int32(retries), jnp.int32(7), state)
    scale, state = after_retries(rules.retrying(RULE), outcome, scale, state)
    assert (scale, state.rule_state) == as_steps
    assert (state.pending_retries, state.total_retries) == (0, 7)


def test_retries_tell_a_rule_that_asks_of_the_overflow_before():
    """To it the second retry follows an overflow, whatever the last step was."""

    def note(grads_finite, loss_scale, seen, *, last_finite):
        return loss_scale, jnp.roll(seen, -1).at[-1].set(last_finite)

    asking = rules.Rule(
        lambda: (jnp.float32(8), jnp.zeros(3, bool)), note, ("last_finite",)
    )
    state = rules.RetryingRuleState(jnp.int32(2), jnp.int32(0), jnp.zeros(3, bool))
    _, state = after_retries(
        rules.retrying(asking), True, jnp.float32(8), state, last_finite=True
    )
    assert state.rule_state.tolist() == [True, False, False]
