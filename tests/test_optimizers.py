"""Every optimizer of Optax: nothing changes when all is finite, nothing leaks else."""

import functools
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

import optax_dls as dls

pytestmark = [
    pytest.mark.standard_promotion,
    pytest.mark.filterwarnings("ignore:.*optimistic_adam.*:DeprecationWarning"),
]

# Optimizers that do not run on gradients alone; test_composition.py has them.
LEFT_OUT = {
    "_deprecated_dpsgd": "needs the gradient of every example",
    "dpsgd": "needs the gradient of every example",
    "lookahead": "goes around another optimizer",
    "mechanize": "goes around another optimizer",
    "momo": "needs the value of the loss",
    "momo_adam": "needs the value of the loss",
    "polyak_sgd": "needs the value of the loss",
    "schedule_free": "goes around another optimizer",
    "sophia": "needs obj_fn for its Hessian estimate",
}
# Links, of which the optimizers are chained; and wrappers, see test_composition.py.
LINKS = re.compile(
    "scale|add_|clip|_?(adaptive_grad_clip|apply_every|apply_if_finite|centralize|chain|"
    "conditionally_|deprecated_diff|differentially|ema|flatten|freeze|identity|inject_|"
    "keep_params|masked|measure|monitor|multi_transform|named_chain|normalize|partition|"
    "reduce_on_plateau|sam|selective|set_to_zero|snapshot|split_real|stateless|trace|"
    "with_extra|zero_nans)"
)
# Their annotations do not say that they return a transformation, or their defaults are
# not what is tested here.
COMPOSED = {
    "dog": lambda learning_rate: optax.contrib.dog(learning_rate),
    "dowg": lambda learning_rate: optax.contrib.dowg(learning_rate),
    "lbfgs": lambda learning_rate: optax.lbfgs(learning_rate, linesearch=None),
    "noisy_sgd": lambda learning_rate: optax.noisy_sgd(learning_rate, key=0),
    "schedule": lambda learning_rate: optax.sgd(
        optax.linear_schedule(learning_rate, 0.0, 8), momentum=0.9
    ),
}


def transformations():
    """Every public function of Optax that says that it returns a transformation."""
    return {
        name: function
        for module in (optax, optax.contrib)
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if "GradientTransformation"
        in str(inspect.signature(function).return_annotation)
        and not LINKS.match(name)
    }


OPTIMIZERS = {
    **{name: make for name, make in transformations().items() if name not in LEFT_OUT},
    **COMPOSED,
}
STEPS = 10


def tree_of(name, seed):
    """Parameters or gradients: float32, of order one."""
    rng = np.random.default_rng(seed)
    shapes = {"matrix": (6, 4), "vector": (5,), "scalar": ()}
    if name == "sm3":  # which indexes the axes of every leaf
        del shapes["scalar"]
    return {
        leaf: jnp.asarray(rng.normal(size=shape), jnp.float32)
        for leaf, shape in shapes.items()
    }


def train(step, params, state, name):
    """Parameters and state at the start and after each of ten steps."""
    history = [(params, state)]
    for t in range(STEPS):
        history.append(step(*history[-1], tree_of(name, t + 1)))
    return history


@functools.cache
def wrapped(name):
    """The compiled wrapped step of an optimizer, and ten finite steps with it."""
    # Grows on every second step, so that the scale moves under the optimizer.
    tx = dls.dynamic_loss_scaling(
        OPTIMIZERS[name](learning_rate=0.01), init_scale=2.0**10, growth_interval=2
    )

    @jax.jit
    def step(params, state, grads):
        scaled = jax.tree.map(lambda g: g * dls.loss_scale(state), grads)
        updates, state = tx.update(scaled, state, params)
        return optax.apply_updates(params, updates), state

    params = tree_of(name, 0)
    return step, train(step, params, tx.init(params), name)


