"""Retries in Linen, NNX and Equinox: their models, and the state that a loss writes."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import optax_dls as dls

RETRIES = 20
pytestmark = pytest.mark.standard_promotion


def make(init_scale=2.0**15):
    rule = dls.rules.retrying(dls.rules.dynamic(init_scale=init_scale))
    return dls.loss_scaling(optax.sgd(1.0), rule)


def test_linen_goes_on_with_the_train_state_that_comes_back():
    model = nn.Dense(1, dtype=jnp.float16)
    x = jnp.full((2, 3), 8.0)
    params = model.init(jax.random.key(0), x)
    state = TrainState.create(apply_fn=model.apply, params=params, tx=make())

    def loss_fn(params):
        return jnp.sum(state.apply_fn(params, x).astype(jnp.float32))

    grad_fn = dls.value_and_scaled_grad(loss_fn, max_retries=RETRIES)
    _, grads, state = grad_fn(state.params, state=state)
    new = state.apply_gradients(grads=grads)
    change = new.params["params"]["kernel"] - params["params"]["kernel"]
    np.testing.assert_allclose(change, np.full((3, 1), -16.0))
    assert dls.metrics(new)["total_skips"] == 0
    assert optax.tree.get(new.opt_state, "total_retries") == 4


def test_linen_keeps_the_float8_state_that_comes_as_a_gradient():
    model = nn.Dense(8, dtype=jnp.float16, dot_general_cls=nn.Fp8DirectDotGeneralOp)
    x = jax.random.normal(jax.random.key(0), (16, 16))
    variables = model.init(jax.random.key(1), x)

    def loss_fn(variables):
        return 8 * jnp.mean(model.apply(variables, x).astype(jnp.float32) ** 2)

    def grads_at(init_scale):
        state = make(init_scale).init(variables["params"])
        grad_fn = dls.value_and_scaled_grad(loss_fn, max_retries=RETRIES)
        _, grads, state = jax.jit(lambda s: grad_fn(variables, state=s))(state)
        retries = int(optax.tree.get(state, "pending_retries"))
        return retries, grads, dls.unscale(grads, state)

    retries, grads, unscaled = grads_at(2.0**24)
    assert retries > 0
    # The same at the scale of the last attempt, which fits at once.
    no_retries, expected, expected_unscaled = grads_at(2.0 ** (24 - retries))
    assert no_retries == 0
    state = "_overwrite_with_gradient"
    jax.tree.map(np.testing.assert_array_equal, grads[state], expected[state])
    jax.tree.map(np.testing.assert_array_equal, unscaled[state], expected[state])
    jax.tree.map(np.testing.assert_array_equal, unscaled, expected_unscaled)


class Noisy(nnx.Module):
    """A layer that is tied to another, with everything that a forward pass writes."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(4, 4, dtype=jnp.float16, rngs=rngs)
        self.tied = self.linear
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)

    def __call__(self, x):
        hidden = self.norm(self.dropout(self.tied(self.linear(x))))
        return hidden.astype(jnp.float32)


