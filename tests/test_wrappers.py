"""The wrappers that most people use: dynamic, static and none."""

import chex
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_dls as dls


def test_trains_where_float16_alone_does_not():
    """A gradient of 2**-26 is zero in float16 and exact once it is scaled."""
    xs = jnp.full(64, 2.0**-6, jnp.float16)

    def loss_fn(w, xs):
        error = (w.astype(jnp.float16) * xs).astype(jnp.float32)
        return jnp.sum(error) * 2.0**-26

    def train(tx):
        @jax.jit
        def step(w, state):
            _, grads = dls.value_and_scaled_grad(loss_fn)(w, xs, state=state)
            updates, state = tx.update(grads, state, w)
            return optax.apply_updates(w, updates), state

        w = jnp.float32(1.0)
        state = tx.init(w)
        for _ in range(5):
            w, state = step(w, state)
        return float(w)

    sgd = optax.sgd(2.0**24)
    assert train(dls.no_loss_scaling(sgd)) == 1.0
    assert train(dls.dynamic_loss_scaling(sgd)) == 1.0 - 5 * 2.0**-2
    assert train(dls.static_loss_scaling(sgd, 2.0**10)) == 1.0 - 5 * 2.0**-2


def test_a_static_scale_skips_and_stays():
    tx = dls.static_loss_scaling(optax.sgd(1.0), 8.0)
    updates, state = tx.update(jnp.array([8.0, jnp.inf]), tx.init(jnp.zeros(2)))
    np.testing.assert_array_equal(updates, [0.0, 0.0])
    assert float(dls.loss_scale(state)) == 8.0
    updates, _ = tx.update(jnp.array([8.0, 4.0]), state)
    np.testing.assert_array_equal(updates, [-1.0, -0.5])


# float16 cannot hold the default ceiling, and optax casts it; see the last test.
@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
@pytest.mark.standard_promotion
class TestInjectHyperparams:
    @pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
    def test_around_the_wrapper_under_jit(self, dtype):
        tx = optax.inject_hyperparams(dls.dynamic_loss_scaling)(
            optax.adam(0.1), init_scale=2.0**10, growth_interval=2
        )
        params = jnp.ones(2, dtype)
        state = jax.jit(tx.init)(params)
        step = jax.jit(tx.update)
        types = jax.tree.map(jax.typeof, state)
        for scale in (2.0**10, 2.0**11, 2.0**11, 2.0**12):
            _, state = step(params, state, params)
            assert float(dls.loss_scale(state)) == scale
        _, state = step(params * jnp.inf, state, params)
        assert float(dls.loss_scale(state)) == 2.0**11
        assert jax.tree.map(jax.typeof, state) == types

    def test_a_schedule_can_drive_a_setting(self):
        tx = optax.inject_hyperparams(
            dls.dynamic_loss_scaling, hyperparam_dtype=jnp.float32
        )(
            optax.sgd(0.1),
            init_scale=8.0,
            growth_interval=1,
            max_scale=optax.piecewise_constant_schedule(16.0, {2: 4.0}),
        )
        params = jnp.ones(1)
        state, scales, update = tx.init(params), [], jax.jit(tx.update)
        for _ in range(5):
            _, state = update(params, state, params)
            scales.append(float(dls.loss_scale(state)))
        assert scales == [16, 16, 32, 64, 64]

    def test_float16_turns_the_start_into_inf_which_stands_for_the_default(self):
        """2**16 is inf in float16: inject_hyperparams casts to the parameters' dtype."""
        inject = optax.inject_hyperparams(dls.dynamic_loss_scaling)
        params = jnp.ones(1, jnp.float16)
        state = inject(optax.sgd(0.1), init_scale=2.0**16).init(params)
        assert float(dls.loss_scale(state)) == 2.0**15
        inject = optax.inject_hyperparams(
            dls.dynamic_loss_scaling, hyperparam_dtype=jnp.float32
        )
        state = inject(optax.sgd(0.1), init_scale=2.0**16).init(params)
        assert float(dls.loss_scale(state)) == 2.0**16


class TestNoLossScaling:
    @pytest.mark.standard_promotion
    def test_is_the_bare_optimizer_bit_for_bit(self):
        bare, tx = optax.adamw(0.1), dls.no_loss_scaling(optax.adamw(0.1))
        params = bare_params = {
            dtype: jnp.linspace(-1, 1, 6, dtype=dtype).reshape(2, 3)
            for dtype in ("float16", "bfloat16", "float32")
        }
        state, bare_state = tx.init(params), bare.init(params)
        update, bare_update = jax.jit(tx.update), jax.jit(bare.update)
        for t in range(5):
            grads = jax.tree.map(lambda p: jnp.sin(p + t).astype(p.dtype), params)  # noqa: B023
            updates, state = update(grads, state, params)
            expected, bare_state = bare_update(grads, bare_state, bare_params)
            chex.assert_trees_all_equal(updates, expected)
            chex.assert_trees_all_equal(state.inner_state, bare_state)
            params = optax.apply_updates(params, updates)
            bare_params = optax.apply_updates(bare_params, expected)
        assert dls.metrics(state) == {
            "loss_scale": 1.0,
            "grads_finite": True,
            "consecutive_skips": 0,
            "total_skips": 0,
        }

    def test_has_no_check_in_its_program(self, make):
        params = jnp.ones(3)
        for tx, has_check in (
            (make(), True),
            (dls.no_loss_scaling(optax.sgd(1.0)), False),
        ):
            program = str(jax.make_jaxpr(tx.update)(params, tx.init(params), params))
            assert ("is_finite" in program) == has_check
            assert ("cond" in program) == has_check

    @pytest.mark.standard_promotion
    def test_takes_integer_parameters_as_the_other_wrappers_do(self):
        tx = dls.no_loss_scaling(optax.sgd(1.0))
        params = {"w": jnp.ones(2), "i": jnp.array([3])}
        grads = {"w": jnp.ones(2), "i": np.zeros(1, jax.dtypes.float0)}
        updates, _ = tx.update(grads, tx.init(params), params)
        params = optax.apply_updates(params, updates)
        assert params["i"].tolist() == [3]
        assert params["w"].tolist() == [0.0, 0.0]

    def test_a_scale_in_its_state_means_nothing(self):
        """Restored from a run with a static scale, or set by hand."""
        tx = dls.no_loss_scaling(optax.sgd(1.0))
        params = jnp.zeros(2)
        set_by_hand = optax.tree.set(tx.init(params), loss_scale=jnp.float32(1024.0))
        saved = flax.serialization.to_bytes(
            dls.static_loss_scaling(optax.sgd(1.0), 1024.0).init(params)
        )
        restored = flax.serialization.from_bytes(tx.init(params), saved)
        for state in (set_by_hand, restored):
            assert float(dls.loss_scale(state)) == 1.0
            _, grads = dls.value_and_scaled_grad(jnp.sum)(params, state=state)
            updates, _ = tx.update(grads, state, params)
            np.testing.assert_array_equal(updates, [-1.0, -1.0])

    @pytest.mark.standard_promotion
    def test_a_run_moves_between_the_wrappers(self, make):
        params = jnp.ones(2)
        off, on = dls.no_loss_scaling(optax.adam(0.1)), make(optax.adam(0.1))
        _, old = off.update(params, off.init(params), params)
        state = on.init(params)._replace(inner_state=old.inner_state)
        _, state = on.update(params, state, params)
        assert int(optax.tree.get(state, "count")) == 2
        back = off.init(params)._replace(inner_state=state.inner_state)
        assert jax.tree.structure(back) == jax.tree.structure(old)  # type: ignore[operator]
