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
        return state, (dls.loss_scale(state), state.scaler.consecutive_skips > 0, updates)

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
    low, start, high = sorted(draw(st.lists(st.floats(-100, 126), min_size=3, max_size=3)))
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
    st.lists(
        st.sampled_from([True, True, True, False]), min_size=1, max_size=LONGEST
    ),
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
