"""How the loss scale moves: against recorded systems, a plain model, and bad settings."""

import json
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import optax_dls as dls

NUMBERS = ("init_scale", "growth_factor", "backoff_factor", "min_scale", "max_scale")
GOLDEN = json.loads((pathlib.Path(__file__).parent / "golden.json").read_text())
LONGEST = 400


@jax.jit
def run(rule_settings, finite):
    """The scale before the first step and after each, through the whole wrapper."""
    tx = dls.dynamic_loss_scaling(optax.sgd(1.0), **rule_settings)
    params = jnp.zeros(())

    def step(state, is_finite):
        grads = jnp.where(is_finite, dls.loss_scale(state), jnp.inf)
        updates, state = tx.update(grads, state, params)
        return state, (
            dls.loss_scale(state),
            state.scaler.consecutive_skips > 0,
            updates,
        )

    state = tx.init(params)
    _, (scales, skipped, updates) = jax.lax.scan(step, state, finite)
    return dls.loss_scale(state), scales, skipped, updates


def run_padded(rule_settings, finite):
    """`run`, compiled once for every length and setting."""
    padded = np.ones(LONGEST, bool)
    padded[: len(finite)] = finite
    rule_settings = {
        name: jnp.asarray(value, jnp.float32 if name in NUMBERS else jnp.int32)
        for name, value in rule_settings.items()
    }
    init, *per_step = run(rule_settings, padded)
    return np.asarray(init), *(np.asarray(x)[: len(finite)] for x in per_step)


def recorded_scales(case):
    """float32 scales after each step of a recording.

    `moves` is = (kept), + (times the growth factor) or - (times the backoff factor)
    for each step, or a list of log2 of the scale where that does not describe it.
    """
    moves = case["moves"]
    if isinstance(moves, str):
        step = {
            "=": 0,
            "+": case["log2_growth_factor"],
            "-": case["log2_backoff_factor"],
        }
        moves = case["log2_init_scale"] + np.cumsum([step[move] for move in moves])
    return np.float32(2.0 ** np.asarray(moves, float))


@pytest.mark.parametrize(
    "case", GOLDEN, ids=[f"{case['system']}-{case['name']}" for case in GOLDEN]
)
def test_moves_as_the_recorded_system_does(case):
    rule_settings = {name: 2.0 ** case[f"log2_{name}"] for name in NUMBERS}
    rule_settings["growth_interval"] = case["growth_interval"]
    finite = np.array([flag == "." for flag in case["flags"]])

    _, scales, skipped, updates = run_padded(rule_settings, finite)

    np.testing.assert_array_equal(scales, recorded_scales(case))
    # With two optimizers under one scaler torch lets the good one step; here one
    # wrapper is one optimizer, so only the scale can be compared.
    if "two_optimizers" not in case["name"]:
        np.testing.assert_array_equal(skipped, [f == "x" for f in case["flags"]])
    np.testing.assert_array_equal(updates, np.where(finite, -1.0, 0.0))


def plain_model(rule_settings, finite):
    """The rule in plain Python: float32 arithmetic, one step at a time."""
    scale, count, scales = np.float32(rule_settings["init_scale"]), 0, []
    for is_finite in finite:
        count = count + 1 if is_finite else 0
        if not is_finite:
            scale *= np.float32(rule_settings["backoff_factor"])
        elif count == rule_settings["growth_interval"]:
            count = 0
            scale *= np.float32(rule_settings["growth_factor"])
        scale = np.float32(
            min(max(scale, rule_settings["min_scale"]), rule_settings["max_scale"])
        )
        scales.append(scale)
    return scales


@st.composite
def legal_settings(draw):
    low, start, high = sorted(
        draw(st.lists(st.floats(-100, 126), min_size=3, max_size=3))
    )
    return {
        "min_scale": float(np.float32(2.0**low)),
        "init_scale": float(np.float32(2.0**start)),
        "max_scale": float(np.float32(2.0**high)),
        "growth_factor": draw(st.sampled_from([1.0, 1.1, 1.5, 2.0, 4.0, 1024.0, 3e38])),
        "backoff_factor": draw(st.sampled_from([1e-30, 0.1, 0.25, 0.5, 0.7, 0.99])),
        "growth_interval": draw(st.integers(1, 12)),
    }


@settings(max_examples=200, deadline=None)
@given(
    legal_settings(),
    st.lists(st.sampled_from([True, True, True, False]), min_size=1, max_size=LONGEST),
)
def test_equals_a_plain_model_and_stays_inside_its_bounds(rule_settings, finite):
    dls.rules.dynamic(**rule_settings)  # is accepted as static values, too
    init, scales, skipped, _ = run_padded(rule_settings, np.array(finite))
    assert init == np.float32(rule_settings["init_scale"])
    with np.errstate(over="ignore", under="ignore"):
        np.testing.assert_array_equal(scales, plain_model(rule_settings, finite))
    np.testing.assert_array_equal(skipped, np.logical_not(finite))
    assert np.all(np.isfinite(scales))
    assert np.all(scales >= np.float32(rule_settings["min_scale"]))
    assert np.all(scales <= np.float32(rule_settings["max_scale"]))


def test_a_growth_interval_of_one_grows_on_every_finite_step():
    rule = dls.rules.dynamic(init_scale=1.0, growth_interval=1, max_scale=4.0)
    scale, state = rule.init()
    scales = []
    for finite in (True, True, True, False, True):
        scale, state = rule.update(jnp.array(finite), scale, state)
        scales.append(float(scale))
    assert scales == [2, 4, 4, 2, 4]


