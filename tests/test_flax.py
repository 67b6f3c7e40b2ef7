"""Flax Linen and NNX: training states, optimizers and batch statistics."""

import flax.linen as nn
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import optax_dls as dls

pytestmark = pytest.mark.standard_promotion
X = jnp.linspace(-1, 1, 24).reshape(8, 3)
Y = jnp.sin(3 * X[:, :1])
BAD = X.at[2, 1].set(jnp.inf)


def make():
    return dls.dynamic_loss_scaling(optax.adam(1e-2), init_scale=2.0**10)


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x, train=True):
        x = nn.Dense(8, dtype=jnp.float16)(x)
        x = nn.BatchNorm(use_running_average=not train, dtype=jnp.float16)(x)
        return nn.Dense(1, dtype=jnp.float16)(nn.relu(x)).astype(jnp.float32)


class LinenState(TrainState):
    batch_stats: dict


@jax.jit
def linen_step(state, x):
    def loss_fn(params):
        variables = {"params": params, "batch_stats": state.batch_stats}
        y, updates = state.apply_fn(variables, x, mutable=["batch_stats"])
        return jnp.mean((y - Y) ** 2), updates["batch_stats"]

    (loss, stats), grads = dls.value_and_scaled_grad(loss_fn, has_aux=True)(
        state.params, state=state
    )
    new = state.apply_gradients(grads=grads)
    kept = dls.rollback_if_skipped(new, stats, state.batch_stats)
    return new.replace(batch_stats=kept), loss


def linen_state():
    model = LinenNet()
    variables = model.init(jax.random.key(0), X)
    return LinenState.create(apply_fn=model.apply, tx=make(), **variables)


def test_linen_trains_and_an_overflow_changes_nothing():
    state = linen_state()
    losses = []
    for _ in range(30):
        state, loss = linen_step(state, X)
        losses.append(float(loss))
    assert losses[-1] < 0.5 * losses[0]
    skipped, loss = linen_step(state, BAD)
    assert not np.isfinite(loss)
    for kept, old in zip(
        jax.tree.leaves((skipped.params, skipped.batch_stats)),
        jax.tree.leaves((state.params, state.batch_stats)),
        strict=True,
    ):
        np.testing.assert_array_equal(kept, old)
    # Attempted steps, applied steps: the optimizer counts what it was given.
    assert int(skipped.step) == 31
    assert int(optax.tree.get(skipped.opt_state, "count")) == 30
    assert int(dls.scaler_state(skipped).total_skips) == 1


def test_linen_state_survives_serialization():
    state = linen_state()
    for x in (X, BAD, X):
        state, _ = linen_step(state, x)
    saved = flax.serialization.to_bytes(state)
    restored = flax.serialization.from_bytes(linen_state(), saved)
    for value, expected in zip(
        jax.tree.leaves(restored), jax.tree.leaves(state), strict=True
    ):
        np.testing.assert_array_equal(value, expected)
    as_dict = flax.serialization.to_state_dict(state.opt_state)
    assert set(as_dict) == {"scaler", "inner_state"}
    assert set(as_dict["scaler"]) == {
        "loss_scale",
        "grads_finite",
        "consecutive_skips",
        "total_skips",
        "rule_state",
    }
    assert set(as_dict["scaler"]["rule_state"]) == set(dls.rules.LevelRuleState._fields)
    again, _ = linen_step(restored, X)
    expected, _ = linen_step(state, X)
    for value, other in zip(
        jax.tree.leaves(again.params), jax.tree.leaves(expected.params), strict=True
    ):
        np.testing.assert_array_equal(value, other)


class NnxNet(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(3, 8, dtype=jnp.float16, rngs=rngs)
        self.norm = nnx.BatchNorm(8, dtype=jnp.float16, rngs=rngs)
        self.last = nnx.Linear(8, 1, dtype=jnp.float16, rngs=rngs)

    def __call__(self, x):
        return self.last(nnx.relu(self.norm(self.first(x)))).astype(jnp.float32)


@nnx.jit
def nnx_step(model, optimizer, x):
    def loss_fn(model):
        return jnp.mean((model(x) - Y) ** 2)

    before = jax.tree.map(jnp.copy, nnx.state(model, nnx.BatchStat))
    loss, grads = dls.value_and_scaled_grad(loss_fn, value_and_grad=nnx.value_and_grad)(
        model, state=optimizer
    )
    optimizer.update(model, grads)
    after = nnx.state(model, nnx.BatchStat)
    nnx.update(model, dls.rollback_if_skipped(optimizer, after, before))
    return loss


def test_nnx_trains_and_an_overflow_changes_nothing():
    model = NnxNet(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, make(), wrt=nnx.Param)
    losses = [float(nnx_step(model, optimizer, X)) for _ in range(30)]
    assert losses[-1] < 0.5 * losses[0]
    old = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model)))
    assert not np.isfinite(nnx_step(model, optimizer, BAD))
    new = nnx.to_pure_dict(nnx.state(model))
    jax.tree.map(np.testing.assert_array_equal, new, old)
    assert dls.metrics(optimizer) == {
        "loss_scale": 2.0**9,
        "grads_finite": False,
        "consecutive_skips": 1,
        "total_skips": 1,
    }
    assert int(optimizer.step[...]) == 31
    assert float(optax.tree.get(optimizer.opt_state, "loss_scale")[...]) == 2.0**9
