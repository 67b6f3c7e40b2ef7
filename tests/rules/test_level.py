"""The dynamic rule as it is by default: a scale that returns to its level."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import optax_dls as dls

N, R = 100, 10
RULE: dict[str, Any] = {
    "init_scale": 2.0**10,
    "growth_interval": N,
    "recovery_interval": R,
}


class PlainModel:
    """The rule in plain Python, with a name for what the scale is doing."""

    def __init__(self, rule_settings, refill="growth"):
        self.set, self.refill = rule_settings, refill
        self.scale = self.level = rule_settings["init_scale"]
        self.interval = rule_settings["growth_interval"]
        self.recovery = min(rule_settings["recovery_interval"], self.interval)
        self.n, self.soonest = self.interval, 5 * self.recovery
        self.since_trial = self.run = self.failures = self.wait = 0
        self.is_tried = False
        self.doing = "steady"  # or "trial", "watched", "back"
        self.left = self.tolerance = rule_settings["hysteresis"] or 1

    def clip(self, scale):
        return min(max(scale, self.set["min_scale"]), self.set["max_scale"])

    def step(self, finite):
        before = self.scale
        if finite:
            self.finite()
            if self.scale > before or self.refill != "growth":
                self.left = self.tolerance
        else:
            self.left -= 1
            lasted, self.run = min(self.run, self.interval), 0
            if self.left <= 0:
                self.overflow(lasted)
                if self.refill == "backoff":
                    self.left = self.tolerance
        return self.scale

    def finite(self):
        self.since_trial += 1
        self.run += 1
        has_proved = self.doing == "trial" and self.run >= self.wait
        if has_proved:
            self.level, self.doing = self.scale, "steady"
            is_long = self.n > self.interval // 2
            self.n = self.interval if is_long else max(self.n // 2, self.soonest)
            self.n = min(self.n, self.interval)
        self.is_tried = True
        waited = self.run >= (self.wait if self.doing == "watched" else self.recovery)
        if self.doing in ("watched", "back") and waited:
            if self.doing == "back":
                self.failures = 0
            higher = self.clip(self.scale * self.set["growth_factor"])
            self.scale, self.run = min(higher, self.level), 0
            self.doing = "back" if self.scale < self.level else "steady"
        may_try = self.run >= self.recovery
        if self.doing == "steady" and self.since_trial >= self.n and may_try:
            self.since_trial = self.failures = 0
            higher = self.clip(self.scale * self.set["growth_factor"])
            if higher > self.scale:
                self.wait = max(min(self.run, self.n) // 2, 1)
                self.scale, self.run, self.doing = higher, 0, "trial"

    def overflow(self, lasted):
        lower = self.clip(self.scale * self.set["backoff_factor"])
        if self.doing == "watched":
            self.failures = 0
            if lasted > 0:
                self.wait = 1
                return
            self.wait = self.recovery
        elif self.doing == "trial":
            self.since_trial = self.failures = 0
            is_late = lasted > 0 and self.n == self.interval
            longer = self.n - self.n // 4 if is_late else 2 * self.n
            self.n, self.doing = min(longer, self.interval), "back"
        elif not self.is_tried:
            self.level, self.since_trial = lower, 0
        else:
            self.failures, self.doing = self.failures + 1, "watched"
            self.wait = min(max(3 * lasted, self.recovery), self.interval)
        if self.failures == 4:
            self.level, self.failures, self.since_trial = lower, 0, 0
            self.n = min(max(100 * lasted, self.soonest), self.interval)
        self.scale = lower
        if self.scale == self.level:
            self.doing = "steady"


@st.composite
def runs_of_flags(draw):
    """Good and bad runs, of lengths that meet every wait of the rule."""
    runs = st.tuples(st.sampled_from([1, 1, 2, 5]), st.sampled_from([0, 1, 3, 9, 40]))
    flags = []
    for bad, good in draw(st.lists(runs, min_size=5, max_size=80)):
        flags += [False] * bad + [True] * good
    return flags[:400]


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from([(0.0, 10.0, 40.0), (8.0, 10.0, 11.0), (-60.0, 3.0, 3.0)]),
    st.sampled_from([(2.0, 0.5), (4.0, 0.25)]),
    st.sampled_from([1, 2, 20, 60]),
    st.sampled_from([1, 2, 3, 100]),
    st.sampled_from([None, 2]),
    st.sampled_from(["growth", "finite", "backoff"]),
    runs_of_flags(),
)
def test_equals_a_plain_model(
    run_dynamic, bounds, factors, interval, recovery, hysteresis, refill, finite
):
    names = ("min_scale", "init_scale", "max_scale")
    rule_settings = dict(zip(names, (2.0**x for x in bounds), strict=True)) | {
        "growth_factor": factors[0],
        "backoff_factor": factors[1],
        "growth_interval": interval,
        "recovery_interval": recovery,
        "hysteresis": hysteresis,
    }
    refill = refill if hysteresis else "growth"  # where it means nothing, one program
    _, scales, skipped, _ = run_dynamic(rule_settings, np.array(finite), refill)
    model = PlainModel(rule_settings, refill)
    assert scales.tolist() == [model.step(flag) for flag in finite]
    np.testing.assert_array_equal(skipped, np.logical_not(finite))


class TestQuietRuns:
    def test_it_is_the_classic_rule(self, scales_of):
        flags = "." * N + ("x" + "." * N) * 2
        scales, _ = scales_of(flags, **RULE)
        assert scales == scales_of(flags, **RULE | {"recovery_interval": None})[0]
        assert scales[N - 1 : N + 2] == [11, 10, 10]

    def test_it_grows_after_every_interval_until_it_overflows(self, scales_of):
        scales, _ = scales_of("." * 399, **RULE)
        assert scales == [10] * 99 + [11] * 100 + [12] * 100 + [13] * 100


class TestBadBatches:
    def test_a_burst_of_twenty_is_made_good_in_200_steps(self, scales_of):
        scales, _ = scales_of("." * R + "x" * 20 + "." * 300, **RULE)
        end = R + 19
        assert scales[end] == -10
        assert scales[end + R * 20 - 1 : end + R * 20 + 1] == [9, 10]

    @pytest.mark.parametrize("every", [7, 20, 50, 90])
    def test_one_bad_batch_after_another_does_not_push_it_down(self, scales_of, every):
        flags = "." * R + ("." * (every - 1) + "x") * (390 // every)
        scales, _ = scales_of(flags, **RULE)
        classic, _ = scales_of(flags, **RULE | {"recovery_interval": None})
        assert min(scales) >= 6
        assert classic[-1] == max(10 - 390 // every, -14)

    def test_they_do_not_set_back_the_count_to_the_next_trial(self, scales_of):
        flags = ("." * 24 + "x" + "." * 5 + "x" + "." * 20) * 4
        scales, counts = scales_of(flags, **RULE)
        assert max(scales) == 11
        assert counts[scales.index(11)] == 0

    def test_a_level_is_watched_from_below_three_times_as_long_as_it_lasted(
        self, scales_of
    ):
        scales, _ = scales_of("." * 20 + "x" + "." * 70, **RULE)
        assert scales[19:] == [10] + [9] * 60 + [10] * 11
        soon, _ = scales_of("." * R + "xx" + "." * 30, **RULE)
        assert soon[R:] == [9] + [8] * R + [9] * R + [10] * 11
        late, _ = scales_of("." * 90 + "x" + "." * N, **RULE)
        assert late[90:] == [9] * N + [10]

    def test_four_failures_give_a_level_up(self, scales_of):
        failures = "." * R + "x" + "." * 3 * R + ("x" + "." * R) * 2
        scales, _ = scales_of(failures + "x" + "." * 5 * R, **RULE)
        assert scales[R : 4 * R + 1] == [9] * 3 * R + [10]
        assert scales[4 * R + 1 : 6 * R + 3] == ([9] * R + [10]) * 2
        assert scales[6 * R + 3 :] == [9] * (5 * R) + [10]  # on trial

    def test_the_next_trial_is_later_the_longer_the_level_had_lasted(self, scales_of):
        """100 times as long, so one step more is already the whole interval."""
        failures = "." * R + "x" + "." * 3 * R + ("x" + "." * R) * 2
        scales, _ = scales_of(failures + ".x" + "." * N, **RULE)
        assert scales[-N - 1 :] == [9] * N + [10]

    def test_a_level_is_acquitted_by_an_overflow_of_the_scale_below(self, scales_of):
        failure = "x" + "." * R
        flags = "." * R + "x.x." + (failure * 3 + "x.x.") * 4
        scales, _ = scales_of(flags.replace(failure * 3, failure * 2), **RULE)
        assert scales[R + 4 :] == (([9] * R + [10]) * 2 + [9, 9, 9, 10]) * 4
        given_up, _ = scales_of(flags, **RULE)
        assert given_up[-1] < 9

    def test_overflows_in_a_row_acquit_nothing_and_go_down(self, scales_of):
        scales, _ = scales_of("." * R + "x" * 6 + "." * 5 + "x" + "." * 20, **RULE)
        assert scales[R : R + 6] == [9, 8, 7, 6, 5, 4]
        assert scales[R + 11 : R + 14] == [4, 5, 5]  # one alone: no lower, at once up

    def test_a_scale_that_overflows_for_ever_ends_at_the_floor(self, scales_of):
        scales, _ = scales_of("x" * 400, min_scale=2.0**4, **RULE)
        assert scales[5:] == [4] * 395


@functools.partial(jax.jit, static_argnames="rule")
def under_capacity(rule, capacity, is_bad, start):
    """log2 of the scale of each step, whether it was finite, and the last state.

    A step overflows if its batch is bad, or if log2 of the scale is above the capacity.
    """

    def step(carry, inputs):
        scale, state = carry
        capacity, is_bad = inputs
        finite = ~is_bad & (jnp.log2(scale) <= capacity)
        return rule.update(finite, scale, state), (scale, finite)

    last, per_step = jax.lax.scan(step, start, (capacity, is_bad))
    return *per_step, last


def run(rule, capacity, is_bad=False, start=None):
    capacity = np.asarray(capacity, np.float32)
    is_bad = np.broadcast_to(is_bad, capacity.shape)
    start = rule.init() if start is None else start
    scales, finite, last = under_capacity(rule, capacity, is_bad, start)
    return np.log2(scales), np.asarray(finite), last


DEFAULT = dls.rules.dynamic()


class TestCapacity:
    def test_a_start_that_is_too_high_comes_down_as_under_the_classic_rule(self):
        for first in (16, 32):
            start = 2.0**first
            rule = dls.rules.dynamic(init_scale=start)
            classic = dls.rules.dynamic(init_scale=start, recovery_interval=None)
            scales, finite, (_, state) = run(rule, np.full(3000, 14.5))
            as_classic, *_ = run(classic, np.full(3000, 14.5))
            np.testing.assert_array_equal(scales, as_classic)
            assert np.sum(~finite) == first - 14 + 1  # and one trial
            assert float(state.level) == 2.0**14

    def test_a_level_that_fails_is_given_up_and_tried_more_and_more_rarely(self):
        capacity = np.where(np.arange(9000) < 500, 15.5, 14.5)
        scales, finite, (_, state) = run(DEFAULT, capacity)
        overflows = np.flatnonzero(~finite)
        # The level had lasted 500 steps, so the scale below is watched 1500.
        assert overflows[:5].tolist() == [500, 2001, 2012, 2023, 2074]
        waits = np.diff(overflows[3:])
        assert waits.tolist() == [51, 101, 201, 401, 801, 1601, 2001]
        assert set(scales[~finite]) == {15.0}
        assert float(state.level) == 2.0**14

    def test_trials_that_go_well_follow_each_other_faster_but_not_below_a_bound(self):
        steps = np.arange(3000)
        is_dip = (steps >= 500) & (steps < 720)  # until trials come every 200 steps
        scales, *_ = run(DEFAULT, np.where(is_dip, 10.5, 30.0), steps < 0)
        growths = np.flatnonzero(np.diff(scales) > 0)
        after = growths[growths > 720]
        assert scales[after[0]] == 10
        assert np.diff(after)[:5].tolist() == [100, 50, 50, 50, 50]

    def test_after_a_dip_it_is_back_about_as_fast_as_the_dip_was_long(self):
        steps = np.arange(4000)
        for length in (50, 200, 800):
            dip = (steps >= 1000) & (steps < 1000 + length)
            scales, _, _ = run(DEFAULT, np.where(dip, 8.5, 15.5))
            back = 1000 + length + np.argmax(scales[1000 + length :] >= 14)
            assert back - (1000 + length) <= 3 * length + 60

    def test_a_growth_that_lasts_becomes_the_level(self):
        scales, _, (_, state) = run(DEFAULT, np.full(3001, 30.0))
        assert float(state.level) == 2.0**16
        assert scales[-1] == 16
        _, _, (_, state) = run(DEFAULT, np.full(2999, 30.0))
        assert float(state.level) == 2.0**15


@st.composite
def states_of_any_numbers(draw):
    """A scale and a state; half of the time they belong together."""
    numbers = st.one_of(st.integers(-(2**31), 2**31 - 1), st.integers(-20, 20))
    scales = st.floats(2.0**-14, 2.0**32, width=32)
    state = DEFAULT.init()[1]
    state = jax.tree.map(
        lambda leaf: jnp.asarray(
            draw(scales if leaf.dtype == jnp.float32 else numbers), leaf.dtype
        ),
        state,
    )
    state = state._replace(overflows_left=jnp.int32(1))
    return jnp.float32(draw(st.sampled_from([float(state.last_scale), 128.0]))), state


@settings(max_examples=200, deadline=None)
@given(states_of_any_numbers(), st.lists(st.booleans(), min_size=60, max_size=60))
def test_every_state_is_legal_and_no_count_wraps_around(start, flags):
    """What a hand or 2**40 steps may have left there: it is used, and gets sane."""
    scales, _, (after, new) = run(DEFAULT, np.where(flags, 99.0, -99.0), start=start)
    assert np.all((scales >= -14) & (scales <= 32))
    assert 2.0**-14 <= float(after) <= 2.0**32
    assert float(new.last_scale) == float(after)
    assert 2.0**-14 <= float(new.level) <= 2.0**32
    assert int(new.growth_count) >= 0
    assert int(new.finite_steps) >= 0
    assert 0 <= int(new.test_steps) <= 2000
    assert 0 <= int(new.failures) <= 4
    assert 1 <= int(new.trial_interval) <= 2000 or new.trial_interval == 2**31 - 1


def test_counts_stop_at_the_largest_int32():
    most = jnp.int32(2**31 - 1)
    scale, state = dls.rules.dynamic(init_scale=2.0**32).init()  # it cannot grow
    state = state._replace(finite_steps=most, growth_count=most)
    _, new = jax.jit(DEFAULT.update)(jnp.array(True), scale, state)
    assert int(new.finite_steps) == most
    rule = dls.rules.dynamic(growth_interval=2**31 - 1, recovery_interval=2**31 - 1)
    scale, state = rule.init()
    state = state._replace(finite_steps=most, growth_count=most - 2, failures=0)
    lower, new = jax.jit(rule.update)(jnp.array(False), scale, state)
    assert (float(lower), int(new.test_steps)) == (2.0**14, 2**31 - 1)
    for grown in (1, 2):
        scale, state = jax.jit(rule.update)(jnp.array(True), scale, state)
        assert float(scale) == grown * 2.0**15


@settings(max_examples=30, deadline=None)
@given(
    st.floats(-8, 25),
    st.floats(0, 1),
    st.sampled_from([0, 1 / 3000, 1 / 1000, 1 / 300, 1 / 100, 1 / 60]),
    st.sampled_from([1, 1, 2, 3]),
    st.booleans(),
    st.sampled_from([0, 0.002, 0.01]),
    st.integers(0, 2**32 - 1),
)
def test_as_a_control_loop_it_holds_its_bounds(
    usable, noise, bad_rate, in_a_row, is_periodic, drift, seed
):
    """Random capacities and bad batches, 30 000 steps, after 10 000 to find the level.

    Bad batches come one, two or three in a row, by chance or periodically, one in 60 at
    most. In each window of 10 000 steps at most 3 % of the good steps are lost, and the
    scale is never more than 8 bits low for more than 2000 good steps in a row. The worst
    windows lose 2 %, where batches differ by a bit and every 100th is bad: the bad ones
    acquit a level that is too high for one batch in 50.
    """
    steps = 40_000
    generator = np.random.default_rng(seed)
    walk = usable + np.cumsum(drift * generator.standard_normal(steps))
    walk = np.clip(walk, -8, 25)
    capacity = walk + noise * generator.standard_normal(steps)
    begins = generator.random(steps) < bad_rate / in_a_row
    if is_periodic and bad_rate:
        begins = np.arange(steps) % round(in_a_row / bad_rate) == 0
    is_bad = np.convolve(begins, np.ones(in_a_row))[:steps] > 0
    scales, finite, _ = run(DEFAULT, capacity, is_bad)
    assert np.all(scales == np.round(scales))
    assert np.all((scales >= -14) & (scales <= 32))
    lost, good = (~finite & ~is_bad)[10_000:], (~is_bad)[10_000:]
    lost_in_window, good_in_window = (
        np.convolve(flags, np.ones(10_000), "valid") for flags in (lost, good)
    )
    assert np.all(lost_in_window <= 0.03 * good_in_window)
    is_low = (walk - scales > 8)[10_000:]
    # From 2^15 it climbs a bit in 2000 steps, so 10 000 may not be enough.
    if usable <= 20:
        assert longest_run(is_low[good]) <= 2000


def longest_run(flags):
    edges = np.flatnonzero(np.diff(np.concatenate(([0], flags, [0]))))
    return int(np.max(edges[1::2] - edges[::2], initial=0))


class TestFromOutside:
    def test_a_scale_that_is_set_is_the_level(self):
        tx = dls.loss_scaling(optax.sgd(1.0), dls.rules.dynamic(**RULE))
        update = jax.jit(tx.update)
        state = tx.init(jnp.zeros(()))
        for grads in [1.0] * R + [jnp.inf, jnp.inf, 1.0]:  # it is on its way back
            _, state = update(jnp.asarray(grads), state)
        assert float(state.scaler.rule_state.level) == 2.0**10
        state = optax.tree.set(state, loss_scale=2.0**4)
        for _ in range(60):
            _, state = update(jnp.array(1.0), state)
        assert float(dls.loss_scale(state)) == 2.0**4
        assert float(state.scaler.rule_state.level) == 2.0**4
        _, state = update(jnp.array(jnp.inf), state)
        assert float(dls.loss_scale(state)) == 2.0**3

    def test_bounds_that_change_in_a_run_bind_the_level(self):
        scale, state = dls.rules.dynamic(init_scale=2.0**20).init()
        lower = dls.rules.dynamic(init_scale=8.0, max_scale=2.0**10)
        after, state = jax.jit(lower.update)(jnp.array(True), scale, state)
        assert (float(after), float(state.level)) == (2.0**10, 2.0**10)

    def test_a_growth_interval_that_changes_in_a_run_is_the_new_one(self):
        short = dls.rules.dynamic(growth_interval=N)
        *_, start = run(short, np.full(150, 30.0))
        scales, *_ = run(DEFAULT, np.full(2100, 30.0), start=start)
        assert np.flatnonzero(np.diff(scales)).tolist() == [2000 - 50 - 1]

    def test_a_loss_that_is_not_finite_changes_nothing(self):
        tx = dls.dynamic_loss_scaling(optax.sgd(1.0))
        state = tx.init(jnp.zeros(()))
        _, new = tx.update(jnp.array(jnp.nan), state, value=jnp.float32(jnp.nan))
        assert new.scaler.rule_state == state.scaler.rule_state
        assert float(dls.loss_scale(new)) == 2.0**15

    def test_it_asks_for_no_information_on_the_step(self):
        assert DEFAULT.needs == ()
        assert isinstance(DEFAULT.init()[1], dls.rules.LevelRuleState)
        limited = dls.rules.dynamic(gradient_limit=65504.0)
        assert limited.needs == ("largest_gradient",)


class TestFactors:
    @pytest.mark.parametrize("factors", [(2.0, 0.7), (1.5, 0.5), (1.1, 0.9), (4, 0.5)])
    def test_the_way_back_ends_at_the_level_exactly(self, run_dynamic, factors):
        names = ("growth_factor", "backoff_factor")
        rule_settings = RULE | dict(zip(names, factors, strict=True))
        rule_settings["growth_interval"] = 390
        finite = np.array([True] * R + [False] * 20 + [True] * 370)
        _, scales, _, _ = run_dynamic(rule_settings, finite)
        assert scales[-1] == 2.0**10
        assert scales.max() == 2.0**10

    def test_a_scale_that_never_grows_does_not_return(self, scales_of):
        flags = "." * R + "xxx" + "." * 150 + "x...x"
        scales, _ = scales_of(flags, growth_factor=1.0, **RULE)
        assert scales[R:] == [9, 8] + [7] * 151 + [6] * 4 + [5]

    def test_after_a_large_growth_the_scale_stays_on_trial(self, scales_of):
        flags = "." * N + "x" + "." * 5 + "x" + "." * 30
        scales, _ = scales_of(flags, growth_factor=4.0, **RULE)
        assert scales[N - 1 : N + 1] == [12, 11]
        assert scales[N + 6 :] == [10] * 31
