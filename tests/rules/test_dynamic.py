"""How the loss scale moves: against a plain model, and with bad settings."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import optax_dls as dls

NUMBERS = ("init_scale", "growth_factor", "backoff_factor", "min_scale", "max_scale")
STEPS = ("growth_interval", "recovery_interval", "hysteresis")
LONGEST = 400


@functools.partial(jax.jit, static_argnames="refill")
def run(rule_settings, finite, refill="growth"):
    """The scale before the first step and after each, through the whole wrapper."""
    tx = dls.dynamic_loss_scaling(
        optax.sgd(1.0), hysteresis_refill=refill, **rule_settings
    )
    params = jnp.zeros(())

    def step(state, is_finite):
        grads = jnp.where(is_finite, dls.loss_scale(state), jnp.inf)
        _, state = tx.update(grads, state, params)
        return state, (
            dls.loss_scale(state),
            state.scaler.consecutive_skips > 0,
            state.scaler.rule_state.growth_count,
        )

    state = tx.init(params)
    _, (scales, skipped, counts) = jax.lax.scan(step, state, finite)
    return dls.loss_scale(state), scales, skipped, counts


def run_padded(rule_settings, finite, refill="growth"):
    """`run`, compiled once for every length and setting."""
    padded = np.ones(LONGEST, bool)
    padded[: len(finite)] = finite
    rule_settings = {
        name: value
        if value is None
        else jnp.asarray(value, jnp.float32 if name in NUMBERS else jnp.int32)
        for name, value in rule_settings.items()
    }
    init, *per_step = run(rule_settings, padded, refill)
    return np.asarray(init), *(np.asarray(x)[: len(finite)] for x in per_step)


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
                    threshold = max(scale, np.float32(low))
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
    rule_settings, growth_factor, backoff_factor, finite
):
    rule_settings |= {
        "growth_factor": growth_factor,
        "backoff_factor": backoff_factor,
        "recovery_interval": None,
    }
    dls.rules.dynamic(**rule_settings)  # is accepted as static values, too
    init, scales, skipped, _ = run_padded(rule_settings, np.array(finite))
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
    rule_settings, factors, recovery_interval, hysteresis, refill, finite
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
    _, scales, skipped, _ = run_padded(rule_settings, np.array(finite), refill)
    np.testing.assert_array_equal(scales, plain_model(rule_settings, finite, refill))
    np.testing.assert_array_equal(skipped, np.logical_not(finite))


def scales_of(flags, **rule_settings):
    """log2 of the scale after each flag, . for finite and x for overflow."""
    finite = np.array([flag == "." for flag in flags])
    refill = rule_settings.pop("refill", "growth")
    _, scales, _, counts = run_padded(rule_settings, finite, refill)
    return np.log2(scales).astype(int).tolist(), counts.tolist()


SLOW = {"init_scale": 2.0**10, "growth_interval": 100}


class TestRecovery:
    def test_a_burst_of_twenty_is_made_good_in_190_steps(self):
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

    def test_a_single_overflow_changes_nothing(self):
        flags = "." * 120 + "x" + "." * 130 + "x" + "." * 140
        with_recovery = scales_of(flags, recovery_interval=10, **SLOW)
        assert with_recovery == scales_of(flags, recovery_interval=None, **SLOW)

    def test_an_overflow_on_the_way_ends_it_there(self):
        flags = "xxxxx" + "." * 10 + "x" + "." * 50
        scales, _ = scales_of(flags, recovery_interval=10, **SLOW)
        assert scales[4] == 5
        assert scales[14] == 6
        assert scales[15:] == [5] * 51

    def test_a_burst_at_the_floor_does_not_overshoot(self):
        flags = "x" * 50 + "." * 300
        scales, _ = scales_of(flags, recovery_interval=10, min_scale=2.0**4, **SLOW)
        assert scales[5:59] == [4] * 54
        assert scales[50 + 49] == 9
        assert scales[50 + 148] == 9

    def test_it_is_never_slower_than_growth(self):
        flags = "xxx" + "." * 20
        scales, _ = scales_of(
            flags, init_scale=2.0**10, growth_interval=2, recovery_interval=10
        )
        assert scales[2:8] == [7, 7, 8, 8, 9, 9]

    def test_factors_that_do_not_undo_each_other_never_pass_the_threshold(self):
        for growth_factor, backoff_factor in ((2.0, 0.7), (1.5, 0.5), (1.1, 0.9)):
            finite = np.array([False] * 20 + [True] * 380)
            _, scales, _, _ = run_padded(
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

    def test_a_growth_larger_than_the_backoff_does_not_pass_the_threshold(self):
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
        for _ in range(3):
            scale, state = rule.update(jnp.array(True), scale, state)
        assert float(scale) == 16.0

    def test_a_scale_that_never_grows_does_not_recover(self):
        scales, counts = scales_of(
            "xxx" + "." * 50, growth_factor=1.0, recovery_interval=10, **SLOW
        )
        assert scales == [9, 8] + [7] * 51
        assert min(counts) == 0

    def test_a_rule_called_on_its_own_takes_each_overflow_for_a_single_one(self):
        rule = dls.rules.dynamic()
        assert rule.needs == ("last_finite",)
        scale, state = rule.init()
        for _ in range(3):
            scale, state = rule.update(jnp.array(False), scale, state)
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


CLASSIC = {"init_scale": 2.0**16, "growth_interval": 3, "recovery_interval": None}


class TestHysteresis:
    def test_br34_two_overflows_before_the_first_backoff(self):
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
    def test_what_makes_the_tolerance_whole_again(self, refill, expected):
        flags = "x.xxx...xx"
        assert scales_of(flags, hysteresis=2, refill=refill, **CLASSIC)[0] == (expected)

    @pytest.mark.parametrize("refill", ["growth", "finite", "backoff"])
    def test_one_is_none(self, refill):
        flags = "x..xx...xxx.x." * 3
        none = scales_of(flags, hysteresis=None, refill=refill, **CLASSIC)
        assert none == scales_of(flags, hysteresis=1, refill=refill, **CLASSIC)
        rule = dls.rules.dynamic(hysteresis=1, hysteresis_refill=refill)
        assert isinstance(rule.init()[1], dls.rules.DynamicRuleState)

    def test_a_tolerated_overflow_restarts_the_growth_interval(self):
        scales, _ = scales_of("..x...", hysteresis=2, **CLASSIC)
        assert scales == [16, 16, 16, 16, 16, 17]

    def test_the_recovery_threshold_is_that_of_the_first_backoff(self):
        scales, _ = scales_of(
            "xxxxx" + "." * 40,
            hysteresis=2,
            init_scale=2.0**16,
            growth_interval=30,
            recovery_interval=10,
        )
        assert scales[4] == 12
        assert scales[4 + 30] == 15
        assert scales[-1] == 15

    def test_an_unknown_refill_is_refused(self):
        with pytest.raises(ValueError, match="must be 'growth', 'finite' or 'backoff'"):
            dls.rules.dynamic(hysteresis=2, hysteresis_refill="never")


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

    def test_it_is_asked_once_in_an_interval(self):
        rule = dls.rules.dynamic(
            init_scale=8.0, growth_interval=3, gradient_limit=100.0
        )
        assert rule.needs == ("last_finite", "largest_gradient")
        scale, state = rule.init()
        scales = []
        for largest in (1.0, 1.0, 7.0, 1.0, 7.0, 6.0):
            scale, state = rule.update(
                jnp.array(True), scale, state, largest_gradient=jnp.float32(largest)
            )
            scales.append(float(scale))
        assert scales == [8, 8, 8, 8, 8, 16]


class TestNeeds:
    def test_a_rule_is_told_what_it_asks_for(self):
        told = []

        def update(finite, scale, state, *, last_finite, largest_gradient):
            told.append((last_finite, largest_gradient))
            return scale, (last_finite, largest_gradient)

        start = (jnp.array(True), jnp.float32(0))
        rule = dls.rules.Rule(
            lambda: (jnp.float32(4), start), update, ("last_finite", "largest_gradient")
        )
        tx = dls.loss_scaling(optax.sgd(1.0), rule)
        state = tx.init([jnp.zeros(3), jnp.zeros((), jnp.complex64)])
        grads = [jnp.array([4.0, -8.0, 0.0]), jnp.array(4 - 12j)]
        _, state = tx.update(grads, state)
        assert state.scaler.rule_state == (True, 3.0)
        _, state = tx.update([jnp.array([jnp.nan, -8.0, jnp.inf]), grads[1] * 0], state)
        assert state.scaler.rule_state == (True, 2.0)
        _, state = tx.update([jnp.zeros(3), jnp.zeros((), jnp.complex64)], state)
        assert state.scaler.rule_state == (False, 0.0)

    def test_other_rules_pay_nothing(self):
        def reductions(**rule_settings):
            tx = dls.dynamic_loss_scaling(optax.sgd(1.0), **rule_settings)
            params = jnp.zeros((64, 64))
            compiled = jax.jit(tx.update).lower(params, tx.init(params), params)
            return compiled.as_text().count("stablehlo.reduce")

        assert reductions() == reductions(recovery_interval=None)
        assert reductions(gradient_limit=65504.0) > reductions()

    @pytest.mark.parametrize("needs", [("loss",), "last_finite"])
    def test_an_unknown_need_is_refused(self, needs):
        rule = dls.rules.dynamic()._replace(needs=needs)
        with pytest.raises(ValueError, match="needs must be a tuple of names among"):
            dls.loss_scaling(optax.sgd(1.0), rule)


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