def test_the_longest_interval_does_not_overflow_its_counter():
    rule = dls.rules.dynamic(growth_interval=2**31 - 1)
    scale, _ = rule.init()
    for count, grown in ((2**31 - 3, 1), (2**31 - 2, 2)):
        state = dls.rules.DynamicRuleState(growth_count=jnp.int32(count))
        new_scale, new_state = rule.update(jnp.array(True), scale, state)
        assert float(new_scale) == grown * float(scale)
        assert 0 <= int(new_state.growth_count) <= 2**31 - 2


WRONG_TYPES = [
    *(True, False, "65536", None, 1j, [2.0], np.True_),
    *(jnp.array([2.0]), jnp.array(True), jnp.array(2j)),
]
NOT_A_SCALE = [math.nan, math.inf, -math.inf, 0.0, 0, -1.0, 2.0**-101, 2.0**127, 10**40]


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        *((name, value, TypeError) for name in NUMBERS for value in WRONG_TYPES),
        *(
            ("growth_interval", value, TypeError)
            for value in [*WRONG_TYPES, 2000.0, 0.5]
        ),
        ("growth_interval", jnp.array(2.0), TypeError),
        *(("growth_interval", value, ValueError) for value in (0, -1, 2**31)),
        *(
            (name, value, ValueError)
            for name in ("init_scale", "min_scale", "max_scale")
            for value in NOT_A_SCALE
        ),
        *(
            ("growth_factor", value, ValueError)
            for value in (math.nan, math.inf, 0.0, -2.0, 0.5)
        ),
        *(
            ("backoff_factor", value, ValueError)
            for value in (math.nan, math.inf, 0.0, -0.5, 1.0, 2)
        ),
    ],
)
def test_a_bad_setting_is_refused_by_name_rule_and_value(name, value, error):
    with pytest.raises(error) as caught:
        dls.dynamic_loss_scaling(optax.sgd(1.0), **{name: value})
    message = str(caught.value)
    assert message.startswith(f"{name} must be ")
    assert repr(value) in message or "of shape ()" in message
    assert message.count(". ") >= 1  # the cure comes after the fault


@pytest.mark.parametrize(
    ("bounds", "named"),
    [
        ({"min_scale": 8.0, "max_scale": 4.0}, "min_scale=8.0 and max_scale=4.0"),
        ({"init_scale": 2.0**-20}, "and init_scale="),
        ({"init_scale": 2.0**40}, "init_scale=1099511627776.0 and max_scale="),
        ({"max_scale": 64}, "init_scale=32768.0 and max_scale=64"),
    ],
)
def test_bounds_out_of_order_are_refused_with_both_values(bounds, named):
    with pytest.raises(ValueError, match="must be at most") as caught:
        dls.rules.dynamic(**bounds)
    assert named in str(caught.value)


@pytest.mark.parametrize("value", [*WRONG_TYPES, *NOT_A_SCALE])
def test_a_bad_static_scale_is_refused(value):
    with pytest.raises((TypeError, ValueError), match="scale must be"):
        dls.static_loss_scaling(optax.sgd(1.0), value)


@pytest.mark.parametrize(
    "value",
    [2**10, np.float32(1024), np.int64(1024), np.float64(1024), jnp.float16(1024)],
)
def test_any_kind_of_real_number_is_a_scale(value):
    for rule in (dls.rules.dynamic(init_scale=value), dls.rules.static(value)):
        scale, _ = rule.init()
        assert scale.dtype == jnp.float32
        assert float(scale) == 1024.0


@pytest.mark.parametrize(
    ("arrays", "expected"),
    [
        ({"init_scale": math.inf}, 2.0**32),
        ({"init_scale": math.nan}, 2.0**-14),
        ({"init_scale": 0.0}, 2.0**-14),
        ({"init_scale": -5.0}, 2.0**-14),
        ({"init_scale": math.inf, "max_scale": math.inf}, 2.0**32),
        ({"init_scale": math.inf, "max_scale": 3e38}, 2.0**126),
        ({"init_scale": 0.0, "min_scale": 0.0}, 2.0**-100),
        ({"init_scale": 8.0, "min_scale": 64.0, "max_scale": 16.0}, 16.0),
    ],
)
def test_arrays_are_clamped_where_numbers_are_refused(arrays, expected):
    rule = dls.rules.dynamic(**{k: jnp.float32(v) for k, v in arrays.items()})
    assert float(rule.init()[0]) == expected


def test_nonsense_factors_as_arrays_never_leave_the_bounds():
    for growth, backoff in ((math.nan, math.nan), (math.inf, -1.0), (0.0, math.inf)):
        rule = dls.rules.dynamic(
            growth_factor=jnp.float32(growth),
            backoff_factor=jnp.float32(backoff),
            growth_interval=jnp.int32(-3),
        )
        scale, state = rule.init()
        for finite in (True, False, False, True):
            scale, state = rule.update(jnp.array(finite), scale, state)
            assert 2.0**-14 <= float(scale) <= 2.0**32


def test_the_static_scale_of_the_rule_wins_over_a_restored_one():
    old, new = (dls.static_loss_scaling(optax.sgd(1.0), s) for s in (1024.0, 8.0))
    state = old.init(jnp.zeros(1))
    _, state = new.update(jnp.array([1.0]), state)
    assert float(dls.loss_scale(state)) == 8.0
    inject = optax.inject_hyperparams(dls.static_loss_scaling)
    tx = inject(optax.sgd(1.0), scale=optax.linear_schedule(8.0, 16.0, 1))
    state, params = tx.init(jnp.zeros(1)), jnp.zeros(1)
    for expected in (8.0, 16.0, 16.0):
        _, state = tx.update(jnp.array([1.0]), state, params)
        assert float(dls.loss_scale(state)) == expected
