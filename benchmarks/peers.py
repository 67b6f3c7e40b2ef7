"""Ways to train in float16: ours, those of other libraries, and none at all.

Each takes one AdamW step from gradients of the scaled loss. A library that is not
installed makes its method raise ImportError.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import optax_dls as dls

SCALE = 2.0**10
MANY = 10_000
Params = dict[str, jax.Array]
ScaledGrads = Callable[[Params, jax.Array], Params]  # of parameters and the scale


class Method(NamedTuple):
    """A way to train: state from parameters, and a step with scaled gradients."""

    init: Callable[[Params], object]
    step: Callable[[Params, object, ScaledGrads], tuple[Params, object]]
    max_leaves: int = 200  # above, many take minutes to compile


def unscaled(grads: Params, scale: jax.Array) -> Params:
    return jax.tree.map(lambda g: g.astype(jnp.float32) * (1 / scale), grads)


def leafwise_finite(grads: Params) -> jax.Array:
    return jnp.all(
        jnp.stack([jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(grads)])
    )


def select(finite: jax.Array, new: object, old: object) -> object:
    return jax.tree.map(functools.partial(jnp.where, finite), new, old)


def without(optimizer: optax.GradientTransformation) -> Method:
    def step(params, state, scaled_grads):
        grads = unscaled(scaled_grads(params, jnp.float32(1)), jnp.float32(1))
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return Method(optimizer.init, step, MANY)


def fixed(optimizer: optax.GradientTransformation) -> Method:
    def step(params, state, scaled_grads):
        grads = unscaled(scaled_grads(params, jnp.float32(SCALE)), jnp.float32(SCALE))
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return Method(optimizer.init, step)


def apply_if_finite(optimizer: optax.GradientTransformation) -> Method:
    skipping = optax.apply_if_finite(optimizer, 1_000_000)
    return fixed(skipping)._replace(max_leaves=MANY)


def ours(
    optimizer: optax.GradientTransformation, gradient_limit: float | None = None
) -> Method:
    tx = dls.dynamic_loss_scaling(
        optimizer, init_scale=SCALE, gradient_limit=gradient_limit
    )

    def step(params, state, scaled_grads):
        grads = scaled_grads(params, dls.loss_scale(state))
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return Method(tx.init, step, MANY)


def ours_with_gradient_limit(optimizer: optax.GradientTransformation) -> Method:
    return ours(optimizer, 65504.0)._replace(max_leaves=200)


def applied_inside(optimizer: optax.GradientTransformation) -> Method:
    """A sketch of ours with ``optax.apply_updates`` inside the conditional."""

    def step(params, state, scaled_grads):
        scale, inner = state
        grads = scaled_grads(params, scale)

        def applied(grads, inner, params):
            updates, inner = optimizer.update(unscaled(grads, scale), inner, params)
            return optax.apply_updates(params, updates), inner

        def skipped(grads, inner, params):
            return params, inner

        finite = dls.all_finite(unscaled(grads, scale))
        params, inner = jax.lax.cond(finite, applied, skipped, grads, inner, params)
        return params, (jnp.where(finite, scale, scale / 2), inner)

    return Method(lambda p: (jnp.float32(SCALE), optimizer.init(p)), step)


def ours_with_where(optimizer: optax.GradientTransformation) -> Method:
    """The same with a select where the library has a conditional, for GPUs."""

    def step(params, state, scaled_grads):
        scale, inner = state
        grads = unscaled(scaled_grads(params, scale), scale)
        finite = dls.all_finite(grads)
        updates, new = optimizer.update(grads, inner, params)
        updates = jax.tree.map(lambda u: jnp.where(finite, u, 0), updates)
        state = jnp.where(finite, scale, scale / 2), select(finite, new, inner)
        return optax.apply_updates(params, updates), state

    return Method(lambda p: (jnp.float32(SCALE), optimizer.init(p)), step)


def flax_dynamic_scale(optimizer: optax.GradientTransformation) -> Method:
    from flax.training.dynamic_scale import DynamicScale

    def step(params, state, scaled_grads):
        scaler, inner = state
        grads = scaled_grads(params, scaler.scale)

        @jax.custom_vjp
        def loss(params):
            return jnp.float32(0)

        loss.defvjp(lambda p: (jnp.float32(0), None), lambda _, g: (grads,))
        zeros = jax.tree.map(jnp.zeros_like, grads)
        scaler, finite, _, grads = scaler.value_and_grad(loss)(zeros)
        updates, new = optimizer.update(grads, inner, params)
        new_params = optax.apply_updates(params, updates)
        inner = select(finite, new, inner)
        return select(finite, new_params, params), (scaler, inner)

    start = DynamicScale(scale=SCALE)
    return Method(lambda p: (start, optimizer.init(p)), step)


def jmp_dynamic_loss_scale(optimizer: optax.GradientTransformation) -> Method:
    import jmp

    def step(params, state, scaled_grads):
        scale, counter, inner = state
        scaler = jmp.DynamicLossScale(scale, counter)
        grads = scaler.unscale(scaled_grads(params, scale))
        finite = jmp.all_finite(grads)
        scaler = scaler.adjust(finite)
        updates, new = optimizer.update(grads, inner, params)
        new_params = optax.apply_updates(params, updates)
        params, inner = jmp.select_tree(finite, (new_params, new), (params, inner))
        return params, (scaler.loss_scale, scaler.counter, inner)

    def init(params):
        return jnp.float32(SCALE), jnp.int32(0), optimizer.init(params)

    return Method(init, step)


def mpx_dynamic_loss_scaling(optimizer: optax.GradientTransformation) -> Method:
    import mpx

    def step(params, state, scaled_grads):
        scaler, inner = state
        grads = scaled_grads(params, scaler.loss_scaling)
        finite = mpx.all_finite(grads)
        grads = scaler.unscale(grads)
        params, inner = mpx.optimizer_update(params, optimizer, inner, grads, finite)
        return params, (scaler.adjust(finite), inner)

    def init(params):
        scaler = mpx.DynamicLossScaling(jnp.float32(SCALE), jnp.float32(1))
        return scaler, optimizer.init(params)

    return Method(init, step)


def jaxamp_without_skip(optimizer: optax.GradientTransformation) -> Method:
    import jaxamp
    from jaxamp._dynamic_scaler import dynamic_scale_tx

    def step(params, state, scaled_grads):
        scaler, inner = state
        grads = scaled_grads(params, scaler.scaler)
        given = dynamic_scale_tx(lambda _: lambda **_: grads)(lambda: None)
        scaler, grads = given(dynamic_scaler_state=scaler)
        updates, inner = optimizer.update(grads, inner, params)
        return optax.apply_updates(params, updates), (scaler, inner)

    def init(params):
        start = jaxamp.DynamicScalerState(scaler=jnp.float32(SCALE))
        return jax.tree.map(jnp.array, start), optimizer.init(params)

    return Method(init, step)


def keras_loss_scale_optimizer(optimizer: optax.GradientTransformation) -> Method:
    import keras

    del optimizer  # Keras has an AdamW of its own
    kinds: dict[str, Any] = {}

    def init(params):
        variables = [keras.Variable(p) for p in jax.tree.leaves(params)]
        kinds["it"] = keras.optimizers.LossScaleOptimizer(
            keras.optimizers.AdamW(1e-3, weight_decay=1e-4), initial_scale=SCALE
        )
        kinds["it"].build(variables)
        return [v.value for v in kinds["it"].variables]

    def step(params, state, scaled_grads):
        grads = scaled_grads(params, jnp.float32(SCALE))
        leaves, treedef = jax.tree.flatten(params)
        leaves, state = kinds["it"].stateless_apply(
            state, jax.tree.leaves(grads), leaves
        )
        return jax.tree.unflatten(treedef, leaves), state

    return Method(init, step)


METHODS = {
    "no scaling": without,
    "fixed scale, no check": fixed,
    "optax_dls": ours,
    "optax_dls, gradient limit": ours_with_gradient_limit,
    "sketch: applied inside": applied_inside,
    "optax.apply_if_finite": apply_if_finite,
    "flax DynamicScale": flax_dynamic_scale,
    "jmp": jmp_dynamic_loss_scale,
    "mpx": mpx_dynamic_loss_scaling,
    "jaxamp (does not skip)": jaxamp_without_skip,
    "Keras on JAX": keras_loss_scale_optimizer,
}
