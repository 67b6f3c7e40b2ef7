"""Reading the scaler out of any state, and acting on a skip."""

import chex
import flax.linen
import flax.training.train_state
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import optax_dls as dls

PARAMS = {"w": jnp.ones((2, 2)), "b": jnp.ones(2)}


def make(inner=None):
    return dls.dynamic_loss_scaling(inner or optax.sgd(0.1), init_scale=64.0)


def train_state(tx):
    return flax.training.train_state.TrainState.create(
        apply_fn=lambda: None, params=PARAMS, tx=tx
    )


CONTAINERS = {
    "bare": lambda tx: tx.init(PARAMS),
    "chain": lambda tx: optax.chain(tx).init(PARAMS),
    "named_chain": lambda tx: optax.named_chain(("a", tx)).init(PARAMS),
    "dict": lambda tx: {"opt_state": tx.init(PARAMS), "step": 3},
    "inject_hyperparams": lambda tx: optax.inject_hyperparams(lambda rate: tx)(
        rate=0.1
    ).init(PARAMS),
    "TrainState": train_state,
    "nnx.Optimizer": lambda tx: nnx.Optimizer(
        nnx.Linear(2, 2, rngs=nnx.Rngs(0)), tx, wrt=nnx.Param
    ),
    "scaler_state": lambda tx: dls.scaler_state(tx.init(PARAMS)),
}


@pytest.mark.standard_promotion
@pytest.mark.parametrize("container", CONTAINERS)
def test_finds_the_scaler_in(container):
    state = CONTAINERS[container](make())
    scaler = dls.scaler_state(state)
    assert isinstance(scaler, dls.ScalerState)
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(scaler))
    assert type(scaler.loss_scale) is type(jnp.zeros(()))
    assert float(dls.loss_scale(state)) == 64.0
    assert dls.metrics(state) == {
        "loss_scale": 64.0,
        "grads_finite": True,
        "consecutive_skips": 0,
        "total_skips": 0,
    }


def test_finds_the_scaler_of_every_device():
    state = jax.vmap(make().init)(jax.tree.map(lambda p: jnp.stack([p] * 8), PARAMS))
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))
    state = jax.device_put(state, sharding)
    np.testing.assert_array_equal(dls.loss_scale(state), [64.0] * 8)
    dls.raise_if_stalled(state)


HIDDEN = {
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 2).gradient_transformation(),
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 3),
    "conditionally_transform": lambda tx: optax.conditionally_transform(
        tx, lambda step: step > 0
    ),
    "conditionally_mask": lambda tx: optax.conditionally_mask(
        tx, lambda step: step > 0
    ),
    "masked": lambda tx: optax.masked(tx, {"w": True, "b": False}),
    "partition": lambda tx: optax.partition(
        {"x": tx, "y": optax.sgd(0.1)}, {"w": "x", "b": "y"}
    ),
}


@pytest.mark.standard_promotion
@pytest.mark.parametrize("wrapper", HIDDEN)
@pytest.mark.parametrize("depth", ["top", "deep"])
def test_refuses_a_scaler_under_a_wrapper_that_breaks_it(wrapper, depth):
    tx = HIDDEN[wrapper](optax.chain(make()))
    if depth == "deep":
        tx = optax.chain(optax.identity(), tx)
    message = rf"under optax.{wrapper}, where .* dynamic_loss_scaling\({wrapper}\("
    with pytest.raises(ValueError, match=message):
        dls.loss_scale(tx.init(PARAMS))


@pytest.mark.standard_promotion
@pytest.mark.parametrize("wrapper", HIDDEN)
def test_accepts_the_same_wrapper_inside(wrapper):
    tx = make(HIDDEN[wrapper](optax.sgd(0.1)))
    assert float(dls.loss_scale(tx.init(PARAMS))) == 64.0


def test_two_scalers_are_refused_with_their_places():
    state = {"actor": make().init(PARAMS), "critic": make().init(PARAMS)}
    with pytest.raises(
        ValueError, match=r"2 loss scalers, at \['actor'\], \['critic'\]"
    ):
        dls.loss_scale(state)
    assert float(dls.loss_scale(state["actor"])) == 64.0


def test_a_whole_state_put_where_the_inner_one_belongs_is_refused():
    state = make().init(PARAMS)
    with pytest.raises(ValueError, match="around a loss scaler.*old.inner_state"):
        dls.loss_scale(state._replace(inner_state=state))


@pytest.mark.parametrize("state", [None, 3, 64.0, np.float32(2), jnp.float32(64)])
def test_none_and_numbers_are_refused(state):
    with pytest.raises(TypeError, match="state must be the optimizer state"):
        dls.metrics(state)


@pytest.mark.parametrize("state", [{}, (), PARAMS, "state"])
def test_a_state_without_scaler_is_refused(state):
    with pytest.raises(ValueError, match="state holds no loss scaler"):
        dls.metrics(state)


NEW = {"mean": jnp.array([jnp.nan, 1.0]), "count": jnp.array(4)}
OLD = {"mean": jnp.array([0.5, 0.5]), "count": jnp.array(3)}


