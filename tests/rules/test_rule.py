"""Rules that people write themselves: what they are told, and what they may keep."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_dls as dls


def test_is_told_what_it_asks_for():
    def update(finite, scale, state, *, last_finite, largest_gradient):
        return scale, (last_finite, largest_gradient)

    start = (jnp.array(True), jnp.float32(0))
    rule = dls.rules.Rule(
        lambda: (jnp.float32(4), start), update, ("last_finite", "largest_gradient")
    )
    tx = dls.loss_scaling(optax.sgd(1.0), rule)
    state = tx.init([jnp.zeros(3), jnp.zeros((), jnp.complex64)])
    grads = [jnp.array([4.0, -8.0, 0.0]), jnp.array(4 - 12j)]
    _, state = tx.update(grads, state)
    assert state.scaler.rule_state == (True, 3.0)
    _, state = tx.update([jnp.array([jnp.nan, -8.0, jnp.inf]), grads[1] * 0], state)
    assert state.scaler.rule_state == (True, 2.0)
    _, state = tx.update([jnp.zeros(3), jnp.zeros((), jnp.complex64)], state)
    assert state.scaler.rule_state == (False, 0.0)


def test_pays_nothing_for_what_it_does_not_ask_for():
    def reductions(**settings):
        tx = dls.dynamic_loss_scaling(optax.sgd(1.0), **settings)
        params = jnp.zeros((64, 64))
        lowered = jax.jit(tx.update).lower(params, tx.init(params), params)
        return lowered.as_text().count("stablehlo.reduce")

    assert reductions() == reductions(recovery_interval=None)
    assert reductions(gradient_limit=65504.0) > reductions()


@pytest.mark.parametrize("needs", [("loss",), "last_finite"])
def test_an_unknown_need_is_refused(needs):
    rule = dls.rules.dynamic()._replace(needs=needs)
    with pytest.raises(ValueError, match="needs must be a tuple of names among"):
        dls.loss_scaling(optax.sgd(1.0), rule)


@pytest.mark.parametrize("start", [jnp.int32(0), (jnp.int32(0),), {"n": jnp.int32(0)}])
@pytest.mark.parametrize("scale", [8.0, jnp.float16(8.0), np.int64(8)])
def test_may_keep_any_tree_and_start_from_any_number(start, scale):
    def update(finite, scale, state):
        return scale / 2, jax.tree.map(lambda n: n + 1, state)

    tx = dls.loss_scaling(
        optax.sgd(1.0), dls.rules.Rule(lambda: (scale, start), update)
    )
    state = tx.init(jnp.ones(1))
    types = jax.tree.map(jax.typeof, state)
    for step in (tx.update, jax.jit(tx.update)):
        _, state = step(jnp.ones(1), state)
    assert jax.tree.map(jax.typeof, state) == types
    assert float(dls.loss_scale(state)) == 2.0
    assert jax.tree.leaves(state.scaler.rule_state) == [2]


def test_is_blamed_itself_where_it_changes_its_state():
    rule = dls.rules.Rule(
        lambda: (jnp.float32(8), ()), lambda finite, scale, state: (scale, 1)
    )
    tx = dls.loss_scaling(optax.sgd(1.0), rule)
    with pytest.raises(ValueError, match="rule.update must return a state of the str"):
        tx.update(jnp.ones(1), tx.init(jnp.ones(1)))


@pytest.mark.parametrize("rule", [dls.rules.dynamic, None, 1024.0])
def test_something_else_is_refused(rule):
    with pytest.raises(TypeError, match="rule must be a Rule"):
        dls.loss_scaling(optax.sgd(0.1), rule)
