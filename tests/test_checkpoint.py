"""Checkpoints: a run that stops and goes on equals the run that never stopped."""

import functools
import multiprocessing
import pathlib
import random
import signal
import subprocess
import sys
import time

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from killed_worker import STEPS, train_until_killed
from orbax.checkpoint import v1 as orbax_v1

import optax_dls as dls

pytestmark = pytest.mark.standard_promotion

HERE = pathlib.Path(__file__).parent
FORMATS = ("orbax", "orbax v1", "flax", "leaves")
LAYOUTS = ((1, 1), (8, 8), (8, 2), (1, 8))  # devices that save, devices that resume
optimizer = optax.adamw(1e-2)
tx = dls.dynamic_loss_scaling(optimizer, init_scale=1024.0, growth_interval=3)


def shardings(devices):
    """Of parameters and state: rows over the devices, scalars everywhere."""
    mesh = jax.make_mesh(
        (devices,),
        ("d",),
        axis_types=(AxisType.Auto,),
        devices=jax.devices()[:devices],
    )
    rows, everywhere = NamedSharding(mesh, P("d")), NamedSharding(mesh, P())
    params = {"w": rows, "v": rows}
    return params, optax.tree.map_params(
        tx,
        lambda _, sharding: sharding,
        jax.eval_shape(tx.init, start_params()),
        params,
        transform_non_params=lambda _: everywhere,
    )


def start_params():
    return {
        "w": jnp.linspace(-1, 1, 24).reshape(8, 3),
        "v": jnp.linspace(0, 1, 8).astype(jnp.float16),
    }


@functools.cache
def start(devices):
    param_shardings, state_shardings = shardings(devices)
    params = jax.device_put(start_params(), param_shardings)
    return params, jax.jit(tx.init, out_shardings=state_shardings)(params)


@jax.jit
def step(params, state, t):
    grads = jax.tree.map(
        lambda p: jnp.sin(p.astype(jnp.float32) + t) * dls.loss_scale(state), params
    )
    grads["w"] = grads["w"].at[-1, 0].multiply(jnp.where(t % 6 == 0, jnp.nan, 1.0))
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def train(params, state, first, last):
    """Steps first to last - 1: steps 0 and 6 overflow, 3 and 9 grow the scale."""
    for t in range(first, last):
        params, state = step(params, state, jnp.float32(t))
    return params, state


@functools.cache
def uninterrupted(devices):
    params, state = start(devices)
    return train(params, state, 0, 10)


def leaves_of(tree):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def save(format, folder, tree):
    folder.mkdir(parents=True)
    if format == "orbax":
        with orbax.checkpoint.StandardCheckpointer() as checkpointer:
            checkpointer.save(folder / "saved", tree)
    elif format == "orbax v1":
        orbax_v1.save(folder / "saved", tree)
    elif format == "flax":
        (folder / "saved").write_bytes(flax.serialization.to_bytes(tree))
    else:
        np.savez(folder / "saved.npz", *leaves_of(tree))


