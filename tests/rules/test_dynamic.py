"""The dynamic rule: against a plain model, and where it recovers from a burst."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
from hypothesis import given, settings
from hypothesis import strategies as st

import optax_dls as dls

LONGEST = 400  # steps of what conftest.py compiles once


def plain_model(rule_settings, finite, refill="growth"):
    """The rule in plain Python, with the threshold as a number of its own."""
    scale, count, threshold = np.float32(rule_settings["init_scale"]), 0, -math.inf
    tolerance = left = rule_settings.get("hysteresis") or 1
    recovery = rule_settings["recovery_interval"] or rule_settings["growth_interval"]
    recovery = min(recovery, rule_settings["growth_interval"])
    low, high = rule_settings["min_scale"], rule_settings["max_scale"]
    has_backed_off, scales = False, []
    for is_finite in finite:
        if is_finite:
            count, has_backed_off = count + 1, False
            is_low = scale * rule_settings["growth_factor"] <= threshold
            grows = count == (recovery if is_low else rule_settings["growth_interval"])
            if grows:
                count = 0
                scale *= np.float32(rule_settings["growth_factor"])
            if grows or refill != "growth":
                left = tolerance
        else:
            count, left = 0, left - 1
            if left <= 0:
                scale *= np.float32(rule_settings["backoff_factor"])
                if not has_backed_off:
                    threshold = float(max(scale, np.float32(low)))
                has_backed_off = True
                left = tolerance if refill == "backoff" else left
            elif not has_backed_off:
                threshold = -math.inf
        scale = np.float32(min(max(scale, low), high))
        scales.append(scale)
    return scales


def powers(low, high):
    return st.integers(low, high).map(lambda exponent: 2.0**exponent)


@st.composite
def legal_settings(draw, bounds):
    low, start, high = sorted(draw(st.lists(bounds, min_size=3, max_size=3)))
    return {
        "min_scale": float(np.float32(2.0**low)),
        "init_scale": float(np.float32(2.0**start)),
        "max_scale": float(np.float32(2.0**high)),
        "growth_interval": draw(st.integers(1, 12)),
    }


finite_flags = st.lists(
    st.sampled_from([True, True, True, False]), min_size=1, max_size=LONGEST
)


@settings(max_examples=150, deadline=None)
@given(
    legal_settings(st.floats(-100, 126)),
    st.sampled_from([1.0, 1.1, 1.5, 2.0, 4.0, 1024.0, 3e38]),
    st.sampled_from([1e-30, 0.1, 0.25, 0.5, 0.7, 0.99]),
    finite_flags,
)
def test_equals_a_plain_model_and_stays_inside_its_bounds(
    run_dynamic, rule_settings, growth_factor, backoff_factor, finite
):
    rule_settings |= {
        "growth_factor": growth_factor,
        "backoff_factor": backoff_factor,
        "recovery_interval": None,
    }
    dls.rules.dynamic(**rule_settings)  # is accepted as static values, too
    init, scales, skipped, _ = run_dynamic(rule_settings, np.array(finite))
    assert init == np.float32(rule_settings["init_scale"])
    with np.errstate(over="ignore", under="ignore"):
        np.testing.assert_array_equal(scales, plain_model(rule_settings, finite))
    np.testing.assert_array_equal(skipped, np.logical_not(finite))
    assert np.all(np.isfinite(scales))
    assert np.all(scales >= np.float32(rule_settings["min_scale"]))
    assert np.all(scales <= np.float32(rule_settings["max_scale"]))


bursts = st.lists(
    st.tuples(st.booleans(), st.integers(1, 15)), min_size=1, max_size=40
).map(lambda runs: [flag for flag, length in runs for _ in range(length)][:LONGEST])


@settings(max_examples=200, deadline=None)
@given(
    legal_settings(st.integers(-60, 60)),
    st.sampled_from([(2.0, 0.5), (2.0, 0.25), (4.0, 0.25), (4.0, 0.5)]),
    st.sampled_from([None, 1, 2, 4, 10]),
    st.sampled_from([None, 1, 2, 3]),
    st.sampled_from(["growth", "finite", "backoff"]),
    bursts,
)
def test_recovery_and_hysteresis_equal_a_plain_model(
    run_dynamic, rule_settings, factors, recovery_interval, hysteresis, refill, finite
):
    if factors == (4.0, 0.5):  # half a growth is kept in whole steps
        recovery_interval = recovery_interval and 2 * recovery_interval
        rule_settings["growth_interval"] = 24
    rule_settings |= {
        "growth_factor": factors[0],
        "backoff_factor": factors[1],
        "recovery_interval": recovery_interval,
        "hysteresis": hysteresis,
    }
    refill = refill if hysteresis else "growth"  # where it means nothing, one program
    _, scales, skipped, _ = run_dynamic(rule_settings, np.array(finite), refill)
    np.testing.assert_array_equal(scales, plain_model(rule_settings, finite, refill))
    np.testing.assert_array_equal(skipped, np.logical_not(finite))


SLOW = {"init_scale": 2.0**10, "growth_interval": 100}


class TestRecovery:
    def test_a_burst_of_twenty_is_made_good_in_190_steps(self, scales_of):
        flags = "x" * 20 + "." * 300
        scales, counts = scales_of(flags, recovery_interval=10, **SLOW)
        assert scales[19] == -10
        assert scales[20 + 188] == 8
        assert scales[20 + 189] == 9  # where the first overflow left it
        assert counts[19] == -190
        assert counts[20 + 189] == 0
        assert scales[20 + 288] == 9
        assert scales[20 + 289] == 10  # after the growth interval
        classic, _ = scales_of(flags, recovery_interval=None, **SLOW)
        assert classic[20 + 189] == -9

    def test_a_single_overflow_changes_nothing(self, scales_of):
        flags = "." * 120 + "x" + "." * 130 + "x" + "." * 140
        with_recovery = scales_of(flags, recovery_interval=10, **SLOW)
        assert with_recovery == scales_of(flags, recovery_interval=None, **SLOW)

    def test_an_overflow_on_the_way_ends_it_there(self, scales_of):
        flags = "xxxxx" + "." * 10 + "x" + "." * 50
        scales, _ = scales_of(flags, recovery_interval=10, **SLOW)
        assert scales[4] == 5
        assert scales[14] == 6
        assert scales[15:] == [5] * 51

    def test_a_burst_at_the_floor_does_not_overshoot(self, scales_of):
        flags = "x" * 50 + "." * 300
        scales, _ = scales_of(flags, recovery_interval=10, min_scale=2.0**4, **SLOW)
        assert scales[5:59] == [4] * 54
        assert scales[50 + 49] == 9
        assert scales[50 + 148] == 9

    def test_it_is_never_slower_than_growth(self, scales_of):
        flags = "xxx" + "." * 20
        scales, _ = scales_of(
            flags, init_scale=2.0**10, growth_interval=2, recovery_interval=10
        )
        assert scales[2:8] == [7, 7, 8, 8, 9, 9]

    def test_factors_that_do_not_undo_each_other_never_pass_the_threshold(
        self, run_dynamic
    ):
        for growth_factor, backoff_factor in ((2.0, 0.7), (1.5, 0.5), (1.1, 0.9)):
            finite = np.array([False] * 20 + [True] * 380)
            _, scales, _, _ = run_dynamic(
                {
                    "growth_factor": growth_factor,
                    "backoff_factor": backoff_factor,
                    "growth_interval": 390,
                    "recovery_interval": 10,
                },
                finite,
            )
            threshold = scales[0]
            assert threshold / growth_factor**2 < scales[-1] <= threshold * 1.001

    def test_a_growth_larger_than_the_backoff_does_not_pass_the_threshold(
        self, scales_of
    ):
        for flags, end in (("xx", 8), ("xxx", 9), ("xxxx", 8), ("xxxxx", 9)):
            scales, _ = scales_of(
                flags + "." * 60, growth_factor=4.0, recovery_interval=2, **SLOW
            )
            assert scales[-1] == end

    def test_a_step_that_the_rule_was_not_told_of_makes_no_streak(self):
        tx = dls.dynamic_loss_scaling(optax.sgd(1.0))
        state, params = tx.init(jnp.zeros(())), jnp.zeros(())
        _, state = tx.update(jnp.array(1.0), state, params)
        _, state = tx.update(
            jnp.array(jnp.nan), state, params, value=jnp.float32(jnp.nan)
        )
        _, state = tx.update(jnp.array(jnp.inf), state, params)
        assert float(dls.loss_scale(state)) == 2.0**14
        assert int(state.scaler.rule_state.growth_count) == 0

    def test_a_recovering_state_under_the_rule_without_recovery_starts_counting(self):
        rule = dls.rules.dynamic(growth_interval=3, recovery_interval=None)
        scale = jnp.float32(8)
        state = dls.rules.DynamicRuleState(growth_count=jnp.int32(-40))
        update = jax.jit(rule.update)
        for _ in range(3):
            scale, state = update(jnp.array(True), scale, state)
        assert float(scale) == 16.0

    def test_a_scale_that_never_grows_does_not_recover(self, scales_of):
        scales, counts = scales_of(
            "xxx" + "." * 50, growth_factor=1.0, recovery_interval=10, **SLOW
        )
        assert scales == [9, 8] + [7] * 51
        assert min(counts) == 0

    def test_a_rule_called_on_its_own_takes_each_overflow_for_a_single_one(self):
        rule = dls.rules.dynamic()
        assert rule.needs == ("last_finite",)
        scale, state = rule.init()
        update = jax.jit(rule.update)
        for _ in range(3):
            scale, state = update(jnp.array(False), scale, state)
        assert int(state.growth_count) == 0
        assert dls.rules.dynamic(recovery_interval=None).needs == ()

    def test_a_nonfinite_loss_is_no_overflow_but_keeps_the_streak(self):
        tx = dls.dynamic_loss_scaling(optax.sgd(1.0), recovery_interval=10)
        state, params = tx.init(jnp.zeros(())), jnp.zeros(())
        bad, nan = jnp.array(jnp.inf), jnp.float32(jnp.nan)
        _, state = tx.update(bad, state, params)
        _, state = tx.update(bad, state, params, value=nan)
        assert int(state.scaler.rule_state.growth_count) == 0
        assert float(dls.loss_scale(state)) == 2.0**14
        _, state = tx.update(bad, state, params)
        assert int(state.scaler.rule_state.growth_count) == -10
        assert float(dls.loss_scale(state)) == 2.0**13


class TestGradientLimit:
    def test_no_growth_into_a_certain_overflow(self):
        """With one gradient of 3, the scale 2**14 is the last that float16 holds."""
        results = {}
        for limit in (None, 65504.0):
            tx = dls.dynamic_loss_scaling(
                optax.sgd(1.0), init_scale=2.0, growth_interval=1, gradient_limit=limit
            )

            @jax.jit
            def step(state, _, tx=tx):
                grads = (3 * dls.loss_scale(state)).astype(jnp.float16)
                _, state = tx.update(grads, state)
                return state, dls.loss_scale(state)

            start = tx.init(jnp.zeros((), jnp.float16))
            state, scales = jax.lax.scan(step, start, length=30)
            results[limit] = int(state.scaler.total_skips), float(scales[-1])
        assert results[65504.0] == (0, 2.0**14)
        assert results[None][0] > 5

    def test_it_is_asked_once_in_an_interval(self, follow):
        rule = dls.rules.dynamic(
            init_scale=8.0, growth_interval=3, gradient_limit=100.0
        )
        assert rule.needs == ("last_finite", "largest_gradient")
        scales, _ = follow(rule, "......", [1.0, 1.0, 7.0, 1.0, 7.0, 6.0])
        assert scales == [3, 3, 3, 3, 3, 4]


def test_a_growth_interval_of_one_grows_on_every_finite_step(follow):
    rule = dls.rules.dynamic(init_scale=1.0, growth_interval=1, max_scale=4.0)
    assert follow(rule, "...x.")[0] == [1, 2, 2, 1, 2]


def test_the_longest_interval_does_not_overflow_its_counter():
    rule = dls.rules.dynamic(growth_interval=2**31 - 1)
    scale, _ = rule.init()
    for count, grown in ((2**31 - 3, 1), (2**31 - 2, 2)):
        state = dls.rules.DynamicRuleState(growth_count=jnp.int32(count))
        new_scale, new_state = rule.update(jnp.array(True), scale, state)
        assert float(new_scale) == grown * float(scale)
        assert 0 <= int(new_state.growth_count) <= 2**31 - 2
