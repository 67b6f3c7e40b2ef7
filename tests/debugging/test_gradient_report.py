"""The gradient report: counts by leaf, and what float16 would lose."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_dls as dls


def state_of(scale):
    return dls.static_loss_scaling(optax.sgd(1.0), scale).init(jnp.zeros(()))


GRADS = {
    "a": jnp.array([0.0, 2.0**-24, 2.0**-25, 2.0**-15, 3.0]),
    "b": jnp.array([jnp.nan, jnp.inf, -jnp.inf, -jnp.inf, -8.0], jnp.float16),
}


def counts(report):
    return {
        name: getattr(report, name).tolist()
        for name in (
            "nan",
            "positive_inf",
            "negative_inf",
            "zero",
            "flushed_unscaled",
            "flushed",
            "subnormal",
        )
    }


def test_counts_by_leaf_without_a_scale():
    report = dls.gradient_report(GRADS)
    assert report.paths == ("['a']", "['b']")
    assert report.entries == (5, 5)
    assert counts(report) == {
        "nan": [0, 1],
        "positive_inf": [0, 1],
        "negative_inf": [0, 2],
        "zero": [1, 0],
        "flushed_unscaled": [1, 0],  # 2**-25 is half way to zero, and rounds to even
        "flushed": [1, 0],
        "subnormal": [2, 0],
    }
    assert report.largest.tolist() == [3.0, 8.0]
    assert report.smallest.tolist() == [2.0**-25, 8.0]


def test_magnitudes_are_unscaled_and_flushing_is_told_with_and_without_the_scale():
    grads = {"w": 2.0**4 * jnp.array([2.0**-27, 2.0**-20, 1.0])}
    report = dls.gradient_report(grads, state_of(2.0**4))
    assert report.largest.tolist() == [1.0]
    assert report.smallest.tolist() == [2.0**-27]
    assert counts(report)["flushed_unscaled"] == [1]
    assert counts(report)["flushed"] == [0]
    assert counts(report)["subnormal"] == [2]
    assert report.underflow_share(scaled=False) == pytest.approx(1 / 3)
    assert report.underflow_share() == 0.0


@settings(deadline=None)
@given(
    st.lists(st.floats(-38, 5), min_size=1, max_size=30),
    st.integers(-4, 20),
    st.sampled_from(["float16", "bfloat16"]),
)
def test_what_is_flushed_is_what_a_cast_makes_zero(exponents, log2_scale, dtype):
    """And subnormal is what lies below the smallest normal number."""
    true = np.exp2(np.array(exponents)).astype(np.float32)
    scaled = jnp.asarray(true * np.float32(2.0**log2_scale))
    report = dls.gradient_report([scaled], state_of(2.0**log2_scale), dtype)
    with np.errstate(over="ignore"):  # what becomes inf is not asked about here
        cast = np.asarray(scaled).astype(dtype).astype(np.float32)
    assert int(report.flushed[0]) == np.sum(cast == 0)
    bare = true.astype(dtype).astype(np.float32)
    assert int(report.flushed_unscaled[0]) == np.sum(bare == 0)
    tiny = float(jnp.finfo(dtype).tiny)
    below = (np.asarray(scaled) < tiny) & (cast != 0)
    assert int(report.subnormal[0]) == np.sum(below)


def test_names_the_first_leaf_that_is_not_finite():
    report = dls.gradient_report(GRADS)
    assert report.first_nonfinite() == "['b']"
    assert report.nonfinite().tolist() == [0, 4]
    assert dls.gradient_report({"a": GRADS["a"]}).first_nonfinite() is None


def test_prints_a_table_the_worst_leaf_first():
    lines = str(dls.gradient_report(GRADS, state_of(1.0))).splitlines()
    assert lines[0] == "scale 1, float16; magnitudes are unscaled"
    assert [line.split()[0] for line in lines[1:4]] == ["leaf", "['b']", "['a']"]
    row = "['a'] 5 0 0 0 20.0% 20.0% 20.0% 40.0% 3.0e+00 3.0e-08"
    assert lines[3].split() == row.split()
    summary = (
        "10.0% of all entries are zero; of the other finite ones 20.0% are flushed"
    )
    assert lines[4:] == [summary + " and 40.0% subnormal"]


def test_prints_no_magnitude_where_there_is_none():
    grads = {"nan": jnp.full(2, jnp.nan), "zero": jnp.zeros(2)}
    lines = str(dls.gradient_report(grads)).splitlines()
    assert lines[2].split()[-2:] == ["-", "-"]
    assert lines[3].split()[-2:] == ["0.0e+00", "-"]
    assert lines[4].endswith("so nothing shows what underflowed")


def test_a_bare_array_has_a_name():
    report = dls.gradient_report(jnp.array([1.0, jnp.inf]))
    assert report.paths == ("grads",) and report.first_nonfinite() == "grads"
    assert str(report).splitlines()[2].startswith("grads ")


def test_shares_of_all_leaves():
    grads = {
        # Zero, flushed twice, subnormal three times, normal, and not finite twice.
        "a": jnp.array([0.0, 1e-9, 1e-8, 1e-6, 1e-5, 6e-5, 1.0, jnp.inf, jnp.nan]),
        "b": jnp.array([0.0, 1.0]),
    }
    report = dls.gradient_report(grads)
    assert report.zero_share() == 2 / 11
    assert report.underflow_share() == 2 / 7
    assert report.subnormal_share() == 3 / 7


@pytest.mark.parametrize(
    ("grads", "zero"), [(jnp.zeros(3), 1.0), (jnp.full(3, jnp.nan), 0.0), ({}, np.nan)]
)
def test_nothing_is_known_where_every_entry_is_zero_or_not_finite(grads, zero):
    """So in float16, where all of a gradient underflowed in the backward pass."""
    report = dls.gradient_report(grads)
    for share in (
        report.underflow_share(),
        report.underflow_share(scaled=False),
        report.subnormal_share(),
    ):
        assert np.isnan(share)
    assert report.zero_share() == zero or np.isnan(zero)


def test_an_entry_below_float32_is_counted_once():
    """XLA may take it for zero."""
    report = dls.gradient_report(jnp.full(3, 1e-40), dtype=jnp.bfloat16)
    found = counts(report)
    assert sum(found[name][0] for name in ("zero", "flushed", "subnormal")) == 3
    assert found["flushed_unscaled"] == found["flushed"]


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float8_e5m2])
def test_the_bounds_of_what_is_flushed_and_subnormal(dtype):
    info = jnp.finfo(dtype)
    half, tiny = np.float32(info.smallest_subnormal) / 2, np.float32(info.tiny)
    up, down = np.float32(np.inf), np.float32(0)
    entries = [half, np.nextafter(half, up), np.nextafter(tiny, down), tiny]
    report = dls.gradient_report(jnp.array(entries, jnp.float32), dtype=dtype)
    assert counts(report) == counts(dls.gradient_report(jnp.zeros(0))) | {
        "flushed": [1],
        "flushed_unscaled": [1],
        "subnormal": [2],
    }


def test_leaves_that_are_no_numbers_are_left_out():
    grads = {
        "w": jnp.ones(2),
        "none": None,
        "integer": jnp.arange(3),
        "float0": np.zeros(3, jax.dtypes.float0),
        "empty": jnp.zeros((0,)),
    }
    report = dls.gradient_report(grads)
    assert report.paths == ("['empty']", "['w']")
    assert report.underflow_share() == 0.0
    assert report.first_nonfinite() is None
    assert report.smallest.tolist() == [0.0, 1.0]
    assert str(dls.gradient_report({})).count("\n") == 1


def test_both_parts_of_a_complex_entry_count():
    report = dls.gradient_report([jnp.array([complex(3, np.inf), 0.5 - 2j])])
    assert int(report.positive_inf[0]) == 1
    assert report.entries == (4,)
    assert (report.largest.tolist(), report.smallest.tolist()) == ([3.0], [0.5])


def test_jit_scan_and_vmap_return_it():
    grads = jnp.array([[1.0, 2.0], [jnp.inf, 1e-9], [0.0, 1.0]])
    one = jax.jit(dls.gradient_report)(grads[1], state_of(1.0))
    assert one.first_nonfinite() == "grads"
    _, scanned = lax.scan(
        lambda _, g: (None, dls.gradient_report({"w": g})), None, grads
    )
    mapped = jax.vmap(lambda g: dls.gradient_report({"w": g}))(grads)
    for report in (scanned, mapped):
        assert report.positive_inf.tolist() == [[0], [1], [0]]
        assert report.first_nonfinite() == [None, "['w']", None]
        with pytest.raises(ValueError, match="reports of several steps.*Look at one"):
            report.underflow_share()
        step = jax.tree.map(lambda x: x[1], report)
        assert step.first_nonfinite() == "['w']"


def test_a_population_is_reported_on_under_vmap_or_refused():
    states = jax.vmap(dls.dynamic_loss_scaling(optax.sgd(1.0)).init)(jnp.zeros((2, 2)))
    states = optax.tree.set(states, loss_scale=jnp.array([2.0, 4.0]))
    grads = jnp.array([[2.0, 2.0], [4.0, 4.0]])
    report = jax.vmap(dls.gradient_report)(grads, states)
    assert report.largest.tolist() == [[1.0], [1.0]]
    assert report.loss_scale.tolist() == [2.0, 4.0]
    with pytest.raises(ValueError, match=r"shape \(2,\).*under jax.vmap: jax.vmap"):
        dls.gradient_report(grads, states)


def test_sharded_gradients_give_the_same_counts():
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    grads = {"w": jax.random.normal(jax.random.key(0), (64, 3)) * 1e-7}
    grads["w"] = grads["w"].at[63, 0].set(jnp.nan)
    sharded = jax.device_put(grads, NamedSharding(mesh, P("d")))
    expected = dls.gradient_report(grads)
    report = jax.jit(dls.gradient_report)(sharded)
    assert counts(report) == counts(expected)
    assert report.largest.tolist() == expected.largest.tolist()


@pytest.mark.parametrize("dtype", ["float32", "float16", "complex64"])
def test_it_reads_every_gradient_once_and_needs_no_memory(dtype):
    grads = jnp.ones((100, 100), dtype)
    compiled = jax.jit(dls.gradient_report).lower(grads, state_of(8.0)).compile()
    read = compiled.cost_analysis()["bytes accessed"] / grads.nbytes
    assert read < 1.1
    assert compiled.memory_analysis().temp_size_in_bytes < 1000


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("spec", [P("d"), P(None, "d"), P()])
def test_of_sharded_gradients_it_gathers_no_shard(axis_type, spec):
    mesh = jax.make_mesh((8,), ("d",), axis_types=(axis_type,))
    grads = {"w": jnp.linspace(-1e-7, 1, 2**14).reshape(128, 128).at[3, 5].set(jnp.inf)}
    expected = dls.gradient_report(grads)
    sharded = jax.device_put(grads, NamedSharding(mesh, spec))
    with jax.set_mesh(mesh):
        compiled = jax.jit(dls.gradient_report).lower(sharded).compile()
        reports = compiled(sharded), dls.gradient_report(sharded)
    for report in reports:
        assert counts(report) == counts(expected)
        assert report.largest.tolist() == expected.largest.tolist()
        assert report.smallest.tolist() == expected.smallest.tolist()
    shard = grads["w"].nbytes / 8
    assert compiled.memory_analysis().temp_size_in_bytes < shard


def test_un_jitted_calls_compile_once(caplog):
    grads = {name: np.ones((3, n), np.float32) for n, name in enumerate("abcdef", 2)}
    state = state_of(2.0)

    def compilations():
        caplog.clear()
        with jax.log_compiles():
            dls.gradient_report(grads, state)
        lines = [record.getMessage() for record in caplog.records]
        return sum(line.startswith("Finished XLA compilation") for line in lines)

    assert compilations() == 1
    assert compilations() == 0
    grads["a"] = np.zeros((9, 9), np.float32)
    assert compilations() == 1


@pytest.mark.parametrize("wrap", [lambda fn: fn, jax.jit])
def test_runs_where_debug_nans_and_debug_infs_are_on(wrap):
    healthy = {"w": jnp.ones(2), "frozen": jnp.zeros(3), "empty": jnp.zeros(0)}
    state = state_of(2.0)
    for grads in (healthy, GRADS, {}):
        expected = dls.gradient_report(grads, state)
        with jax.debug_infs(True), jax.debug_nans(True):
            report = wrap(dls.gradient_report)(grads, state)
        jax.tree.map(np.testing.assert_array_equal, report, expected)


def test_a_step_that_does_not_ask_pays_nothing():
    tx = dls.dynamic_loss_scaling(optax.sgd(1.0))
    params = jnp.ones(4)

    def step(grads, state):
        dls.gradient_report(grads, state)  # not returned, so compiled away
        return tx.update(grads, state, params)

    def program(step):
        lowered = jax.jit(step).lower(params, tx.init(params))
        return lowered.compile().cost_analysis()["bytes accessed"]

    assert program(step) == program(lambda g, s: tx.update(g, s, params))


def test_a_dtype_that_is_none():
    with pytest.raises(TypeError, match="dtype must be a real floating-point dtype"):
        dls.gradient_report(GRADS, dtype=jnp.int32)
