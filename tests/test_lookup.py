"""Reading the scaler out of any state, and acting on a skip."""

import chex
import flax.linen
import flax.serialization
import flax.training.train_state
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint
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


@pytest.mark.parametrize("tx", [make(), optax.sgd(0.1)], ids=["wrapped", "bare"])
def test_the_transformation_itself_is_refused(tx):
    with pytest.raises(TypeError, match="got the transformation itself.*tx.init"):
        dls.metrics(tx)


class Trainer:
    """A training state that JAX cannot look into."""

    def __init__(self, opt_state):
        self.step, self.opt_state = 3, opt_state


class TestAStateWithoutScaler:
    @pytest.mark.parametrize("state", [{}, (), PARAMS, "state", {"ema": 0.5}])
    def test_is_refused_with_what_state_means(self, state):
        cure = "no loss scaler: found no LossScalingState.*Wrap the opt.*by position"
        with pytest.raises(ValueError, match=cure):
            dls.metrics(state)

    @pytest.mark.parametrize("library", ["flax", "orbax"])
    def test_of_a_checkpoint_without_structure_wants_it_restored_into_one(
        self, library, tmp_path
    ):
        tx = make(optax.adam(0.1))
        template = {"step": 3, "opt_state": tx.init(PARAMS)}
        if library == "flax":
            data = flax.serialization.to_bytes(template)
            without = flax.serialization.msgpack_restore(data)
            state = flax.serialization.from_bytes(template, data)
        else:
            with orbax.checkpoint.StandardCheckpointer() as checkpointer:
                checkpointer.save(tmp_path / "saved", template)
                checkpointer.wait_until_finished()
                without = checkpointer.restore(tmp_path / "saved")
                template["opt_state"] = jax.eval_shape(tx.init, PARAMS)
                state = checkpointer.restore(tmp_path / "saved", template)
        with pytest.raises(
            ValueError,
            match=r"a dict of its values \(state\['opt_state'\]\['scaler'\]\).*"
            r"Restore it into that of tx.init\(params\)",
        ):
            dls.loss_scale(without)
        assert float(dls.loss_scale(state)) == 64.0

    @pytest.mark.standard_promotion
    def test_of_a_bare_optimizer_goes_under_one(self):
        tx, bare = make(optax.adam(0.1)), optax.adam(0.1).init(PARAMS)
        with pytest.raises(
            ValueError,
            match=r"state\['opt'\]\[0\] is the ScaleByAdamState of an optimizer without "
            r"one.*goes on from tx.init\(params\)._replace\(inner_state=old_state\)",
        ):
            dls.loss_scale({"opt": bare})
        state = tx.init(PARAMS)._replace(inner_state=bare)
        _, state = tx.update(PARAMS, state, PARAMS)
        assert float(dls.loss_scale(state)) == 64.0

    def test_that_jax_can_see_says_where_it_is(self):
        trainer = Trainer(make().init(PARAMS))
        with pytest.raises(
            ValueError, match=r"Trainer is no pytree.*state.opt_state\."
        ):
            dls.loss_scale(trainer)
        with pytest.raises(ValueError, match=r"state\['run'\].opt_state\."):
            dls.loss_scale({"run": trainer, "step": 3})
        assert float(dls.loss_scale(trainer.opt_state)) == 64.0
        with pytest.raises(ValueError, match="no LossScalingState in Trainer"):
            dls.loss_scale(Trainer(None))


class TestTheStateOfAnother:
    """Optimizer or model: the inner optimizer's own error does not say so."""

    def update(self, state, params=PARAMS):
        tx = make(optax.sgd(0.1, momentum=0.9))
        return tx.update(jax.tree.map(jnp.ones_like, PARAMS), state, params)

    @pytest.mark.parametrize("params", [PARAMS, None])
    @pytest.mark.parametrize(
        ("other", "difference"),
        [
            ({"w": jnp.ones((3, 2)), "b": jnp.ones(2)}, r"\['w'\] has shape \(3, 2\)"),
            ({"w": jnp.ones((2, 2)), "b": jnp.ones(1)}, r"\['b'\] has shape \(1,\)"),
            ({"kernel": jnp.ones((2, 2))}, r"it has no state.inner_state.*\['b'\]"),
            (PARAMS | {"k": jnp.ones(2)}, r"makes no state.inner_state.*\['k'\]"),
        ],
        ids=["shape", "shape that broadcasts", "names", "one too many"],
    )
    def test_model_is_told_by_its_first_leaf(self, other, difference, params):
        state = make(optax.sgd(0.1, momentum=0.9)).init(other)
        with pytest.raises(ValueError, match=rf"{difference}.*swapped") as error:
            self.update(state, params)
        assert error.value.__cause__ is not None

    def test_optimizer_is_told_too(self):
        with pytest.raises(ValueError, match=r"it has no state.inner_state\[0\].trace"):
            self.update(make(optax.scale_by_schedule(lambda step: 1.0)).init(PARAMS))

    def test_is_not_blamed_for_an_error_of_the_optimizer(self):
        def update(updates, state, params=None):
            raise KeyError("its own")

        tx = make(optax.GradientTransformation(optax.sgd(0.1).init, update))
        with pytest.raises(KeyError, match="its own"):
            tx.update(PARAMS, tx.init(PARAMS), PARAMS)

    def test_is_not_blamed_where_init_cannot_be_traced(self):
        def update(updates, state, params=None):
            raise KeyError("its own")

        def init(params):
            return float(jax.tree.leaves(params)[0].sum())

        tx = make(optax.GradientTransformation(init, update))
        with pytest.raises(KeyError, match="its own"):
            tx.update(PARAMS, tx.init(PARAMS), PARAMS)


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

    @pytest.mark.parametrize("cause", ["value", "updates"])
    def test_keeps_the_old_too_where_the_gradients_were_finite(self, cause):
        """The loss was not finite, or what the optimizer made of them."""
        to_nan = optax.stateless(lambda u, p: jax.tree.map(lambda x: x * jnp.nan, u))
        inner = to_nan if cause == "updates" else optax.sgd(0.1)
        tx = dls.dynamic_loss_scaling(inner, check_updates=cause == "updates")
        value = {"value": jnp.nan} if cause == "value" else {}
        _, state = tx.update(PARAMS, tx.init(PARAMS), PARAMS, **value)
        assert dls.metrics(state)["grads_finite"]
        chex.assert_trees_all_equal(dls.rollback_if_skipped(state, NEW, OLD), OLD)

    def test_a_population_rolls_back_member_by_member(self):
        tx = make()
        params = jnp.zeros((2, 3))
        grads = jnp.zeros((2, 3)).at[1, 0].set(jnp.inf)
        _, state = jax.jit(jax.vmap(tx.update))(grads, jax.vmap(tx.init)(params))
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
