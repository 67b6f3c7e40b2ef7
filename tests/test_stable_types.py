"""States whose shapes, dtypes, weak types and buffers never change under the user."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_dls as dls

INNER = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "adam": optax.adam(0.1),
    "adamw": optax.adamw(0.1),
    "lion": optax.lion(0.1),
    "adafactor": optax.adafactor(0.1),
    "rmsprop": optax.rmsprop(0.1),
    "chain": optax.chain(optax.clip_by_global_norm(1.0), optax.yogi(0.1)),
}
DTYPES = ("float16", "bfloat16", "float32", "float64")
pytestmark = pytest.mark.standard_promotion


def avals(tree):
    return jax.tree.map(jax.typeof, tree)


@pytest.fixture(scope="module", params=INNER)
def wrapped(request):
    """A wrapper, its compiled step with everything donated, and the traces of that."""
    tx = dls.dynamic_loss_scaling(
        INNER[request.param], init_scale=1024.0, growth_interval=2
    )
    traces: list[None] = []

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, grads):
        traces.append(None)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return tx, step, traces


def start_params():
    return {
        dtype: {"w": jnp.ones((3, 2), dtype), "b": jnp.ones((), dtype)}
        for dtype in ("float16", "bfloat16", "float32")
    }


def test_types_are_the_same_after_every_kind_of_step(wrapped):
    tx, step, traces = wrapped
    params = start_params()
    state = tx.init(params)
    types = avals(state)
    assert not any(aval.weak_type for aval in jax.tree.leaves(types))
    good = jax.tree.map(lambda p: p * 1024, params)
    bad = jax.tree.map(lambda p: p * jnp.inf, params)
    for grads in (good, good, bad, good):  # applied, growing, skipped, applied
        params, state = step(params, state, grads)
        assert avals(state) == types
    restored = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), state)
    _, state = step(params, restored, good)
    assert avals(state) == types
    assert len(traces) == 1


def test_a_fresh_state_can_be_donated_with_its_parameters(wrapped):
    tx, step, _ = wrapped
    grads = start_params()
    for _ in range(2):  # the second init must not share what the first gave away
        params = start_params()
        state = tx.init(params)
        pointers = [x.unsafe_buffer_pointer() for x in jax.tree.leaves((params, state))]
        assert len(set(pointers)) == len(pointers)
        params, state = step(params, state, grads)
        chex.assert_tree_all_finite(step(params, state, grads))


@pytest.mark.parametrize("name", INNER)
def test_every_mix_of_parameter_and_gradient_has_one_type_of_state(make, name):
    with jax.enable_x64(True):
        tx = make(INNER[name])
        params = {p: {g: jnp.ones((3, 2), p) for g in DTYPES} for p in DTYPES}
        grads = {p: {g: jnp.ones((3, 2), g) for g in DTYPES} for p in DTYPES}
        state = tx.init(params)
        updates, new_state = jax.eval_shape(tx.update, grads, state, params)
        for old, new in zip(
            jax.tree.leaves(state), jax.tree.leaves(new_state), strict=True
        ):
            assert jax.typeof(old) == jax.typeof(jnp.zeros(new.shape, new.dtype))
        for dtype, updates_of_dtype in updates.items():
            wide = jnp.promote_types(dtype, jnp.float32)
            assert {u.dtype for u in jax.tree.leaves(updates_of_dtype)} == {wide}


def test_weak_types_that_come_in_go_out_strong(make):
    tx = make(optax.adam(0.1))
    params = jnp.ones(2)
    state = tx.init(params)
    weak = jax.tree.map(lambda x: x, state)
    weak = optax.tree.set(weak, loss_scale=8.0, count=3)
    weak = weak._replace(
        inner_state=jax.tree.map(
            lambda x: x * 1.0 if jnp.ndim(x) else x, weak.inner_state
        )
    )
    for update in (tx.update, jax.jit(tx.update)):
        assert avals(update(params, weak, params)[1]) == avals(state)


@pytest.mark.parametrize("name", INNER)
def test_init_under_eval_shape_and_on_shapes(make, name):
    tx = make(INNER[name])
    params = {"w": jnp.ones((3, 2), jnp.float16)}
    state = tx.init(params)
    shapes = jax.eval_shape(tx.init, params)
    chex.assert_trees_all_equal_shapes_and_dtypes(shapes, state)
    from_shapes = tx.init(jax.eval_shape(lambda: params))
    chex.assert_trees_all_equal_shapes_and_dtypes(from_shapes, state)
