"""The loss side: true values, scaled gradients, and half-written loops."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import optax_dls as dls

SCALE = 1024.0


def state_of(scale=SCALE):
    return dls.static_loss_scaling(optax.sgd(1.0), scale).init(jnp.zeros(()))


def quadratic(w, x):
    return jnp.sum((w * x) ** 2)


W, X = jnp.array([1.0, 2.0]), jnp.array([3.0, 0.5])


class TestValueAndScaledGrad:
    def test_gives_the_true_value_and_the_scaled_gradient(self):
        value, grads = dls.value_and_scaled_grad(quadratic)(W, X, state=state_of())
        true_value, true_grads = jax.value_and_grad(quadratic)(W, X)
        assert value == true_value
        np.testing.assert_array_equal(grads, SCALE * true_grads)

    def test_takes_argnums_aux_and_keyword_arguments(self):
        def loss_fn(w, x, *, offset):
            loss = quadratic(w, x) + offset
            return loss, {"loss": loss, "note": x}

        grad_fn = dls.value_and_scaled_grad(loss_fn, argnums=(0, 1), has_aux=True)
        (value, aux), grads = grad_fn(W, X, offset=1.0, state=state_of())
        assert value == aux["loss"] == quadratic(W, X) + 1.0
        assert len(grads) == 2
        np.testing.assert_array_equal(grads[1], SCALE * jax.grad(quadratic, 1)(W, X))

    def test_takes_a_list_of_argnums_and_negative_ones(self):
        for argnums in (1, -1, [1]):
            _, grads = dls.value_and_scaled_grad(quadratic, argnums)(
                W, X, state=state_of()
            )
            expected = jax.grad(lambda x, w: quadratic(w, x))(X, W)
            np.testing.assert_array_equal(jax.tree.leaves(grads)[0], SCALE * expected)

    def test_the_value_is_right_where_the_scaled_one_overflows(self):
        state = state_of(2.0**126)
        value, _ = dls.value_and_scaled_grad(lambda w: 1e4 * w)(
            jnp.float32(1), state=state
        )
        assert float(value) == 1e4

    def test_goes_through_jit_vmap_remat_and_second_order(self):
        grad_fn = dls.value_and_scaled_grad(jax.checkpoint(quadratic))
        state = state_of()
        _, expected = grad_fn(W, X, state=state)
        _, grads = jax.jit(grad_fn)(W, X, state=state)
        np.testing.assert_array_equal(grads, expected)
        _, grads = jax.vmap(functools.partial(grad_fn, state=state), (None, 0))(
            W, jnp.stack([X, X])
        )
        np.testing.assert_array_equal(grads, jnp.stack([expected, expected]))
        hessian = jax.jacfwd(lambda w: grad_fn(w, X, state=state)[1])(W)
        np.testing.assert_array_equal(hessian, SCALE * jnp.diag(2 * X**2))

    def test_adds_one_multiplication_each_way(self):
        """It has no opinion on the dtypes inside the model.

        https://github.com/Data-Science-in-Mechanical-Engineering/mixed_precision_for_JAX/issues/3
        """

        def operations(value_and_grad_fn):
            jaxpr = jax.make_jaxpr(value_and_grad_fn)(W)
            return collections.Counter(eqn.primitive.name for eqn in jaxpr.eqns)

        state = state_of()
        bare = jax.value_and_grad(lambda w: (quadratic(w, X), None), has_aux=True)
        ours = functools.partial(dls.value_and_scaled_grad(quadratic), x=X, state=state)
        assert operations(ours) - operations(bare) == {"mul": 2}

    def test_keeps_the_name_and_docstring_of_the_loss_function(self):
        assert dls.value_and_scaled_grad(quadratic).__name__ == "quadratic"
        dls.value_and_scaled_grad(functools.partial(quadratic, x=X))(
            W, state=state_of()
        )

    def test_missing_state_is_an_error_and_never_a_scale_of_one(self):
        with pytest.raises(TypeError, match=r"state= is missing.*state=opt_state"):
            dls.value_and_scaled_grad(quadratic)(W, X)

    @pytest.mark.parametrize("number", [1024.0, 3, np.float32(8)])
    def test_a_number_is_no_state(self, number):
        with pytest.raises(
            TypeError, match="Not a number: a scale kept apart goes stale"
        ):
            dls.value_and_scaled_grad(quadratic)(W, X, state=number)

    def test_a_state_without_a_scaler_is_refused_with_the_cure(self):
        state = optax.adam(0.1).init(W)
        with pytest.raises(
            ValueError, match="state holds no loss scaler.*Wrap the optim"
        ):
            dls.value_and_scaled_grad(quadratic)(W, X, state=state)

    @pytest.mark.parametrize(
        ("loss_fn", "has_aux", "error", "message"),
        [
            (lambda w: w, False, ValueError, r"loss must be a scalar.*shape \(2,\)"),
            (
                lambda w: w[:1],
                False,
                ValueError,
                r"loss must be a scalar.*shape \(1,\)",
            ),
            (lambda w: jnp.int32(3), False, TypeError, "loss must be a real.*int32"),
            (lambda w: True, False, TypeError, "loss must be a real.*bool"),
            (
                lambda w: jnp.sum(w) * 1j,
                False,
                TypeError,
                "loss must be a real.*complex64",
            ),
            (lambda w: (jnp.sum(w), 1), False, TypeError, "pass has_aux=True"),
            (lambda w: jnp.sum(w), True, TypeError, r"return a pair \(loss, aux\)"),
            (
                lambda w: None,
                False,
                TypeError,
                "got NoneType. Does the loss function ret",
            ),
        ],
    )
    @pytest.mark.standard_promotion
    def test_a_loss_that_is_none_is_refused(self, loss_fn, has_aux, error, message):
        with pytest.raises(error, match=message):
            dls.value_and_scaled_grad(loss_fn, has_aux=has_aux)(W, state=state_of())

    @pytest.mark.parametrize(
        "argnums", [optax.sgd(0.1), W, {"w": W}, "w", 1.5, True, (0, optax.sgd(0.1))]
    )
    def test_anything_but_positions_is_refused_as_argnums(self, argnums):
        with pytest.raises(
            TypeError, match=r"argnums must be.*\(params, batch, state="
        ):
            dls.value_and_scaled_grad(quadratic, argnums)

    def test_an_optimizer_is_no_argnums_of_another_framework_either(self):
        with pytest.raises(TypeError, match="argnums must be"):
            dls.value_and_scaled_grad(
                quadratic, optax.sgd(0.1), value_and_grad=nnx.value_and_grad
            )

    def test_a_selection_of_another_framework_goes_through(self):
        model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
        kernel = nnx.PathContains("kernel")
        _, grads = dls.value_and_scaled_grad(
            lambda model: jnp.sum(model(X[None])),
            nnx.DiffState(0, kernel),  # type: ignore[arg-type]
            value_and_grad=nnx.value_and_grad,
        )(model, state=state_of())
        assert list(grads) == ["kernel"]
        np.testing.assert_array_equal(grads["kernel"][...][:, 0], SCALE * X)

    @pytest.mark.parametrize(
        ("args", "argnums", "message"),
        [
            ((W, {"relu": jax.nn.relu}), 1, r"args\[1\]\['relu'\].*custom_jvp"),
            ((W, [X, X > 0]), -1, r"args\[1\]\[1\] has no gradient.*bool\[2\]"),
            ((3, X), (0, 1), r"args\[0\] has no gradient.*int32"),
        ],
    )
    def test_arguments_without_a_gradient_are_refused(self, args, argnums, message):
        with pytest.raises(TypeError, match=f"{message}.*eqx.filter_value_and_grad"):
            dls.value_and_scaled_grad(quadratic, argnums)(*args, state=state_of())

    def test_integer_parameters_with_allow_int(self):
        _, grads = dls.value_and_scaled_grad(
            lambda p: jnp.sum(p["w"] ** 2),
            value_and_grad=functools.partial(jax.value_and_grad, allow_int=True),
        )({"w": W, "step": jnp.array(3)}, state=state_of())
        np.testing.assert_array_equal(grads["w"], SCALE * 2 * W)
        assert grads["step"].dtype == jax.dtypes.float0

    def test_the_scales_of_a_population_are_refused(self):
        tx = dls.static_loss_scaling(optax.sgd(1.0), 8.0)
        states = jax.vmap(tx.init)(jnp.zeros(3))
        with pytest.raises(ValueError, match=r"shape \(3,\).*jax.vmap"):
            dls.value_and_scaled_grad(quadratic)(W, X, state=states)

    def test_a_value_in_place_of_the_function_is_refused(self):
        with pytest.raises(TypeError, match="fun must be a loss function"):
            dls.value_and_scaled_grad(quadratic(W, X))


class TestALossWithAnArgumentNamedState:
    """As Haiku and Equinox have it, for batch statistics."""

    @staticmethod
    def loss_fn(w, state, x):
        return quadratic(w, x + state["mean"])

    expected = SCALE * jax.grad(quadratic)(W, X + 1.0)

    @pytest.mark.parametrize("bind", [False, True])
    def test_its_own_goes_positionally_or_bound(self, bind):
        own = {"mean": jnp.ones(2)}
        if bind:
            grad_fn = dls.value_and_scaled_grad(
                functools.partial(self.loss_fn, state=own)
            )
            _, grads = grad_fn(W, x=X, state=state_of())
        else:
            grad_fn = dls.value_and_scaled_grad(self.loss_fn)
            _, grads = grad_fn(W, own, X, state=state_of())
        np.testing.assert_array_equal(grads, self.expected)

    @pytest.mark.parametrize(
        ("args", "state", "error", "message"),
        [
            ((W,), {"mean": 1.0}, ValueError, "holds no loss scaler.*"),
            ((W,), X, TypeError, "must be the optimizer state.*"),
            ((W,), state_of(), TypeError, "fun has not got its own argument state. "),
        ],
    )
    def test_its_own_in_the_place_of_ours(self, args, state, error, message):
        message += "The keyword state= is taken.* positionally, or is bound by"
        with pytest.raises(error, match=message):
            dls.value_and_scaled_grad(self.loss_fn)(*args, x=X, state=state)

    def test_one_with_a_default_may_be_left_out(self):
        def loss_fn(w, x, state=None):
            return quadratic(w, x) if state is None else jnp.nan

        loss, _ = dls.value_and_scaled_grad(loss_fn)(W, X, state=state_of())
        assert loss == quadratic(W, X)


class TestScaleLoss:
    def test_swapped_arguments_are_refused(self):
        with pytest.raises(TypeError, match="loss must be a real scalar|state must be"):
            dls.scale_loss(state_of(), jnp.float32(1.0))
        with pytest.raises(TypeError, match="got LossScalingState"):
            dls.scale_loss(state_of(), state_of())

    def test_the_scales_of_a_population_are_refused(self):
        tx = dls.static_loss_scaling(optax.sgd(1.0), 8.0)
        states = jax.vmap(tx.init)(jnp.zeros(3))
        with pytest.raises(ValueError, match=r"shape \(3,\).*jax.vmap"):
            dls.scale_loss(jnp.float32(1.0), states)

    def test_no_scaling_warns_of_nothing(self):
        state = dls.no_loss_scaling(optax.sgd(1.0)).init(W)
        assert float(dls.scale_loss(jnp.float16(3.0), state)) == 3.0

    @pytest.mark.parametrize(
        ("dtype", "expected"), [("bfloat16", "float32"), ("float32", "float32")]
    )
    def test_multiplies_in_at_least_float32(self, dtype, expected):
        scaled = dls.scale_loss(jnp.asarray(3.0, dtype), state_of(2.0**20))
        assert scaled.dtype == expected
        assert float(scaled) == 3 * 2.0**20

    def test_float64_stays(self):
        with jax.enable_x64(True):
            scaled = dls.scale_loss(jnp.float64(1e300), state_of(4.0))
            assert scaled.dtype == jnp.float64
            assert float(scaled) == 4e300

    def test_a_float16_loss_is_scaled_in_float32_with_a_warning(self):
        with pytest.warns(UserWarning, match=r"float16.*Return loss.astype"):
            scaled = dls.scale_loss(jnp.float16(3.0), state_of(2.0**20))
        assert scaled.dtype == jnp.float32
        assert float(scaled) == 3 * 2.0**20

    def test_the_hand_written_loop_equals_the_helper(self):
        state = state_of()
        grads = jax.grad(lambda w: dls.scale_loss(quadratic(w, X), state))(W)
        _, expected = dls.value_and_scaled_grad(quadratic)(W, X, state=state)
        np.testing.assert_array_equal(grads, expected)


class TestUnscale:
    def test_the_scales_of_a_population_are_refused_outside_vmap(self):
        tx = dls.static_loss_scaling(optax.sgd(1.0), 8.0)
        states = jax.vmap(tx.init)(jnp.zeros(2))
        states = optax.tree.set(states, loss_scale=jnp.array([2.0, 4.0]))
        grads = jnp.array([[2.0, 2.0], [4.0, 4.0]])
        with pytest.raises(ValueError, match=r"shape \(2,\).*jax.vmap"):
            dls.unscale(grads, states)
        np.testing.assert_array_equal(jax.vmap(dls.unscale)(grads, states), 1.0)

    def test_divides_in_float32(self):
        grads = dls.unscale(jnp.array([6.55e-4], jnp.float16), state_of(2.0**16))
        assert grads.dtype == jnp.float32
        np.testing.assert_allclose(grads, [9.997e-9], rtol=1e-3)

    def test_a_norm_of_half_precision_gradients_is_right_once_unscaled(self):
        """https://github.com/AI-Hypercomputer/maxtext/pull/5143"""
        grads = dls.unscale(jnp.full(300, 300, jnp.bfloat16), state_of(1.0))
        np.testing.assert_allclose(optax.tree.norm(grads), 5196.15, rtol=1e-6)

    def test_leaves_alone_what_is_no_float(self):
        grads = {
            "none": None,
            "int": jnp.array([3]),
            "float0": np.zeros(2, jax.dtypes.float0),
            "complex": jnp.array([8 + 16j], jnp.complex64),
            "python": 16.0,
        }
        unscaled = dls.unscale(grads, state_of(8.0))
        assert unscaled["none"] is None
        assert unscaled["int"].dtype == jnp.int32
        assert unscaled["float0"].dtype == jax.dtypes.float0
        assert unscaled["complex"].dtype == jnp.complex64
        assert unscaled["complex"][0] == 1 + 2j
        assert float(unscaled["python"]) == 2.0

    @pytest.mark.parametrize("scale", [2.0**-100, 2.0**-14, 1.0, 2.0**32, 2.0**126])
    def test_a_power_of_two_goes_through_exactly(self, scale):
        state = state_of(scale)
        grads = jnp.array([1.0, -3.0, 1e-3], jnp.float32)
        scaled = grads * dls.loss_scale(state)
        np.testing.assert_array_equal(dls.unscale(scaled, state), grads)

    def test_float64_is_unscaled_in_float64(self):
        with jax.enable_x64(True):
            unscaled = dls.unscale(jnp.float64(1e100), state_of(1000.0))
            assert unscaled.dtype == jnp.float64
            np.testing.assert_allclose(unscaled, 1e97, rtol=1e-15)
