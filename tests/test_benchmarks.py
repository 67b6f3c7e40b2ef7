"""The benchmarks run, and show what the README says of them."""

import importlib
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_dls as dls

pytestmark = pytest.mark.standard_promotion


@pytest.fixture(scope="module")
def benchmark(request):
    """One of the scripts, by its name, with its neighbours in reach."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(pathlib.Path(__file__).parents[1] / "benchmarks")
        yield importlib.import_module(request.param)


def follow(benchmark, trace, rule):
    return benchmark.outcomes(lambda init_scale: rule, {"trace": trace})["trace"]


@pytest.fixture(scope="module")
def default(benchmark):
    """What becomes of the default rule, on average over runs not used to choose it."""
    make = benchmark.RULES[benchmark.DEFAULT]
    return benchmark.mean_outcomes(make, benchmark.traces, 60_000, range(1000, 1006))


@pytest.mark.parametrize("benchmark", ["rules"], indirect=True)
class TestDefaultRule:
    @pytest.mark.parametrize(
        "name",
        [
            *(f"NaN 1 in {number}" for number in (2000, 1000, 300, 100, 60)),
            "bursts of 5",
            "drift and 3 bursts",
            "dips of 6 bits",
            "dips of 10 bits",
            "sine",
        ],
    )
    def test_stays_near_the_usable_scale(self, default, name):
        assert default[name].low <= 0.01
        assert default[name].off <= 2.5

    def test_stays_near_the_usable_scale_with_heavy_tails(self, default):
        assert default["heavy tail"].low <= 0.01
        assert default["heavy tail"].off <= 3.5
        assert default["heavy tail"].lost <= 0.015

    @pytest.mark.parametrize("name", ["NaN 1 in 30", "unstable phases"])
    def test_is_seldom_low_where_much_is_bad(self, default, name):
        assert default[name].low <= 0.1

    @pytest.mark.parametrize(
        "name",
        [
            *("clean", "drift", "from 2^32", "drop of 10 bits", "sine"),
            *("bursts of 5", "drift and 3 bursts", "dips of 6 bits", "dips of 10 bits"),
        ],
    )
    def test_loses_few_steps_where_batches_are_healthy(self, default, name):
        assert default[name].lost <= 0.0035

    def test_loses_few_steps_at_any_capacity_and_noise(self, benchmark):
        make = benchmark.RULES[benchmark.DEFAULT]
        swept = benchmark.mean_outcomes(
            make, benchmark.sweep, 60_000, range(1000, 1003)
        )
        assert max(outcome.lost for outcome in swept.values()) <= 0.004

    def test_loses_few_steps_where_one_batch_in_60_is_bad(self, default):
        assert default["NaN 1 in 60"].lost <= 0.009

    def test_is_back_soon_after_a_burst(self, default):
        waits = default["drift and 3 bursts"].waits
        assert len(waits) == 3 * 6
        assert max(waits) <= 250

    def test_comes_down_as_fast_as_the_classic_rule(self, benchmark):
        def way_down(name):
            rule = benchmark.RULES[name](init_scale=2.0**32)
            flat, never = jnp.full(100, 15.7), jnp.zeros(100, bool)
            return np.round(benchmark.simulate(rule, flat, never)[0])

        default, classic = way_down(benchmark.DEFAULT), way_down(benchmark.CLASSIC)
        assert np.argmax(default == 15) == np.argmax(classic == 15) == 17


@pytest.mark.parametrize("benchmark", ["rules"], indirect=True)
class TestRules:
    def test_bad_batches_take_the_classic_scale_down_and_not_the_default(
        self, benchmark, default
    ):
        traces = benchmark.traces(60_000, 1000)
        for name in ("NaN 1 in 1000", "NaN 1 in 100", "drift and 3 bursts"):
            classic = dls.rules.dynamic(recovery_interval=None)
            assert follow(benchmark, traces[name], classic).low > 0.8
            assert default[name].low < 0.01

    def test_a_gradient_limit_and_statistics_lose_fewer_steps(self, benchmark):
        clean = benchmark.traces(100_000)["clean"]
        lost = follow(benchmark, clean, dls.rules.dynamic()).lost
        for rule in (
            dls.rules.dynamic(gradient_limit=65504.0),
            dls.rules.log_normal(),
        ):
            assert follow(benchmark, clean, rule).lost < lost

    def test_log_normal_is_near_its_target_and_takes_a_drop_of_ten_bits(
        self, benchmark
    ):
        rng = np.random.default_rng(1)
        capacity = 17 + 1.5 * rng.standard_normal(100_000)
        never = np.zeros(100_000, bool)
        noisy = benchmark.Trace(capacity, capacity, never)
        for probability in (0.001, 0.01):
            rule = dls.rules.log_normal(
                overflow_probability=probability, power_of_two=False
            )
            lost = follow(benchmark, noisy, rule).lost
            assert probability / 3 < lost < probability * 3
        drop = benchmark.traces(100_000)["drop of 10 bits"]
        outcome = follow(benchmark, drop, dls.rules.log_normal())
        assert outcome.lost < 60 / 100_000
        assert outcome.low < 0.01

    def test_has_a_row_for_every_rule(self, benchmark):
        tables = benchmark.simulated(500)
        columns = {"healthy": benchmark.HEALTHY, "bad": (*benchmark.BAD, "recovery")}
        for kind, rows in tables.items():
            assert [row[0] for row in rows] == list(benchmark.RULES)
            assert {len(row) for row in rows} == {1 + len(columns[kind])}
        table = benchmark.markdown(["a", "b"], [["1", "2"]])
        assert table == "| a | b |\n| --- | --- |\n| 1 | 2 |"

    def test_waits_are_counted_from_the_end_of_a_burst(self, benchmark):
        is_bad = np.isin(np.arange(12), (2, 3, 11))
        log2_scale = np.array([9, 9, 9, 8, 5, 6, 7, 8, 9, 9, 9, 9])
        assert benchmark.steps_to_recover(log2_scale, is_bad) == (2,)
        assert benchmark.steps_to_recover(log2_scale, np.zeros(12, bool)) == ()

    def test_trains_on_digits(self, benchmark):
        trained = benchmark.train(
            dls.rules.dynamic(), benchmark.start_params(), benchmark.digits(90)
        )
        assert np.flatnonzero(trained.skipped).tolist() == list(range(30, 50))
        assert trained.loss[-1] < 0.9 * trained.loss[0]
        assert np.mean(trained.flushed[:30]) < 0.05 < np.mean(trained.flushed[50:])

    def test_digits_with_bad_batches_show_the_rules_apart(self, benchmark, tmp_path):
        batches = benchmark.digits(900, one_in=30)
        is_bad = np.isnan(batches[0]).any((1, 2))
        runs = {}
        for name in (benchmark.DEFAULT, benchmark.CLASSIC):
            rule = benchmark.RULES[name](init_scale=2.0**15)
            trained = benchmark.train(rule, benchmark.start_params(), batches)
            runs[name] = benchmark.Run(trained, is_bad)
        runs[benchmark.LOG_NORMAL] = runs[benchmark.DEFAULT]
        flushed = {
            name: np.mean(run.trained.flushed[-200:]) for name, run in runs.items()
        }
        assert flushed[benchmark.DEFAULT] < 0.05
        assert flushed[benchmark.CLASSIC] > 0.8
        assert runs[benchmark.DEFAULT].cell().startswith("0, ")
        benchmark.draw("a run", runs, tmp_path / "rules.png")
        assert (tmp_path / "rules.png").exists()


@pytest.mark.parametrize("benchmark", ["layers"], indirect=True)
def test_early_layers_go_their_way_with_layer_scaling_only(benchmark):
    early = benchmark.GROUPS["1-8"]
    adam = optax.adam(1e-4, eps=1e-20)
    scaled = dls.dynamic_loss_scaling(adam, init_scale=2.0**16, growth_interval=20)
    start = benchmark.start_params(), benchmark.digits(20)
    single = dls.no_loss_scaling(adam)
    reference, *_ = benchmark.train(*start, single, "float32", benchmark.alone)
    one, zeros_one, _ = benchmark.train(*start, scaled, "float16", benchmark.alone)
    many, zeros, skips = benchmark.train(*start, scaled, "float16", dls.layer_scaling)
    assert np.mean(zeros_one[early]) > 0.7
    assert np.mean(zeros[early]) < 0.1
    assert int(skips) == 0
    assert benchmark.alignment(one, reference, early) < 0.3
    assert benchmark.alignment(many, reference, early) > 0.8


@pytest.mark.parametrize("benchmark", ["speed"], indirect=True)
class TestSpeed:
    def test_every_method_takes_the_same_step(self, benchmark):
        """But Keras, whose AdamW is its own, and what is not installed."""
        params, batches = benchmark.models.leaves_of(2, 8)
        built, _ = benchmark.build(benchmark.peers.METHODS, 2)
        built["with where"] = benchmark.peers.ours_with_where(optax.adamw(1e-3))
        assert len(built) >= 7
        ends = {}
        for name, method in built.items():
            scale = benchmark.peers.SCALE if name == benchmark.PLAIN else 1
            grads = {key: grad / scale for key, grad in batches[""].items()}
            new, _ = method.step(params, method.init(params), lambda p, s, g=grads: g)
            ends[name] = new["w0"]
        for name, end in ends.items():
            tolerance = 1e-5 if name == "Keras on JAX" else 1e-7
            np.testing.assert_allclose(end, ends[benchmark.OURS], rtol=tolerance)

    @pytest.mark.parametrize("model", ["mlp", "transformer"])
    def test_models_train_in_float16(self, benchmark, model):
        params, batch = getattr(benchmark.models, model)(16)
        loss_fn = getattr(benchmark.models, f"{model}_loss")
        scale = jnp.float32(benchmark.peers.SCALE)
        grads_of = jax.jit(benchmark.models.grads_of(loss_fn))
        grads = grads_of(params, scale, batch)
        assert dls.all_finite(grads)
        assert all(jnp.any(g != 0) for g in grads.values())

    def test_times_methods_in_turn_and_says_what_is_missing(self, benchmark, tmp_path):
        def missing(optimizer):
            raise ImportError(name="nothing")

        names = (benchmark.PLAIN, benchmark.OURS)
        methods = {name: benchmark.peers.METHODS[name] for name in names}
        params, batches = benchmark.models.leaves_of(2, 8)
        results = benchmark.measure(
            methods | {"mpx": missing},
            params,
            benchmark.models.given,
            batches,
            rounds=3,
        )
        assert set(results) == {"", ", overflow"}
        for measured in results.values():
            assert {len(times) for times in measured.seconds.values()} == {3}
            assert float(measured.ratio(benchmark.OURS).split()[0]) > 0
        columns = {"1 leaf": results[""], "MLP step": results[", overflow"]}
        table = benchmark.comparison_table(columns)
        assert "| mpx | not installed: nothing | not installed: nothing |" in table
        grown = {kind: {1: results[""], 10: results[""]} for kind in benchmark.GROWTH}
        assert "(n^0.0)" in benchmark.growth_table(grown)
        benchmark.draw(columns, grown, tmp_path / "speed.png")
        assert (tmp_path / "speed.png").exists()
        assert "jax " in benchmark.machine()
