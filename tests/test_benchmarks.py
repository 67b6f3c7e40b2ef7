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
    log2_scale, finite = benchmark.simulate(
        rule, jnp.asarray(trace.capacity, jnp.float32), jnp.asarray(trace.is_bad)
    )
    gap = trace.usable - np.asarray(log2_scale)
    return int(np.sum(~np.asarray(finite) & ~trace.is_bad)), float(np.mean(gap > 8))


@pytest.mark.parametrize("benchmark", ["rules"], indirect=True)
class TestRules:
    def test_recovery_pays_after_bursts_and_costs_little(self, benchmark):
        traces = benchmark.traces(100_000)
        bursts, clean = traces["drift and 3 bursts"], traces["clean"]
        recovering = dls.rules.dynamic()
        classic = dls.rules.dynamic(recovery_interval=None)
        lost, low = follow(benchmark, bursts, recovering)
        classic_lost, classic_low = follow(benchmark, bursts, classic)
        assert low < 0.01
        assert classic_low > 0.8
        # As many as without bursts, whose classic scale probes just as often.
        assert (
            classic_lost < lost < 1.1 * follow(benchmark, traces["drift"], classic)[0]
        )
        assert follow(benchmark, clean, recovering) == follow(benchmark, clean, classic)

    def test_a_gradient_limit_and_statistics_lose_fewer_steps(self, benchmark):
        clean = benchmark.traces(100_000)["clean"]
        lost, _ = follow(benchmark, clean, dls.rules.dynamic())
        for rule in (
            dls.rules.dynamic(gradient_limit=65504.0),
            dls.rules.log_normal(),
        ):
            assert follow(benchmark, clean, rule)[0] < lost

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
            lost, _ = follow(benchmark, noisy, rule)
            assert probability / 3 < lost / 100_000 < probability * 3
        drop = benchmark.traces(100_000)["drop of 10 bits"]
        lost, low = follow(benchmark, drop, dls.rules.log_normal())
        assert lost < 60
        assert low < 0.01

    def test_has_a_row_for_every_rule(self, benchmark):
        rows = benchmark.simulated(500)
        assert [row[0] for row in rows] == list(benchmark.RULES)
        assert {len(row) for row in rows} == {8}
        table = benchmark.markdown(["a", "b"], [["1", "2"]])
        assert table == "| a | b |\n| --- | --- |\n| 1 | 2 |"

    def test_trains_on_digits(self, benchmark):
        loss, skipped, flushed = benchmark.train(
            dls.rules.dynamic(), benchmark.start_params(), benchmark.digits(90)
        )
        assert np.flatnonzero(skipped).tolist() == list(range(30, 50))
        assert loss[-1] < 0.9 * loss[0]
        assert np.mean(flushed[:30]) < 0.05 < np.mean(flushed[50:])


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