class TestRollback:
    @pytest.mark.parametrize("bad", [True, False])
    def test_keeps_the_old_exactly_after_a_skip(self, bad):
        tx = make()
        grads = jax.tree.map(lambda p: p * (jnp.nan if bad else 1.0), PARAMS)
        _, state = tx.update(grads, tx.init(PARAMS), PARAMS)
        kept = jax.jit(dls.rollback_if_skipped)(state, NEW, OLD)
        chex.assert_trees_all_equal(kept, OLD if bad else NEW)
        chex.assert_trees_all_equal_shapes_and_dtypes(kept, OLD)

    def test_a_population_rolls_back_member_by_member(self):
        tx = make()
        params = jnp.zeros((2, 3))
        grads = jnp.zeros((2, 3)).at[1, 0].set(jnp.inf)
        _, state = jax.vmap(tx.update)(grads, jax.vmap(tx.init)(params))
        kept = dls.rollback_if_skipped(state, jnp.ones((2, 2)), jnp.zeros((2, 2)))
        np.testing.assert_array_equal(kept, [[1, 1], [0, 0]])

    def test_random_keys_roll_back_too(self):
        tx = make()
        _, state = tx.update(jnp.array([jnp.inf]), tx.init(jnp.zeros(1)))
        kept = dls.rollback_if_skipped(state, jax.random.key(1), jax.random.key(0))
        assert kept == jax.random.key(0)

    def test_a_copy_that_is_none_is_refused(self):
        """NNX writes batch statistics in place."""
        norm = nnx.BatchNorm(2, rngs=nnx.Rngs(0))
        old = nnx.state(norm, nnx.BatchStat)
        norm(jnp.ones((4, 2)))
        with pytest.raises(ValueError, match="the same arrays.*jnp.copy"):
            dls.rollback_if_skipped(
                make().init(PARAMS), nnx.state(norm, nnx.BatchStat), old
            )

    def test_python_numbers_roll_back(self):
        _, state = make().update(jnp.array([jnp.inf]), make().init(jnp.zeros(1)))
        assert (
            int(dls.rollback_if_skipped(state, {"n": jnp.int32(1)}, {"n": 0})["n"]) == 0
        )

    @pytest.mark.parametrize("new", [jnp.ones(1), jnp.ones(3, jnp.float16)])
    def test_other_shapes_and_dtypes_are_refused_by_name(self, new):
        state = make().init(PARAMS)
        with pytest.raises(ValueError, match=r"equal shapes and dtypes.*at \['mean'\]"):
            dls.rollback_if_skipped(state, {"mean": new}, {"mean": jnp.ones(3)})

    def test_other_trees_are_refused(self):
        state = make().init(PARAMS)
        with pytest.raises(
            ValueError, match="new and old must be trees of one structure"
        ):
            dls.rollback_if_skipped(state, {"a": 1}, {"b": 1})


class TestRaiseIfStalled:
    def stalled(self, steps):
        tx = make()
        state = tx.init(jnp.zeros(1))
        for _ in range(steps):
            _, state = tx.update(jnp.array([jnp.nan]), state)
        return state

    def test_raises_exactly_above_the_limit(self):
        state = self.stalled(3)
        dls.raise_if_stalled(state, max_consecutive_skips=3)
        with pytest.raises(
            dls.LossScaleStalledError, match=r"last 3 steps.*total_skips=3"
        ):
            dls.raise_if_stalled(state, max_consecutive_skips=2)
        assert issubclass(dls.LossScaleStalledError, RuntimeError)

    def test_blames_what_it_knows_to_blame(self):
        tx = dls.static_loss_scaling(optax.sgd(1.0), 2.0**60)
        _, state = tx.update(jnp.array([jnp.inf]), tx.init(jnp.zeros(1)))
        with pytest.raises(
            dls.LossScaleStalledError, match="If the scale is fixed.*lower"
        ):
            dls.raise_if_stalled(state, max_consecutive_skips=0)
        _, state = tx.update(jnp.array([1.0]), tx.init(jnp.zeros(1)), value=jnp.nan)
        with pytest.raises(
            dls.LossScaleStalledError, match="finite, so the loss or the"
        ):
            dls.raise_if_stalled(state, max_consecutive_skips=0)

    def test_speaks_for_any_member(self):
        fine, bad = make().init(jnp.zeros(1)), self.stalled(2)
        both = jax.tree.map(lambda *x: jnp.stack(x), fine, bad)
        with pytest.raises(dls.LossScaleStalledError, match="last 2 steps"):
            dls.raise_if_stalled(both, max_consecutive_skips=1)

    def test_a_traced_state_is_refused(self):
        with pytest.raises(TypeError, match="cannot run inside jit"):
            jax.jit(dls.raise_if_stalled)(self.stalled(0))

    @pytest.mark.parametrize(
        ("limit", "error"), [(-1, ValueError), (1.5, TypeError), (True, TypeError)]
    )
    def test_a_limit_that_is_none_is_refused(self, limit, error):
        with pytest.raises(error, match="max_consecutive_skips must be"):
            dls.raise_if_stalled(self.stalled(0), limit)
