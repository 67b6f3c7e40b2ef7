"""Calls of ``tx.update`` outside of jit: compiled once, whatever the extra arguments are."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_dls as dls


class TestCompilations:
    @pytest.mark.parametrize(
        "extra",
        [
            {},
            {"value": jnp.float32(1.0)},
            {"value": np.array(1.0, np.float32)},
            {"value": np.float32(1.0)},
            {"value": 1.0},
            {"value": 1},
            {"value": None},
            {"aux": {"a": jnp.ones(2), "b": (jnp.ones(1), None)}},
            {"aux": (np.ones(2), "text", True)},
        ],
        ids=str,
    )
    def test_a_second_call_compiles_nothing(self, extra, caplog):
        tx = dls.dynamic_loss_scaling(optax.sgd(0.5))
        params, grads = jnp.ones(2), jnp.ones(2)
        _, state = tx.update(grads, tx.init(params), params, **extra)
        with jax.log_compiles():
            tx.update(grads, state, params, **extra)
        compiled = [record.getMessage() for record in caplog.records]
        assert not [text for text in compiled if text.startswith("Compiling")]

    def test_the_count_of_compilations_sees_one(self, caplog):
        with jax.log_compiles():
            jax.jit(lambda x: x * 3)(jnp.ones(2))
        assert [r for r in caplog.records if r.getMessage().startswith("Compiling")]


def optimizer_with(update):
    return optax.GradientTransformationExtraArgs(lambda params: (), update)


class TestWhatTheOptimizerSees:
    def test_a_flag_decides_in_python(self):
        def update(updates, state, params=None, *, double):
            return (2 * updates if double else updates), state

        tx = dls.static_loss_scaling(optimizer_with(update), 1.0)
        for double, expected in ((True, 2.0), (False, 1.0)):
            updates, _ = tx.update(jnp.ones(1), tx.init(jnp.ones(1)), double=double)
            assert updates == expected

    def test_a_function_that_closes_over_new_data_is_not_remembered(self):
        def update(updates, state, params=None, *, fn):
            return fn(updates), state

        tx = dls.static_loss_scaling(optimizer_with(update), 1.0)
        state, data = tx.init(jnp.ones(1)), [1.0]

        def fn(updates):
            return updates * data[0]

        assert tx.update(jnp.ones(1), state, fn=fn)[0] == 1.0
        data[0] = 3.0
        assert tx.update(jnp.ones(1), state, fn=fn)[0] == 3.0


class TestFunctionsAmongTheParameters:
    """An Equinox model as it is: its activation functions are leaves."""

    def setup_method(self):
        self.params = {"w": jnp.ones(2), "activation": jax.nn.relu, "name": "dense"}
        self.grads = {"w": jnp.ones(2), "activation": None, "name": None}

    @pytest.mark.standard_promotion
    @pytest.mark.parametrize("inner", [optax.sgd(0.5), optax.adamw(0.5)])
    def test_they_are_left_out(self, inner):
        tx = dls.static_loss_scaling(inner, 8.0)
        state = tx.init(self.params)
        scaled = {**self.grads, "w": 8 * self.grads["w"]}
        updates, state = tx.update(scaled, state, self.params)
        arrays = {**self.params, "activation": None, "name": None}
        expected, _ = inner.update(self.grads, inner.init(arrays), arrays)
        assert updates["activation"] is None
        np.testing.assert_allclose(updates["w"], expected["w"], rtol=1e-6)
