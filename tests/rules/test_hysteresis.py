"""A dynamic scale that backs off only after several overflows."""

import jax.numpy as jnp
import optax
import pytest

import optax_dls as dls

CLASSIC = {"init_scale": 2.0**16, "growth_interval": 3, "recovery_interval": None}


def test_two_overflows_before_the_first_backoff():
    """https://github.com/deepspeedai/DeepSpeed/issues/1599"""
    tx = dls.dynamic_loss_scaling(optax.sgd(1.0), init_scale=2.0**16, hysteresis=2)
    state, params = tx.init(jnp.zeros(())), jnp.zeros(())
    assert int(optax.tree.get(state, "overflows_left")) == 2
    for scale, left in ((65536.0, 1), (32768.0, 0), (16384.0, -1)):
        updates, state = tx.update(jnp.array(jnp.inf), state, params)
        assert float(updates) == 0.0
        assert float(dls.loss_scale(state)) == scale
        assert int(optax.tree.get(state, "overflows_left")) == left
    assert int(state.scaler.total_skips) == 3


@pytest.mark.parametrize(
    ("refill", "expected"),
    [
        #            x . x x x . . . x x
        ("growth", [16, 16, 15, 14, 13, 13, 13, 14, 14, 13]),
        ("finite", [16, 16, 16, 15, 14, 14, 14, 15, 15, 14]),
        ("backoff", [16, 16, 16, 15, 15, 15, 15, 16, 16, 15]),
    ],
)
def test_what_makes_the_tolerance_whole_again(scales_of, refill, expected):
    flags = "x.xxx...xx"
    assert scales_of(flags, hysteresis=2, refill=refill, **CLASSIC)[0] == expected


@pytest.mark.parametrize("refill", ["growth", "finite", "backoff"])
def test_one_is_none(scales_of, refill):
    flags = "x..xx...xxx.x." * 3
    none = scales_of(flags, hysteresis=None, refill=refill, **CLASSIC)
    assert none == scales_of(flags, hysteresis=1, refill=refill, **CLASSIC)
    rule = dls.rules.dynamic(
        hysteresis=1, hysteresis_refill=refill, recovery_interval=None
    )
    assert isinstance(rule.init()[1], dls.rules.DynamicRuleState)


def test_a_tolerated_overflow_restarts_the_growth_interval(scales_of):
    scales, _ = scales_of("..x...", hysteresis=2, **CLASSIC)
    assert scales == [16, 16, 16, 16, 16, 17]


def test_a_tolerated_overflow_is_no_failure_of_the_level(scales_of):
    by_default = {"init_scale": 2.0**16, "growth_interval": 30, "recovery_interval": 4}
    scales, counts = scales_of("....x" + "." * 30, hysteresis=2, **by_default)
    assert scales[:30] == [16] * 30
    assert counts[3:7] == [4, 4, 5, 6]
    scales, _ = scales_of("....xx" + "." * 9, hysteresis=2, **by_default)
    assert scales[4:] == [16, 15, 15, 15, 15, 16, 16, 16, 16, 16, 16]


def test_an_unknown_refill_is_refused():
    with pytest.raises(ValueError, match="must be 'growth', 'finite' or 'backoff'"):
        dls.rules.dynamic(hysteresis=2, hysteresis_refill="never")  # type: ignore[arg-type]
