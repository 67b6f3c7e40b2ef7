"""Every optimizer of Optax: nothing changes when all is finite, nothing leaks else."""

import functools
import inspect

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

import optax_dls as dls

pytestmark = pytest.mark.standard_promotion

# Optimizers that cannot run on gradients alone.
LEFT_OUT = {
    "_deprecated_dpsgd": "needs the gradient of every example",
    "dpsgd": "needs the gradient of every example",
    "lbfgs": "needs value, grad and value_fn for its line search",
    "momo": "needs the value of the loss",
    "momo_adam": "needs the value of the loss",
    "polyak_sgd": "needs the value of the loss",
    "sophia": "needs obj_fn for its Hessian estimate",
}
REQUIRED = {"noisy_sgd": {"key": 0}}


def optimizers():
    """Functions of a learning rate that give a transformation, by introspection."""
    found = {}
    for module in (optax, optax.contrib):
        for name, function in inspect.getmembers(module, inspect.isfunction):
            signature = inspect.signature(function)
            first = next(iter(signature.parameters), "")
            if (
                "GradientTransformation" in str(signature.return_annotation)
                and first in ("learning_rate", "max_learning_rate")
                and not name.startswith("scale_by_")
            ):
                found[name] = functools.partial(function, **REQUIRED.get(name, {}))
    return found




def wrapped_optimizers():
    """Optimizers that come around another one."""
    return {
        "chain": lambda learning_rate: optax.chain(
            optax.clip_by_global_norm(1.0), optax.adamw(learning_rate)
        ),
        "inject_hyperparams": optax.inject_hyperparams(optax.adamw),
        "mechanize": lambda learning_rate: optax.contrib.mechanize(
            optax.adam(learning_rate)
        ),
        "partition": lambda learning_rate: optax.partition(
            {"a": optax.adam(learning_rate), "b": optax.sgd(learning_rate)},
            {"matrix": "a", "vector": "b", "scalar": "a"},
        ),
        "sam": lambda learning_rate: optax.contrib.sam(
            optax.sgd(learning_rate), optax.sgd(0.05)
        ),
        "schedule": lambda learning_rate: optax.sgd(
            optax.linear_schedule(learning_rate, 0.0, 8), momentum=0.9
        ),
    }


OPTIMIZERS = {
    **{name: make for name, make in optimizers().items() if name not in LEFT_OUT},
    **wrapped_optimizers(),
}
STEPS = 10


def tree_of(seed):
    """Parameters or gradients: float32, of order one."""
    rng = np.random.default_rng(seed)
    shapes = {"matrix": (6, 4), "vector": (5,), "scalar": ()}
    return {
        name: jnp.asarray(rng.normal(size=shape), jnp.float32)
        for name, shape in shapes.items()
    }


def wrap(optimizer):
    """Grows on every second step, so that the scale moves under the optimizer."""
    return dls.dynamic_loss_scaling(
        optimizer, init_scale=2.0**10, growth_interval=2, max_scale=2.0**20
    )


def compiled_step(tx):
    @jax.jit
    def step(params, state, grads):
        scaled = jax.tree.map(lambda g: g * dls.loss_scale(state), grads)
        updates, state = tx.update(scaled, state, params)
        return optax.apply_updates(params, updates), state

    return step


@functools.cache
def trained(name):
    """Ten steps on finite gradients; the compiled step serves the other tests."""
    tx = wrap(OPTIMIZERS[name](learning_rate=0.01))
    step = compiled_step(tx)
    params = tree_of(0)
    run = [(params, tx.init(params))]
    for t in range(STEPS):
        run.append(step(*run[-1], tree_of(t + 1)))
    return step, run


def bits(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_equals_the_optimizer_under_a_cond_of_its_own(name):
    optimizer = OPTIMIZERS[name](learning_rate=0.01)

    @jax.jit
    def step(params, state, grads):
        updates, state = jax.lax.cond(
            dls.all_finite(grads),
            lambda grads, state, params: optimizer.update(grads, state, params),
            lambda grads, state, params: (jax.tree.map(jnp.zeros_like, grads), state),
            grads,
            state,
            params,
        )
        return optax.apply_updates(params, updates), state

    params = tree_of(0)
    state = jax.tree.map(jnp.asarray, optimizer.init(params))
    for t in range(STEPS):
        params, state = step(params, state, tree_of(t + 1))

    _, run = trained(name)
    wrapped_params, wrapped_state = run[-1]
    assert float(dls.loss_scale(wrapped_state)) == 2.0**15
    assert bits(wrapped_params) == bits(params)
    assert bits(wrapped_state.inner_state) == bits(state)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_equals_plain_steps(name):
    optimizer = OPTIMIZERS[name](learning_rate=0.01)

    @jax.jit
    def step(params, state, grads):
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params = tree_of(0)
    state = optimizer.init(params)
    for t in range(STEPS):
        params, state = step(params, state, tree_of(t + 1))
    _, run = trained(name)
    d = max(
        float(np.max(np.abs(np.asarray(a)-np.asarray(b))/np.spacing(np.maximum(np.abs(np.asarray(a)),1e-30)))) for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(run[-1][0])))
    print("ULP", name, d)
    assert bits(run[-1][0]) == bits(params), d
