"""The dynamic rule: its classic way against a plain model, and what both ways share."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import optax_dls as dls

LONGEST = 400  # steps of what conftest.py compiles once


def plain_model(rule_settings, finite, refill="growth"):
    """The classic rule in plain Python."""
    scale, count = np.float32(rule_settings["init_scale"]), 0
    tolerance = left = rule_settings.get("hysteresis") or 1
    low, high = rule_settings["min_scale"], rule_settings["max_scale"]
    scales = []
    for is_finite in finite:
        if is_finite:
            count += 1
            grows = count == rule_settings["growth_interval"]
            if grows:
                count = 0
                scale *= np.float32(rule_settings["growth_factor"])
            if grows or refill != "growth":
                left = tolerance
        else:
            count, left = 0, left - 1
            if left <= 0:
                scale *= np.float32(rule_settings["backoff_factor"])
                left = tolerance if refill == "backoff" else left
        scale = np.float32(min(max(scale, low), high))
        scales.append(scale)
    return scales


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


@settings(max_examples=150, deadline=None)
@given(
    legal_settings(st.integers(-60, 60)),
    st.sampled_from([(2.0, 0.5), (2.0, 0.25), (4.0, 0.25), (4.0, 0.5)]),
    st.sampled_from([None, 1, 2, 3]),
    st.sampled_from(["growth", "finite", "backoff"]),
    bursts,
)
def test_hysteresis_equals_a_plain_model(
    run_dynamic, rule_settings, factors, hysteresis, refill, finite
):
    rule_settings |= {
        "growth_factor": factors[0],
        "backoff_factor": factors[1],
        "recovery_interval": None,
        "hysteresis": hysteresis,
    }
    refill = refill if hysteresis else "growth"  # where it means nothing, one program
    _, scales, skipped, _ = run_dynamic(rule_settings, np.array(finite), refill)
    np.testing.assert_array_equal(scales, plain_model(rule_settings, finite, refill))
    np.testing.assert_array_equal(skipped, np.logical_not(finite))


def test_a_count_below_zero_starts_at_zero():
    rule = dls.rules.dynamic(growth_interval=3, recovery_interval=None)
    scale = jnp.float32(8)
    state = dls.rules.DynamicRuleState(growth_count=jnp.int32(-40))
    update = jax.jit(rule.update)
    for _ in range(3):
        scale, state = update(jnp.array(True), scale, state)
    assert float(scale) == 16.0


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
        assert rule.needs == ("largest_gradient",)
        scales, _ = follow(rule, "......", [1.0, 1.0, 7.0, 1.0, 7.0, 6.0])
        assert scales == [3, 3, 3, 3, 3, 4]


@pytest.mark.parametrize("recovery_interval", [10, None])
def test_a_growth_interval_of_one_grows_on_every_finite_step(follow, recovery_interval):
    rule = dls.rules.dynamic(
        init_scale=1.0,
        growth_interval=1,
        max_scale=4.0,
        recovery_interval=recovery_interval,
    )
    assert follow(rule, "...x.")[0] == [1, 2, 2, 1, 2]


def test_the_longest_interval_does_not_overflow_its_counter():
    rule = dls.rules.dynamic(growth_interval=2**31 - 1, recovery_interval=None)
    scale, _ = rule.init()
    for count, grown in ((2**31 - 3, 1), (2**31 - 2, 2)):
        state = dls.rules.DynamicRuleState(growth_count=jnp.int32(count))
        new_scale, new_state = rule.update(jnp.array(True), scale, state)
        assert float(new_scale) == grown * float(scale)
        assert 0 <= int(new_state.growth_count) <= 2**31 - 2
