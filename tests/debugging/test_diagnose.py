"""Each finding is proved by a run that has the fault, and a healthy run has none."""

import functools
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import optax_dls as dls

pytestmark = pytest.mark.standard_promotion
STEPS, INTERVAL = 400, 100
KEYS = jax.random.split(jax.random.key(0), 3)
PARAMS = {
    "in": jax.random.normal(KEYS[0], (8, 16)) / 3,
    "out": jax.random.normal(KEYS[1], (16, 1)) / 4,
}
X = jax.random.normal(KEYS[2], (STEPS, 32, 8))


def loss_fn(params, x, dtype=jnp.float16):
    cast = jax.tree.map(lambda p: p.astype(dtype), params)
    y = jnp.tanh(x.astype(dtype) @ cast["in"]) @ cast["out"]
    return jnp.mean((y.astype(jnp.float32) - jnp.sin(x[:, :1])) ** 2)


def train(loss_fn=loss_fn, x=X, optimizer=None, tx=None, **settings):
    """The history of a run, as arrays, with all that a history can hold."""
    optimizer = optax.sgd(0.1) if optimizer is None else optimizer
    settings = {"growth_interval": INTERVAL, **settings}
    tx = tx or dls.dynamic_loss_scaling(optimizer, **settings)

    def step(carry, x):
        params, state = carry
        loss, grads = dls.value_and_scaled_grad(loss_fn)(params, x, state=state)
        report = dls.gradient_report(grads, state)
        updates, state = tx.update(grads, state, params)
        seen = {"loss": loss, "update_norm": optax.tree.norm(updates)}
        carry = (optax.apply_updates(params, updates), state)
        return carry, (dls.metrics(state) | seen, report)

    @jax.jit
    def run(params, state):
        return lax.scan(step, (params, state), x)

    _, (columns, reports) = run(PARAMS, tx.init(PARAMS))
    columns = {name: np.asarray(value) for name, value in columns.items()}
    columns["nonfinite_leaf"] = np.array(reports.first_nonfinite(), object)
    return {"step": np.arange(len(x)), **columns}


def with_underflow(columns, share):
    return columns | {"underflow_share": np.full(columns["step"].size, share)}


def names(columns, **settings):
    settings = {"growth_interval": INTERVAL, **settings}
    return [finding.name for finding in dls.diagnose(columns, **settings)]


def flushed_in_float32(loss_fn, scale):
    """What a float16 backward pass would flush of this gradient, at this scale."""
    state = dls.static_loss_scaling(optax.sgd(1.0), scale).init(PARAMS)
    loss = functools.partial(loss_fn, dtype=jnp.float32)
    _, grads = dls.value_and_scaled_grad(loss)(PARAMS, X[0], state=state)
    return dls.gradient_report(grads, state).underflow_share()


@functools.cache
def healthy():
    columns = train(init_scale=2.0**24)
    return with_underflow(columns, flushed_in_float32(loss_fn, 2.0**18))


def test_a_healthy_run_has_no_finding():
    columns = healthy()
    assert columns["total_skips"][-1] > 0  # it has its probes
    assert columns["loss"][-1] < columns["loss"][0]
    assert names(columns) == []
    loss = np.linspace(0.1, 9.0, STEPS)  # of underflow, not of a rate
    assert (
        names(with_underflow(columns, 0.5) | {"loss": loss})[0] == "gradients too small"
    )
    assert "divergence" not in names(with_underflow(columns, 0.5) | {"loss": loss})


def test_br33_the_search_for_a_first_scale_and_the_probes_are_no_finding():
    """https://github.com/NVIDIA/apex/issues/864"""
    columns = train(init_scale=2.0**30)
    assert columns["total_skips"][-1] > 10
    assert names(columns) == []


def test_bad_batches_now_and_then_are_frequent_overflow():
    found = names(train(x=X.at[9::20, 0, 0].set(jnp.inf)))
    assert "frequent overflow" in found
    assert "overflow at the floor" not in found
    sgd = optax.sgd(0.1)
    tx = ValueTeller(dls.dynamic_loss_scaling(sgd, growth_interval=INTERVAL))
    (finding,) = dls.diagnose(
        train(x=X.at[9::20, 0, 0].set(jnp.inf), tx=tx), growth_interval=INTERVAL
    )
    assert finding.causes == "batches whose loss is not finite"
    assert "value=loss" not in finding.advice  # it has that already


