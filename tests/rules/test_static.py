"""A scale that does not move."""

import jax
import jax.numpy as jnp
import optax

import optax_dls as dls


def test_the_scale_of_the_rule_wins_over_a_restored_one():
    old, new = (dls.static_loss_scaling(optax.sgd(1.0), s) for s in (1024.0, 8.0))
    state = old.init(jnp.zeros(1))
    _, state = new.update(jnp.array([1.0]), state)
    assert float(dls.loss_scale(state)) == 8.0


def test_a_schedule_can_set_it():
    inject = optax.inject_hyperparams(dls.static_loss_scaling)
    tx = inject(optax.sgd(1.0), scale=optax.linear_schedule(8.0, 16.0, 1))
    params = jnp.zeros(1)
    state, update = tx.init(params), jax.jit(tx.update)
    for expected in (8.0, 16.0, 16.0):
        _, state = update(jnp.array([1.0]), state, params)
        assert float(dls.loss_scale(state)) == expected