def load(format, folder, template):
    """What was saved, laid out as a tree of the same structure."""
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), template
    )
    if format == "orbax":
        with orbax.checkpoint.StandardCheckpointer() as checkpointer:
            return checkpointer.restore(folder / "saved", abstract)
    if format == "orbax v1":
        return orbax_v1.load(folder / "saved", abstract)
    if format == "flax":
        tree = flax.serialization.from_bytes(template, (folder / "saved").read_bytes())
    else:
        arrays = np.load(folder / "saved.npz")
        tree = jax.tree.unflatten(jax.tree.structure(template), list(arrays.values()))
    return jax.device_put(tree, jax.tree.map(lambda x: x.sharding, template))


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    """Five steps here, saved in every format; five more in a new process."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for devices in {saved_on for saved_on, _ in LAYOUTS}:
        params, state = start(devices)
        tree = train(params, state, 0, 5)
        for format in FORMATS:
            save(format, folder / format / str(devices), tree)
    worker = [sys.executable, str(HERE / "resume_worker.py"), str(folder)]
    subprocess.run(worker, check=True)
    return folder


@pytest.mark.parametrize(("saved_on", "resumed_on"), LAYOUTS)
@pytest.mark.parametrize("format", FORMATS)
def test_five_and_five_steps_equal_ten(resumed, format, saved_on, resumed_on):
    params, state = uninterrupted(resumed_on)
    assert int(state.scaler.total_skips) == 2
    assert float(dls.loss_scale(state)) == 1024.0
    end = np.load(resumed / format / str(saved_on) / f"end_on_{resumed_on}.npz")
    for value, expected in zip(end.values(), leaves_of((params, state)), strict=True):
        np.testing.assert_array_equal(value, expected)


@pytest.mark.parametrize("format", ["orbax", "flax"])
def test_an_optimizer_saved_without_a_scaler_goes_under_one(tmp_path, format):
    params = start_params()
    _, old = optimizer.update(params, optimizer.init(params), params)
    save(format, tmp_path / "old", old)
    fresh = tx.init(params)
    # Loaded as if it had a scaler: both libraries name what is missing.
    with pytest.raises(ValueError, match="scaler"):
        load(format, tmp_path / "old", jax.eval_shape(lambda: fresh))
    # Loaded as what it is, and used as if it had one: the update says what to do.
    bare = load(format, tmp_path / "old", optimizer.init(params))
    with pytest.raises(TypeError, match=r"_replace\(inner_state=old_state\)"):
        tx.update(params, bare, params)
    # Its moments of half-precision parameters are in half precision: cast them.
    bare = jax.tree.map(
        lambda old, new: jnp.asarray(old, new.dtype), bare, fresh.inner_state
    )
    _, state = tx.update(params, fresh._replace(inner_state=bare), params)
    assert int(optax.tree.get(state, "count")) == 2
    assert float(dls.loss_scale(state)) == 1024.0


def test_scaling_is_switched_on_and_off_in_a_run():
    params = start_params()["w"]
    off = dls.no_loss_scaling(optimizer)
    state, counts = off.init(params), []
    for wrapper in (off, tx, off, tx):
        state = wrapper.init(params)._replace(inner_state=state.inner_state)
        grads = params * dls.loss_scale(state)
        _, state = wrapper.update(grads, state, params)
        counts.append(int(optax.tree.get(state, "count")))
    bare = optimizer.init(params)
    for _ in range(4):
        _, bare = optimizer.update(params, bare, params)
    assert counts == [1, 2, 3, 4]
    for value, expected in zip(
        leaves_of(state.inner_state), leaves_of(bare), strict=True
    ):
        np.testing.assert_allclose(value, expected, rtol=1e-6)


def test_a_run_that_is_killed_20_times_equals_one_that_is_not(tmp_path):
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["flax.serialization", "optax_dls"])

    def live(name, steps=None):
        """Trains to the end, or is killed in the step after so many; from where."""
        worker, parent = processes.Pipe()
        life = processes.Process(
            target=train_until_killed, args=(tmp_path / name, parent)
        )
        life.start()
        parent.close()
        start = done = worker.recv()
        while done < (STEPS if steps is None else start + steps):
            worker.send("one more step")
            done = worker.recv()
        if steps is not None:
            worker.send("one more step")
            time.sleep(random.uniform(0, 0.003))  # it may compute, save or be done
            life.kill()
        life.join()
        assert life.exitcode == (0 if steps is None else -signal.SIGKILL)
        return start

    assert live("undisturbed") == 0
    random.seed(0)
    steps = [random.randint(1, 14) for _ in range(20)]
    starts = [live("killed", number) for number in steps] + [live("killed")]
    for before, number, after in zip(starts, steps, starts[1:], strict=False):
        assert after - before in (number, number + 1)
    end = (tmp_path / "killed").read_bytes()
    assert end == (tmp_path / "undisturbed").read_bytes()
    assert len(end) > 100


@pytest.fixture(scope="module")
def state_of_0_1_0():
    """The fixture is never written anew: field names are the checkpoint format."""
    classic = dls.dynamic_loss_scaling(optax.adam(1e-2), recovery_interval=None)
    saved = (HERE / "state_0_1_0.msgpack").read_bytes()
    return flax.serialization.from_bytes(classic.init(PARAMS), saved)


PARAMS = {"w": jnp.ones((2, 2)), "b": jnp.ones(2, jnp.float16)}


def test_a_state_that_version_0_1_0_wrote_still_loads(state_of_0_1_0):
    state = state_of_0_1_0
    assert float(state.scaler.loss_scale) == 2.0**14
    assert not bool(state.scaler.grads_finite)
    assert int(state.scaler.consecutive_skips) == 1
    assert int(state.scaler.total_skips) == 2
    assert int(state.scaler.rule_state.growth_count) == 0
    assert int(optax.tree.get(state, "count")) == 3
    np.testing.assert_allclose(optax.tree.get(state, "mu")["b"], 0.271, rtol=1e-5)
    classic = dls.dynamic_loss_scaling(optax.adam(1e-2), recovery_interval=None)
    _, state = classic.update(PARAMS, state, PARAMS)
    assert int(state.scaler.total_skips) == 2


def test_it_moves_over_to_the_default_rule_with_its_scale(state_of_0_1_0):
    old, tx = state_of_0_1_0, dls.dynamic_loss_scaling(optax.adam(1e-2))
    with pytest.raises(TypeError, match=r"not a LevelRuleState.*_replace"):
        tx.update(PARAMS, old, PARAMS)
    new = tx.init(PARAMS)._replace(inner_state=old.inner_state)
    new = optax.tree.set(new, loss_scale=dls.loss_scale(old))
    _, new = tx.update(PARAMS, new, PARAMS)
    assert float(dls.loss_scale(new)) == 2.0**14
    assert float(optax.tree.get(new, "level")) == 2.0**14
    assert int(optax.tree.get(new, "count")) == 4


RULES = {
    "level": dls.rules.dynamic(init_scale=1024.0, recovery_interval=2),
    "classic": dls.rules.dynamic(growth_interval=3, recovery_interval=None),
    "hysteresis": dls.rules.dynamic(hysteresis=3, growth_interval=4),
    "overflow rate": dls.rules.overflow_rate(
        tolerance=0.3, growth_interval=4, interval_follows_scale=True
    ),
    "gradual": dls.rules.gradual(growth_interval=4),
    "log-normal": dls.rules.log_normal(),
    "retrying": dls.rules.retrying(dls.rules.dynamic(growth_interval=3)),
}


WRAPPERS = {name: dls.loss_scaling(optimizer, rule) for name, rule in RULES.items()}


@jax.jit
def steps_of_all_rules(states, first, last):
    params = start_params()

    def step(t, states):
        bad = (t == 1) | (t == 2) | (t == 8)
        grads = jax.tree.map(
            lambda p: jnp.where(bad, jnp.nan, p.astype(jnp.float32) + 1), params
        )
        new = {}
        for name, state in states.items():
            scaled = jax.tree.map(lambda g, s=state: g * dls.loss_scale(s), grads)
            _, new[name] = WRAPPERS[name].update(scaled, state, params)
        return new

    return jax.lax.fori_loop(first, last, step, states)


@pytest.mark.parametrize("format", FORMATS)
def test_what_every_rule_remembers_is_saved(tmp_path, format):
    start = {name: tx.init(start_params()) for name, tx in WRAPPERS.items()}
    middle, end = (steps_of_all_rules(start, 0, last) for last in (5, 12))
    returning = middle["level"].scaler.rule_state
    assert (float(returning.level), int(returning.finite_steps)) == (1024.0, 0)
    assert float(dls.loss_scale(middle["level"])) == 512.0
    save(format, tmp_path / "at", middle)
    resumed = steps_of_all_rules(load(format, tmp_path / "at", start), 5, 12)
    for value, expected in zip(leaves_of(resumed), leaves_of(end), strict=True):
        np.testing.assert_array_equal(value, expected)


@pytest.mark.parametrize(
    ("state", "fields"),
    [
        (dls.LossScalingState, "scaler inner_state"),
        (
            dls.ScalerState,
            "loss_scale grads_finite consecutive_skips total_skips rule_state",
        ),
        (
            dls.rules.LevelRuleState,
            (
                "level last_scale growth_count finite_steps test_steps failures "
                "trial_interval overflows_left"
            ),
        ),
        (dls.rules.DynamicRuleState, "growth_count"),
        (dls.rules.HysteresisRuleState, "growth_count overflows_left"),
        (
            dls.rules.OverflowRateRuleState,
            "growth_count growth_interval overflow_count step_count",
        ),
        (dls.rules.GradualRuleState, "has_overflowed"),
        (dls.rules.LogNormalRuleState, "step_count mean slow_mean variance"),
        (dls.rules.RetryingRuleState, "pending_retries total_retries rule_state"),
        (dls.rules.NoScalingState, ""),
    ],
)
def test_field_names_are_the_format_and_stay(state, fields):
    assert state._fields == tuple(fields.split())
