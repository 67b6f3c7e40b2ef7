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


def test_a_gradient_that_does_not_fit_ends_the_recovery():
    rule = rules.dynamic(
        init_scale=16.0, growth_interval=50, recovery_interval=2, gradient_limit=100.0
    )
    flags = "xxx" + "." * 52
    fitting, _ = follow(rule, flags)
    assert fitting[3:9].tolist() == [2, 4, 4, 8, 8, 8]
    # Of the finite steps the second, on which it is due, has a large gradient.
    large, _ = follow(rule, flags, largest=np.where(np.arange(len(flags)) == 4, 1e3, 1))
    assert large[3:54].tolist() == [2.0] * 51
    assert large[54] == 4.0


def test_the_longest_way_back_does_not_wrap_around():
    rule = rules.dynamic(growth_interval=2**31 - 1, recovery_interval=2**31 - 1)
    _, state = follow(rule, "x" * 8)
    assert state.growth_count.tolist() == [0] + [-(2**30)] * 7


def test_factors_that_undo_each_other_but_for_rounding_recover_all_the_way():
    """The logarithm of 1.1 / (1 / 1.1) is a little less than two growths."""
    rule = rules.dynamic(
        growth_factor=1.1,
        backoff_factor=1 / 1.1,
        growth_interval=1000,
        recovery_interval=10,
    )
    scales, _ = follow(rule, "x" * 21 + "." * 200)
    np.testing.assert_allclose(scales[20], scales[0] / 1.1**20, rtol=1e-5)
    np.testing.assert_allclose(scales[-1], scales[0], rtol=1e-5)


@pytest.mark.parametrize("refill", ["growth", "backoff"])
def test_spent_hysteresis_stays_spent_however_many_overflows_follow(refill):
    rule = rules.dynamic(hysteresis=2, hysteresis_refill=refill)
    spent = rules.HysteresisRuleState(jnp.int32(0), jnp.int32(-(2**30)))
    scales, state = follow(rule, "xxx", start=(jnp.float32(8), spent))
    assert scales.tolist() == [4.0, 2.0, 1.0]
    assert state.overflows_left.tolist() == [-(2**30)] * 3


@pytest.mark.parametrize(("excess", "below"), [(1.0, 0), (1.001, 1)])
def test_log_normal_takes_the_power_of_two_that_just_fits(excess, below):
    rule = rules.log_normal()
    for exponent in range(-10, 20):
        largest = 65504.0 * excess / 2.0**exponent
        scales, _ = follow(rule, "." * 60, largest)
        assert scales[-1] == 2.0 ** (exponent - below)


# A backoff is half a growth, so ways back have half intervals and every flag matters.
RULE = rules.dynamic(growth_factor=4.0, recovery_interval=2, growth_interval=50)
UPDATE, RETRYING_UPDATE = jax.jit(RULE.update), jax.jit(rules.retrying(RULE).update)


@pytest.mark.parametrize("last_finite", [True, False])
@pytest.mark.parametrize("outcome", [True, False])
@pytest.mark.parametrize("retries", [0, 1, 2, 3])
def test_retries_and_their_outcome_move_the_scale_as_steps_would(
    retries, outcome, last_finite
):
    before = UPDATE(last_finite, *RULE.init(), last_finite=True)
    as_steps, last = before, last_finite
    for flag in [False] * retries + [outcome]:
        as_steps, last = UPDATE(flag, *as_steps, last_finite=last), flag

    scale, state = before
    state = rules.RetryingRuleState(jnp.int32(retries), jnp.int32(7), state)
    scale, state = RETRYING_UPDATE(outcome, scale, state, last_finite=last_finite)
    assert (scale, state.rule_state) == as_steps
    assert (state.pending_retries, state.total_retries) == (0, 7)