def test_bad_data_overflow_at_the_floor():
    found = names(train(x=X.at[50:, 0, 0].set(jnp.nan), min_scale=2.0), min_scale=2.0)
    assert "overflow at the floor" in found
    assert "frequent overflow" not in found  # one fault, not two


def test_an_exp_in_float16_overflows_at_the_floor():
    """In all leaves, as the loss does, so that no single one is named."""

    def with_exp(params, x):
        hot = jnp.exp(x.astype(jnp.float16) @ (20 * params["in"]).astype(jnp.float16))
        return jnp.mean((hot @ params["out"].astype(jnp.float16)).astype(jnp.float32))

    found = names(train(with_exp, min_scale=2.0), min_scale=2.0)
    assert "overflow at the floor" in found
    assert "the same leaf every time" not in found


def test_a_norm_at_zero_is_found_in_its_leaf():
    """The loss is finite, but the gradient of a norm at zero is not."""

    def with_norm(params, x):
        gate = jnp.where(x[0, 0] > 1, 0.0, 1.0)
        return loss_fn(params, x) + 1e-3 * jnp.linalg.norm(gate * params["out"])

    columns = train(with_norm)
    assert np.isfinite(columns["loss"]).all()
    (finding,) = [
        f for f in dls.diagnose(columns, growth_interval=INTERVAL) if "leaf" in f.name
    ]
    assert "['out']" in finding.evidence


@pytest.mark.parametrize(("max_scale", "ceiling"), [(2.0**15, True), (2.0**32, False)])
def test_a_tiny_weight_leaves_gradients_too_small(max_scale, ceiling):
    def tiny(params, x, dtype=jnp.float16):
        return 2.0**-40 * loss_fn(params, x, dtype)

    columns = train(tiny, max_scale=max_scale, growth_interval=1000)
    columns = with_underflow(
        columns, flushed_in_float32(tiny, columns["loss_scale"][-1])
    )
    findings = dls.diagnose(columns, growth_interval=1000, max_scale=max_scale)
    (finding,) = [f for f in findings if f.name == "gradients too small"]
    assert ("which is its ceiling" in finding.evidence) == ceiling
    assert ("max_scale" in finding.advice) == ceiling
    grows = [f for f in findings if f.name == "the scale never grows"]
    assert len(grows) == (not ceiling)
    assert "longer than the run" in "".join(f.causes for f in grows) or ceiling


def test_bad_batches_that_reset_the_count_keep_the_scale_from_growing():
    bad = X.at[40::60, 0, 0].set(jnp.inf)
    found = dls.diagnose(train(x=bad), growth_interval=INTERVAL)
    (finding,) = [f for f in found if f.name == "the scale never grows"]
    assert "an overflow about every 57 steps" in finding.evidence


def test_a_rate_that_is_too_high_diverges():
    found = names(train(optimizer=optax.adam(lambda t: 1e-3 * 1.02**t)))
    assert found == ["divergence"]


def test_a_burst_of_nan_batches_collapses_the_scale():
    bad = X.at[150:170, 0, 0].set(jnp.nan)
    columns = train(x=bad, recovery_interval=None)
    (finding,) = [
        f
        for f in dls.diagnose(columns, growth_interval=2000)
        if f.name == "collapsed after a burst"
    ]
    assert "20 skips in a row" in finding.evidence
    told = train(
        tx=ValueTeller(
            dls.dynamic_loss_scaling(optax.sgd(0.1), recovery_interval=None)
        ),
        x=bad,
    )
    recovered = train(x=bad)
    for healthy in (told, recovered):
        assert "collapsed after a burst" not in names(healthy)


class ValueTeller:
    """A transformation that passes the loss on, as a step with value=loss does."""

    def __init__(self, tx):
        self.init = tx.init
        self.update = lambda grads, state, params: tx.update(
            grads,
            state,
            params,
            value=jnp.where(dls.all_finite(grads), 0.0, jnp.nan),
        )


def test_a_float16_loss_is_recognised_by_its_values():
    def half(params, x):
        return loss_fn(params, x).astype(jnp.float16)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # dls says so itself
        found = names(train(half))
    assert "float16 loss" in found


def test_weight_decay_behind_the_wrapper_is_the_wrong_order():
    tx = optax.chain(
        dls.dynamic_loss_scaling(optax.sgd(0.1), growth_interval=INTERVAL),
        optax.add_decayed_weights(-1e-4),
    )
    assert names(train(tx=tx, x=X.at[50, 0, 0].set(jnp.nan))) == [
        "a wrapper in the wrong order"
    ]
    inside = optax.chain(optax.sgd(0.1), optax.add_decayed_weights(-1e-4))
    assert names(train(optimizer=inside, x=X.at[50, 0, 0].set(jnp.nan))) == []


