"""The rule that tolerates a share of overflows."""

import jax.numpy as jnp
import optax
import pytest

import optax_dls as dls
from optax_dls import rules

TOLERANT = rules.overflow_rate(tolerance=0.25, init_scale=2.0**16)
tx = dls.loss_scaling(optax.sgd(1.0), TOLERANT)


@pytest.mark.parametrize(
    ("flags", "end"),
    [
        ("......x.", 16),  # one in the last eight is tolerated
        ("......xx", 15),  # two are not
        ("x", 15),  # the very first is all there is
        ("...x", 15),
        ("....x", 16),
        (".......x.......x", 16),
    ],
)
def test_tolerates_a_share_of_overflows_and_skips_them_all(follow, flags, end):
    """https://github.com/EleutherAI/gpt-neox/issues/829"""
    scales, _ = follow(TOLERANT, flags)
    assert scales[-1] == end
    state = tx.init(jnp.zeros(()))
    for flag in flags:
        updates, state = tx.update(jnp.array(1.0 if flag == "." else jnp.inf), state)
        assert (float(updates) == 0) == (flag == "x")
    assert int(state.scaler.total_skips) == flags.count("x")


def test_a_tolerance_of_zero_is_the_classic_rule(follow):
    flags = "..x...xx....x.x" * 5
    ours = rules.overflow_rate(tolerance=0.0, growth_interval=3)
    classic = rules.dynamic(recovery_interval=None, growth_interval=3)
    assert follow(ours, flags)[0] == follow(classic, flags)[0]


def test_an_interval_that_follows_the_scale(follow):
    rule = rules.overflow_rate(
        tolerance=0.0, growth_interval=4, interval_follows_scale=True
    )
    scales, state = follow(rule, "xx........")
    assert scales == [14, 13, 14, 15, 15, 16, 16, 16, 16, 17]
    assert float(state.growth_interval) == 16.0


def test_a_count_at_its_end_does_not_grow_at_every_step():
    rule = rules.overflow_rate(tolerance=0.0, growth_interval=3)
    scale, state = rule.init()
    state = state._replace(growth_count=jnp.int32(2**24 - 2))
    for expected in (2.0**16, 2.0**16, 2.0**16, 2.0**17):
        scale, state = rule.update(jnp.array(True), scale, state)
        assert float(scale) == expected


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"tolerance": 1.5}, "tolerance must be from 0 to 1"),
        ({"growth_interval": 2**24}, "from 1 to 16777215"),
        ({"interval_follows_scale": 1}, "must be True or False"),
    ],
)
def test_a_bad_setting_is_refused(settings, error):
    with pytest.raises((TypeError, ValueError), match=error):
        rules.overflow_rate(**{"tolerance": 0.25, **settings})
