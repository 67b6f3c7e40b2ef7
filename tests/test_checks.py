"""Arguments that cannot be right are refused with a word on what to do instead."""

import jax
import jax.numpy as jnp
import optax
import pytest

import optax_dls as dls


def test_the_cure_for_a_list_is_a_chain():
    with pytest.raises(TypeError, match="optax.chain"):
        dls.dynamic_loss_scaling([optax.clip(1.0), optax.sgd(1.0)])


def test_a_missing_init_is_named(make):
    with pytest.raises(TypeError, match=r"Call state = tx.init\(params\) first"):
        make().update(jnp.ones(1), None)


@pytest.mark.parametrize("inner", [optax.adam, None, 1e-3, "adam"])
def test_an_inner_that_is_no_transformation_is_refused(inner):
    with pytest.raises(TypeError, match="inner must be an optax.GradientTrans"):
        dls.dynamic_loss_scaling(inner)


def test_check_updates_must_be_bool(make):
    with pytest.raises(TypeError, match="check_updates must be True or False"):
        make(check_updates=1)


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (jnp.ones(3), ValueError),
        ((jnp.ones(()), {}), TypeError),
        ("loss", TypeError),
    ],
)
def test_a_value_that_is_no_loss_is_refused(make, value, error):
    tx = make()
    with pytest.raises(error, match="value must be the true loss, a scalar"):
        tx.update(jnp.ones(1), tx.init(jnp.ones(1)), value=value)


@pytest.mark.parametrize("axis_name", [3, ("d", 0), 1.5])
def test_an_axis_name_that_is_a_number_is_refused(make, axis_name):
    with pytest.raises(TypeError, match="axis_name must be the name of a mapped axis"):
        make(axis_name=axis_name)


def test_a_state_of_another_wrapper_is_refused_with_the_way_over():
    sgd = optax.sgd(1.0)
    wrappers = [
        dls.dynamic_loss_scaling(sgd),
        dls.static_loss_scaling(sgd, 8.0),
        dls.no_loss_scaling(sgd),
    ]
    for tx in wrappers:
        for other in wrappers:
            state = other.init(jnp.ones(1))
            if tx is other:
                jax.eval_shape(tx.update, jnp.ones(1), state)
                continue
            with pytest.raises(TypeError, match="from the init of this very transf"):
                tx.update(jnp.ones(1), state)


@pytest.mark.standard_promotion
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_moments_are_refused_with_the_cast(make, dtype):
    adam, params = optax.adam(1e-3), {"w": jnp.ones(2, dtype)}
    tx, old_state = make(adam), adam.init(params)
    state = tx.init(params)._replace(inner_state=old_state)
    with pytest.raises(TypeError, match=rf"\['w'\] must be float32, got {dtype}"):
        tx.update(params, state, params)
    cast = jax.tree.map(
        lambda old, new: old.astype(new.dtype),
        old_state,
        tx.init(params).inner_state,
    )
    state = state._replace(inner_state=cast)
    jax.eval_shape(tx.update, params, state, params)
    # What the user asked for in so many words is another matter, and so are scalars.
    injected = make(optax.inject_hyperparams(optax.adam)(learning_rate=0.1))
    state = injected.init(params)
    for rate in (1, 0.05, jnp.float16(0.1)):
        state.inner_state.hyperparams["learning_rate"] = rate
        jax.eval_shape(injected.update, params, state, params)
    tx = make(optax.adam(1e-3, mu_dtype=dtype))
    jax.eval_shape(tx.update, params, tx.init(params), params)


@pytest.mark.standard_promotion
def test_a_state_without_scaler_is_refused_with_the_way_in(make):
    tx = make(optax.adam(0.1))
    params = jnp.ones(1)
    old = optax.adam(0.1).init(params)
    with pytest.raises(TypeError, match=r"_replace\(inner_state=old_state\)"):
        tx.update(params, old, params)
    state = tx.init(params)._replace(inner_state=old)
    jax.eval_shape(tx.update, params, state, params)


def test_a_scaler_around_a_scaler_is_refused(make):
    with pytest.raises(ValueError, match="already holds a loss scaler"):
        make(optax.chain(make())).init(jnp.zeros(1))
