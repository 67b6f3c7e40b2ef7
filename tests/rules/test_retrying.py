"""Rules that count retries; what they do is in tests/test_retry.py."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import optax_dls as dls
from optax_dls import rules


@pytest.mark.parametrize(
    "rule",
    [rules.overflow_rate(tolerance=0.25), rules.gradual(), rules.log_normal()],
    ids=["overflow rate", "gradual", "log-normal"],
)
def test_types_are_stable_under_jit_scan_donation_and_strict_promotion(rule):
    tx = dls.loss_scaling(optax.sgd(1.0), rules.retrying(rule))
    params = jnp.ones(3)

    @functools.partial(jax.jit, donate_argnums=0)
    def run(state):
        def step(state, factor):
            return tx.update(factor * jnp.ones(3), state, params)[1], None

        return jax.lax.scan(step, state, jnp.array([1.0, jnp.inf, jnp.nan, 1.0]))[0]

    start = tx.init(params)
    types = jax.tree.map(jax.typeof, start)
    assert jax.tree.map(jax.typeof, run(start)) == types


def test_a_fixed_scale_of_each_device():
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    tx = dls.loss_scaling(optax.sgd(1.0), rules.retrying(rules.static(8.0)))
    states = jax.vmap(tx.init)(jnp.zeros((8, 1)))

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=P("d"), out_specs=P("d"))
    def step(states, grads):
        state = jax.tree.map(lambda x: x[0], states)
        updates, state = tx.update(grads[0], state)
        return updates[None], jax.tree.map(lambda x: x[None], state)

    updates, _ = step(states, 8 * jnp.ones((8, 1)))
    np.testing.assert_array_equal(updates, -np.ones((8, 1)))


@pytest.mark.parametrize("wrong", [None, 8.0, rules.dynamic])
def test_something_that_is_no_rule_is_refused(wrong):
    with pytest.raises(TypeError, match="rule must be a Rule"):
        rules.retrying(wrong)


def test_the_loop_over_the_retries_is_in_no_branch():
    """XLA for GPUs keeps a conditional that holds a loop, and waits for its flag."""
    tx = dls.loss_scaling(optax.sgd(1.0), dls.rules.retrying(dls.rules.dynamic()))
    params = jnp.ones(2)
    jaxpr = jax.make_jaxpr(tx.update)(params, tx.init(params), params)
    text = str(jaxpr)
    assert text.count("while[") == 1
    branches = [
        str(branch)
        for eqn in jaxpr.eqns
        if eqn.primitive.name == "cond"
        for branch in eqn.params["branches"]
    ]
    assert len(branches) >= 2
    assert not any("while[" in branch for branch in branches)