class TestNNX:
    x = jnp.linspace(-3.0, 3.0, 32).reshape(8, 4)

    @pytest.mark.parametrize("transform", [lambda fn: fn, nnx.jit])
    def test_a_module_as_it_is(self, transform):
        model = nnx.Linear(4, 1, dtype=jnp.float16, rngs=nnx.Rngs(0))
        before = jnp.copy(model.kernel[...])
        optimizer = nnx.Optimizer(model, make(), wrt=nnx.Param)

        @transform
        def train_step(model, optimizer):
            def loss_fn(model):
                return jnp.sum(model(jnp.full((2, 4), 8.0)).astype(jnp.float32))

            _, grads, retried = dls.value_and_scaled_grad(
                loss_fn, value_and_grad=nnx.value_and_grad, max_retries=RETRIES
            )(model, state=optimizer)
            nnx.update(optimizer, nnx.state(retried))
            optimizer.update(model, grads)

        train_step(model, optimizer)
        np.testing.assert_allclose(model.kernel[...] - before, np.full((4, 1), -16.0))
        assert dls.loss_scale(optimizer) == 2.0**11

    def test_what_the_forward_pass_writes_is_that_of_one_attempt(self):
        """Each attempt draws the same dropout mask and starts from the same statistics."""

        def after(init_scale, max_retries):
            model = Noisy(nnx.Rngs(0))
            grad_fn = dls.value_and_scaled_grad(
                lambda model: 100 * jnp.mean(model(self.x) ** 3),
                value_and_grad=nnx.value_and_grad,
                max_retries=max_retries,
            )

            @nnx.jit
            def gradient(model, state):
                loss, grads, *retried = grad_fn(model, state=state)
                return loss, dls.unscale(grads, state), retried

            loss, grads, retried = gradient(model, make(init_scale).init(()))
            written = nnx.state(model, nnx.Not(nnx.RngKey))
            return (loss, grads, written), retried

        fresh = nnx.state(Noisy(nnx.Rngs(0)), nnx.BatchStat)
        retried, (state,) = after(2.0**24, RETRIES)
        retries = int(optax.tree.get(state, "pending_retries"))
        assert retries > 1
        at_once, _ = after(2.0 ** (24 - retries), None)
        jax.tree.map(np.testing.assert_array_equal, retried, at_once)
        state = retried[-1]
        assert int(state["dropout"]["rngs"]["count"][...]) == 1
        mean, fresh_mean = state["norm"]["mean"][...], fresh["norm"]["mean"][...]
        assert not np.array_equal(jnp.asarray(mean), jnp.asarray(fresh_mean))

    def test_the_loop_carries_only_variables_that_are_written(self):
        """Parameters in it would be copied in each step."""
        model = nnx.Linear(4, 1, rngs=nnx.Rngs(0))
        grad_fn = dls.value_and_scaled_grad(
            lambda model: jnp.sum(model(self.x)),
            value_and_grad=nnx.value_and_grad,
            max_retries=RETRIES,
        )
        state = make().init(())
        program = jax.make_jaxpr(lambda state: grad_fn(model, state=state))(state)
        (loop,) = (eqn for eqn in program.eqns if eqn.primitive.name == "while")
        names = ["attempts", "grads_finite", "loss_finite", "loss", "kernel", "bias"]
        assert len(loop.outvars) == len(names)

    def test_variables_that_the_loss_adds_are_refused(self):
        class Adding(nnx.Module):
            def __init__(self):
                self.w = nnx.Param(jnp.ones(()))

            def __call__(self):
                self.seen = nnx.Intermediate(self.w[...])
                return self.w[...] ** 2

        with pytest.raises(ValueError, match="With max_retries.*but not add.*as aux"):
            dls.value_and_scaled_grad(
                lambda model: model(), value_and_grad=nnx.value_and_grad, max_retries=1
            )(Adding(), state=make().init(()))

    def test_the_functional_form_keeps_what_it_returns(self):
        """What the loss writes into a merged module is lost, unless it comes out as aux."""
        model = Noisy(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, make(), wrt=nnx.Param)

        @nnx.jit
        def train_step(model, optimizer):
            graphdef, params, rest = nnx.split(model, nnx.Param, ...)  # type: ignore[misc]

            def loss_fn(params):
                model = nnx.merge(graphdef, params, rest, copy=True)
                loss = 100 * jnp.mean(model(self.x) ** 3)
                return loss, nnx.state(model, nnx.Not(nnx.Param))

            (_, written), grads, retried = dls.value_and_scaled_grad(
                loss_fn, has_aux=True, max_retries=RETRIES
            )(params, state=optimizer)
            nnx.update(model, written)
            nnx.update(optimizer, nnx.state(retried))
            optimizer.update(model, grads)

        train_step(model, optimizer)
        assert int(model.dropout.rngs.count[...]) == 1
        assert dls.metrics(optimizer)["total_skips"] == 0


# Until the lower bound is above Equinox 0.13.0 and JAX 0.8, where the import warns.
@pytest.mark.filterwarnings("ignore:jax.interpreters.batching.NotMapped")
def test_equinox_models_with_functions_among_their_leaves():
    import equinox as eqx

    model = eqx.nn.MLP(4, 1, 8, 1, key=jax.random.key(0))

    def loss_fn(model):
        hidden = jax.vmap(model)(jnp.ones((2, 4))).astype(jnp.float16)
        return 8 * jnp.sum(hidden.astype(jnp.float32))

    state = make().init(())
    grad_fn = dls.value_and_scaled_grad(
        loss_fn, value_and_grad=eqx.filter_value_and_grad, max_retries=RETRIES
    )
    loss, grads, state = eqx.filter_jit(lambda m, s: grad_fn(m, state=s))(model, state)
    expected_loss, expected = eqx.filter_value_and_grad(loss_fn)(model)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    assert int(optax.tree.get(state, "pending_retries")) == 3
    unscaled = dls.unscale(grads, state)
    assert jax.tree.structure(unscaled) == jax.tree.structure(expected)  # type: ignore[operator]
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3), unscaled, expected
    )
