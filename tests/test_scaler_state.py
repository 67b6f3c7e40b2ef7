"""What the scaler remembers, and that Optax finds it by name."""

import jax
import jax.numpy as jnp
import optax
import pytest

import optax_dls as dls


def test_counters_saturate(make):
    tx = make()
    state = optax.tree.set(
        tx.init(jnp.zeros(1)),
        consecutive_skips=jnp.int32(2**31 - 1),
        total_skips=jnp.int32(2**31 - 1),
    )
    _, state = tx.update(jnp.array([jnp.nan]), state)
    assert int(state.scaler.consecutive_skips) == 2**31 - 1
    assert int(state.scaler.total_skips) == 2**31 - 1


def test_a_scale_set_to_nonsense_comes_back_into_bounds(make):
    tx = make()
    for nonsense in (jnp.inf, jnp.nan, 0.0, -1.0):
        state = optax.tree.set(tx.init(jnp.zeros(1)), loss_scale=nonsense)
        _, state = tx.update(jnp.array([jnp.nan]), state)
        assert 2.0**-14 <= float(dls.loss_scale(state)) <= 2.0**32


@pytest.mark.parametrize(
    "around",
    [
        lambda tx: optax.chain(tx),
        lambda tx: optax.named_chain(("main", tx)),
        lambda tx: optax.inject_hyperparams(lambda rate: tx)(rate=0.1),
    ],
    ids=["chain", "named_chain", "inject_hyperparams"],
)
def test_tree_get_and_set_find_the_scale(make, around):
    tx = around(make())
    state = optax.tree.set(tx.init(jnp.zeros(1)), loss_scale=jnp.float32(4.0))
    assert float(optax.tree.get(state, "loss_scale")) == 4.0
    updates, state = tx.update(jnp.array([8.0]), state, jnp.zeros(1))
    assert float(updates[0]) == -2.0
    assert float(optax.tree.get(state, "loss_scale")) == 4.0


def test_map_params_knows_scalars_from_parameters(make):
    tx = make(optax.adamw(0.1))
    params = {"w": jnp.ones((3, 2)), "b": jnp.ones(2)}
    marked = optax.tree.map_params(
        tx,
        lambda _, spec: spec,
        tx.init(params),
        {"w": "w", "b": "b"},
        transform_non_params=lambda _: "scalar",
    )
    assert set(jax.tree.leaves(marked.scaler)) == {"scalar"}
    assert optax.tree.get(marked, "mu") == {"w": "w", "b": "b"}
