"""Nothing waits for the device: no number is read from it on the way."""

import jax
import jax.numpy as jnp
import optax
import pytest

import optax_dls as dls


@pytest.fixture
def no_reads(monkeypatch):
    """Every way from an array to a Python number raises.

    The transfer guard alone sees nothing on a CPU, where device and host share memory.
    """

    def refuse(self, *args, **kwargs):
        raise AssertionError("a number was read from the device")

    for name in ("float", "bool", "int", "index", "complex", "array"):
        monkeypatch.setattr(type(jnp.zeros(())), f"__{name}__", refuse)
    with jax.transfer_guard_device_to_host("disallow"):
        yield


def test_the_fixture_sees_a_read(no_reads):
    array = jnp.zeros(())
    for read in (float, bool, int):
        with pytest.raises(AssertionError, match="was read"):
            read(array)


def loss_fn(params, x):
    return jnp.mean((x.astype(jnp.float16) @ params.astype(jnp.float16)) ** 2).astype(
        jnp.float32
    )


OPTIMIZERS = {
    "dynamic": dls.dynamic_loss_scaling(optax.sgd(0.1)),
    "checked": dls.dynamic_loss_scaling(optax.sgd(0.1), check_updates=True),
    "static": dls.static_loss_scaling(optax.sgd(0.1), 8.0),
    "log_normal": dls.loss_scaling(optax.sgd(0.1), dls.rules.log_normal()),
    "none": dls.no_loss_scaling(optax.sgd(0.1)),
}


@pytest.mark.parametrize("jitted", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_and_what_is_asked_about_it(name, jitted, no_reads):
    tx = OPTIMIZERS[name]

    def step(params, state, x):
        loss, grads = dls.value_and_scaled_grad(loss_fn)(params, x, state=state)
        updates, new_state = tx.update(grads, state, params, value=loss)
        report = dls.gradient_report(grads, state)
        true = dls.unscale(grads, state)
        params = optax.apply_updates(params, updates)
        average = dls.rollback_if_skipped(new_state, params, jnp.zeros_like(params))
        return params, new_state, dls.metrics(new_state), (loss, report, true, average)

    params, x = jax.jit(lambda: (jnp.ones((4, 2)), jnp.ones((3, 4))))()
    run = jax.jit(step) if jitted else step
    history = dls.History()
    state = jax.jit(tx.init)(params)
    for _ in range(2):
        params, state, metrics, (loss, *_) = run(params, state, x)
        history.append(metrics, loss=loss)
    repr(history)