def bits(tree):
    """The bytes of every leaf: equal also where NaN is, unequal where -0 is."""
    return [
        np.asarray(
            jax.random.key_data(leaf)
            if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
            else leaf
        ).tobytes()
        for leaf in map(jnp.asarray, jax.tree.leaves(tree))
    ]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_equals_the_optimizer_under_a_cond_of_its_own(name):
    optimizer = OPTIMIZERS[name](learning_rate=0.01)

    # The traced one is there for the compiler alone: without a factor to fold, it
    # contracts other products into fused multiply-adds, which round once less.
    @jax.jit
    def step_with(one, params, state, grads):
        def times_one(tree):
            return jax.tree.map(lambda g: g * one, tree)

        updates, state = jax.lax.cond(
            dls.all_finite(times_one(grads)),
            lambda g, s, p: optimizer.update(times_one(g), s, p),
            lambda g, s, p: (jax.tree.map(jnp.zeros_like, g), s),
            *(grads, state, params),
        )
        return optax.apply_updates(params, updates), state

    params = tree_of(name, 0)
    state = jax.tree.map(jnp.asarray, optimizer.init(params))
    step = functools.partial(step_with, jnp.float32(1.0))
    expected = train(step, params, state, name)

    _, history = wrapped(name)
    assert float(dls.loss_scale(history[-1][1])) == 2.0**15
    for (params, state), (expected_params, expected_state) in zip(
        history, expected, strict=True
    ):
        assert bits(params) == bits(expected_params)
        assert bits(state.inner_state) == bits(expected_state)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_equals_plain_steps_to_the_last_places(name):
    """XLA fuses a plain step differently, and FMAs round once less.

    Seen after ten steps on x86-64, in units in the last place of the largest entry of
    a leaf: 2 for optimistic_gradient_descent; up to 1 for acprop, adabelief, adafactor,
    adagrad, adam, adamaxw, adamw, adan, galore, lamb, lion, muon, noisy_sgd, novograd,
    optimistic_adam_v2, rmsprop, schedule_free_adamw, sgd, simplified_ademamix, yogi and
    four of the compositions; 0, bit for bit, for all others.
    """
    optimizer = OPTIMIZERS[name](learning_rate=0.01)

    @jax.jit
    def step(params, state, grads):
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params = tree_of(name, 0)
    expected, _ = train(step, params, optimizer.init(params), name)[-1]
    actual, _ = wrapped(name)[1][-1]

    for leaf, plain_leaf in zip(
        jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True
    ):
        last_place = np.spacing(np.max(np.abs(plain_leaf)))
        np.testing.assert_allclose(leaf, plain_leaf, rtol=0, atol=2 * last_place)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_overflow_in_any_leaf_leaves_everything_as_it_was(name):
    step, history = wrapped(name)
    params, state = history[3]
    for leaf in params:
        for fault in (jnp.inf, -jnp.inf, jnp.nan):
            grads = tree_of(name, 99)
            grads[leaf] = (
                grads[leaf].ravel().at[-1].set(fault).reshape(grads[leaf].shape)
            )
            new_params, new_state = step(params, state, grads)
            assert bits(new_params) == bits(params)
            assert bits(new_state.inner_state) == bits(state.inner_state)
            assert int(new_state.scaler.total_skips) == 1
            assert float(dls.loss_scale(new_state)) == float(dls.loss_scale(state)) / 2


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_run_with_bad_batches_equals_the_run_without_them(name):
    step, history = wrapped(name)
    params, state = history[0]
    for t in range(STEPS):
        if t in (0, 4, 5, 9):
            bad = jax.tree.map(lambda g: g * jnp.nan, tree_of(name, 50 + t))
            params, state = step(params, state, bad)
        params, state = step(params, state, tree_of(name, t + 1))
    assert int(state.scaler.total_skips) == 4
    assert bits(params) == bits(history[-1][0])
    assert bits(state.inner_state) == bits(history[-1][1].inner_state)


def test_the_list_is_what_optax_has():
    """A new optimizer is tested from its first day on, or named with a reason."""
    assert {"adam", "adamw", "sgd", "lion", "muon", "prodigy", "radam"} <= set(
        OPTIMIZERS
    )
    assert not set(LEFT_OUT) & set(OPTIMIZERS)
    # What counts as a link takes no learning rate, unless its name says what it scales.
    for module in (optax, optax.contrib):
        for name, function in inspect.getmembers(module, inspect.isfunction):
            if LINKS.match(name) and not name.startswith("scale_by"):
                assert "learning_rate" not in inspect.signature(function).parameters, (
                    name
                )
