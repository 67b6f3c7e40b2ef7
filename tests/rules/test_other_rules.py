"""Rules beside the dynamic one: overflow rate, gradual, log-normal."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import optax_dls as dls
from optax_dls import rules

MAKERS = {
    "overflow rate": functools.partial(rules.overflow_rate, tolerance=0.25),
    "gradual": rules.gradual,
    "log-normal": rules.log_normal,
}


def follow(rule, flags, largest=1e-3):
    """log2 of the scale after each step, . for finite and x for overflow."""
    scale, state = rule.init()
    finite = [flag == "." for flag in flags]
    last_finite, scales = True, []
    for is_finite, size in zip(
        finite, np.broadcast_to(largest, len(flags)), strict=True
    ):
        facts = {"last_finite": last_finite, "largest_gradient": jnp.float32(size)}
        told = {name: facts[name] for name in rule.needs}
        scale, state = rule.update(jnp.array(is_finite), scale, state, **told)
        scales.append(float(np.log2(scale)))
        last_finite = is_finite
    return scales, state


class TestOverflowRate:
    @pytest.mark.parametrize(
        ("flags", "end"),
        [
            ("......x.", 16),  # BR-36: one in the last eight is tolerated
            ("......xx", 15),  # two are not
            ("x", 15),  # the very first is all there is
            ("...x", 15),
            ("....x", 16),
            (".......x.......x", 16),
        ],
    )
    def test_br36_tolerates_a_share_of_overflows(self, flags, end):
        rule = rules.overflow_rate(tolerance=0.25, init_scale=2.0**16)
        scales, state = follow(rule, flags)
        assert scales[-1] == end
        tx = dls.loss_scaling(optax.sgd(1.0), rule)
        state, skips = tx.init(jnp.zeros(())), flags.count("x")
        for flag in flags:
            grads = jnp.array(1.0 if flag == "." else jnp.inf)
            updates, state = tx.update(grads, state)
            assert (float(updates) == 0) == (flag == "x")
        assert int(state.scaler.total_skips) == skips

    def test_zero_is_the_classic_rule(self):
        flags = "..x...xx....x.x" * 5
        ours = rules.overflow_rate(tolerance=0.0, growth_interval=3)
        classic = rules.dynamic(recovery_interval=None, growth_interval=3)
        assert follow(ours, flags)[0] == follow(classic, flags)[0]

    def test_an_interval_that_follows_the_scale(self):
        rule = rules.overflow_rate(
            tolerance=0.0, growth_interval=4, interval_follows_scale=True
        )
        scales, state = follow(rule, "xx........")
        assert scales == [14, 13, 14, 15, 15, 16, 16, 16, 16, 17]
        assert float(state.growth_interval) == 16.0

    def test_a_count_at_its_end_does_not_grow_at_every_step(self):
        rule = rules.overflow_rate(tolerance=0.0, growth_interval=3)
        scale, state = rule.init()
        state = state._replace(growth_count=jnp.int32(2**24 - 2))
        for expected in (2.0**16, 2.0**16, 2.0**16, 2.0**17):
            scale, state = rule.update(jnp.array(True), scale, state)
            assert float(scale) == expected


class TestGradual:
    def test_doubles_until_the_first_overflow_and_in_fractions_from_then_on(self):
        scales, _ = follow(rules.gradual(growth_interval=4), "...x....x....")
        expected = [1, 2, 3, 2, 2.25, 2.5, 2.75, 3, 2, 2.25, 2.5, 2.75, 3]
        np.testing.assert_allclose(scales, expected, atol=1e-5)

    def test_the_longest_interval_still_grows(self):
        rule = rules.gradual(growth_interval=100_000)
        start = (jnp.float32(4), rules.GradualRuleState(jnp.array(True)))

        def step(_, carry):
            return rule.update(jnp.array(True), *carry)

        scale, _ = jax.lax.fori_loop(0, 100_000, step, start)
        np.testing.assert_allclose(scale, 8.0, rtol=0.01)


class TestLogNormal:
    def test_gradients_of_one_size_get_the_largest_power_of_two_that_fits(self):
        for largest in (2.0**-10, 2.0**-16, 0.7, 3.0):
            scales, _ = follow(rules.log_normal(), "." * 60, largest)
            fits = math.floor(math.log2(65504 / largest))
            assert scales[-1] == fits

    def test_a_burst_of_nan_is_forgotten_in_as_many_steps(self):
        sizes = 2.0 ** np.random.default_rng(0).normal(-10, 0.5, 400)
        scales, _ = follow(rules.log_normal(), "." * 300 + "x" * 20 + "." * 80, sizes)
        assert scales[319] == scales[299] - 20
        assert scales[345] >= scales[299] - 3
        assert scales[-1] >= scales[299] - 2

    def test_more_spread_means_more_distance(self):
        rng = np.random.default_rng(0)
        ends = [
            follow(rules.log_normal(), "." * 300, 2.0 ** rng.normal(-10, sd, 300))[0][
                -1
            ]
            for sd in (0.1, 1.0, 3.0)
        ]
        assert ends[0] > ends[1] > ends[2]

    def test_steps_without_any_gradient_are_not_counted(self):
        scales, state = follow(rules.log_normal(), "....", 0.0)
        assert scales == [15.0] * 4
        assert int(state.step_count) == 0

    def test_scales_are_powers_of_two(self):
        rule = rules.log_normal(init_scale=1000.0)
        sizes = 2.0 ** np.random.default_rng(0).normal(-10, 1, 50)
        scales, _ = follow(rule, "....x....." * 5, sizes)
        assert all(scale == round(scale) for scale in scales)
        with pytest.raises(ValueError, match="at least 2, for powers of two"):
            rules.log_normal(growth_factor=1.5)

    @pytest.mark.parametrize(
        "settings",
        [
            {"gradient_limit": jnp.float16(jnp.inf)},
            {"gradient_limit": jnp.float32(0)},
            {"mean_decay": jnp.float32(jnp.nan)},
            {"variance_decay": jnp.float32(2)},
            {"overflow_probability": jnp.float32(0)},
        ],
    )
    def test_nonsense_as_arrays_leaves_no_nan_behind(self, settings):
        scales, state = follow(rules.log_normal(**settings), "..x..xx..")
        assert np.all(np.isfinite(scales))
        assert all(np.all(np.isfinite(leaf)) for leaf in state)


@pytest.mark.parametrize(
    ("name", "settings", "error"),
    [
        ("overflow rate", {"tolerance": 1.5}, "tolerance must be from 0 to 1"),
        ("overflow rate", {"growth_interval": 2**24}, "from 1 to 16777215"),
        ("overflow rate", {"interval_follows_scale": 1}, "must be True or False"),
        ("gradual", {"growth_interval": 100_001}, "from 1 to 100000"),
        ("gradual", {"growth_factor": 0.5}, "growth_factor must be at least 1"),
        ("log-normal", {"overflow_probability": 0.5}, "above 0 and below 0.5"),
        ("log-normal", {"variance_decay": 1.0}, r"below 1, got 1.0. Use 0.999"),
        ("log-normal", {"gradient_limit": 1e300}, "finite in float32"),
        ("log-normal", {"power_of_two": 1}, "must be True or False"),
        *((name, {"init_scale": math.nan}, "init_scale must be") for name in MAKERS),
        *((name, {"backoff_factor": 1.0}, "above 0 and below 1") for name in MAKERS),
    ],
)
def test_a_bad_setting_is_refused(name, settings, error):
    with pytest.raises((TypeError, ValueError), match=error):
        MAKERS[name](**settings)


@pytest.mark.parametrize("name", MAKERS)
def test_types_are_stable_under_jit_scan_donation_and_strict_promotion(name):
    rule = MAKERS[name]()
    tx = dls.loss_scaling(optax.sgd(1.0), rules.retrying(rule))
    params = jnp.ones(3)

    @functools.partial(jax.jit, donate_argnums=0)
    def run(state):
        def step(state, factor):
            return tx.update(factor * jnp.ones(3), state, params)[1], None

        return jax.lax.scan(step, state, jnp.array([1.0, jnp.inf, jnp.nan, 1.0]))[0]

    start = tx.init(params)
    types = jax.tree.map(jax.typeof, start)
    assert jax.tree.map(jax.typeof, run(start)) == types


def test_retrying_a_fixed_scale_of_each_device():
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    tx = dls.loss_scaling(optax.sgd(1.0), rules.retrying(rules.static(8.0)))
    states = jax.vmap(tx.init)(jnp.zeros((8, 1)))

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=P("d"), out_specs=P("d"))
    def step(states, grads):
        state = jax.tree.map(lambda x: x[0], states)
        updates, state = tx.update(grads[0], state)
        return updates[None], jax.tree.map(lambda x: x[None], state)

    updates, _ = step(states, 8 * jnp.ones((8, 1)))
    np.testing.assert_array_equal(updates, -np.ones((8, 1)))


@pytest.mark.parametrize("wrong", [None, 8.0, rules.dynamic])
def test_retrying_something_else_is_refused(wrong):
    with pytest.raises(TypeError, match="rule must be a Rule"):
        rules.retrying(wrong)