def test_a_finding_prints_its_numbers_causes_and_cures():
    columns = train(x=X.at[50:, 0, 0].set(jnp.nan), min_scale=2.0)
    text = str(dls.diagnose(columns, growth_interval=INTERVAL, min_scale=2.0)[0])
    assert text.splitlines()[0].startswith("overflow at the floor: ")
    assert "\n  Likely: not the scale" in text
    assert "\n  Try: " in text


def recorded(columns):
    history = dls.History()
    history.extend({k: v for k, v in columns.items() if k != "step"})
    return history


def test_a_history_is_taken_as_its_arrays_are(tmp_path):
    columns = train(x=X.at[50:, 0, 0].set(jnp.nan), min_scale=2.0)
    recorded(columns).save(tmp_path / "run.jsonl")
    for history in (recorded(columns), dls.History.load(tmp_path / "run.jsonl")):
        found = dls.diagnose(history, growth_interval=INTERVAL, min_scale=2.0)
        assert found[0].name == "overflow at the floor"
    # What was not recorded is not asked about.
    short = dls.History()
    short.append({name: columns[name][0] for name in dls.metrics(start_state())})
    assert dls.diagnose(short) == []


def start_state():
    return dls.dynamic_loss_scaling(optax.sgd(0.1)).init(PARAMS)


def test_a_stalled_run_says_so_in_the_error():
    tx = dls.dynamic_loss_scaling(optax.sgd(0.1))
    params, history = jnp.zeros(1), dls.History()
    state = tx.init(params)
    update = jax.jit(tx.update)
    for _ in range(40):
        _, state = update(jnp.array([jnp.nan]), state, params)
        history.append(dls.metrics(state))
    dls.raise_if_stalled(state, 40, history)
    with pytest.raises(dls.LossScaleStalledError, match="The last 40 steps") as error:
        dls.raise_if_stalled(state, 20, history)
    assert "\noverflow at the floor: " in str(error.value)
    with pytest.raises(dls.LossScaleStalledError) as error:
        dls.raise_if_stalled(state, 20)
    assert "\n" not in str(error.value)
    with pytest.raises(dls.LossScaleStalledError):
        dls.raise_if_stalled(state, 20, dls.History())


class TestCommand:
    def run(self, *arguments):
        return subprocess.run(
            [sys.executable, "-m", "optax_dls.debugging", *map(str, arguments)],
            capture_output=True,
            text=True,
            check=False,
        )

    def test_prints_findings_and_writes_the_picture(self, tmp_path):
        file = tmp_path / "run.jsonl"
        recorded(train(x=X.at[50:, 0, 0].set(jnp.nan), min_scale=2.0)).save(file)
        done = self.run(file, "--growth-interval", INTERVAL, "--min-scale", 2)
        assert done.returncode == 1, done.stderr
        assert done.stdout.startswith("overflow at the floor: ")
        assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")

    def test_says_that_nothing_is_wrong(self, tmp_path):
        recorded(healthy()).save(tmp_path / "run.jsonl")
        done = self.run(
            tmp_path / "run.jsonl",
            "--growth-interval",
            INTERVAL,
            "--out",
            tmp_path / "a.png",
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert "nothing is wrong in 400 records" in done.stdout
        assert (tmp_path / "a.png").exists()

    def test_a_file_that_holds_something_else(self, tmp_path):
        (tmp_path / "run.jsonl").write_text("junk\n")
        done = self.run(tmp_path / "run.jsonl")
        assert done.returncode == 2
        assert "Line 1 of" in done.stderr
        assert "Traceback" not in done.stderr

    def test_a_file_that_is_not_there(self, tmp_path):
        done = self.run(tmp_path / "none.jsonl")
        assert done.returncode == 2
        assert "there is no file" in done.stderr


@pytest.mark.parametrize("history", [None, "run.jsonl"])
def test_what_is_no_history_is_refused(history):
    with pytest.raises(TypeError, match="must be a History or its arrays"):
        dls.diagnose(history)


def test_an_interval_of_nothing_is_refused():
    with pytest.raises(ValueError, match="growth_interval must be at least 1"):
        dls.diagnose(healthy(), growth_interval=0)


def test_an_empty_history_is_refused():
    with pytest.raises(ValueError, match=r"history is empty. Append dls.metrics"):
        dls.diagnose({"loss_scale": np.zeros(0)})
