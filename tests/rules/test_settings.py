"""Settings: numbers are refused with the cure, arrays are clamped where they are used."""

import functools
import math

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_dls as dls
from optax_dls import rules

NUMBERS = ("init_scale", "growth_factor", "backoff_factor", "min_scale", "max_scale")
STEPS = ("growth_interval", "recovery_interval", "hysteresis")
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
            (name, value, TypeError)
            for name in STEPS
            for value in [*WRONG_TYPES, 2000.0, 0.5, jnp.array(2.0)]
            if value is not None or name == "growth_interval"
        ),
        *((name, value, ValueError) for name in STEPS for value in (0, -1, 2**31)),
        *(
            ("gradient_limit", value, ValueError)
            for value in (math.nan, math.inf, 0.0, -1.0)
        ),
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
        ({"init_scale": math.inf}, 2.0**15),
        ({"init_scale": math.nan}, 2.0**15),
        ({"init_scale": 0.0}, 2.0**-14),
        ({"init_scale": -5.0}, 2.0**-14),
        ({"init_scale": 3e38, "max_scale": math.inf}, 2.0**32),
        ({"init_scale": 3e38, "max_scale": 3e38}, 2.0**126),
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


@pytest.mark.parametrize(
    "make",
    [
        rules.dynamic,
        functools.partial(rules.overflow_rate, tolerance=0.25),
        rules.gradual,
        rules.log_normal,
    ],
    ids=["dynamic", "overflow rate", "gradual", "log-normal"],
)
def test_every_rule_refuses_a_bad_start_and_a_bad_factor(make):
    with pytest.raises(ValueError, match="init_scale must be"):
        make(init_scale=math.nan)
    with pytest.raises(ValueError, match="above 0 and below 1"):
        make(backoff_factor=1.0)
