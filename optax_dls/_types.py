"""States whose shapes, dtypes and weak types never change."""

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from ._finite import to_varying, varying_axes


def own(leaf: ArrayLike) -> ArrayLike:
    """A strongly typed copy in a buffer that nothing else holds."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    return strongly_typed(jnp.array(leaf, copy=True))


def strongly_typed(leaf: ArrayLike) -> jax.Array:
    array = jnp.asarray(leaf)
    return array.astype(array.dtype) if jax.typeof(array).weak_type else array


def keep(
    new: optax.OptState, old: optax.OptState, source: str, cure: str
) -> optax.OptState:
    """The new state in the types of the old one, so that they never drift.

    Some optimizers promote, as Adam does the moments of an integer parameter, and some
    make leaves anew, as Adafactor does, of which JAX then knows that they are equal on
    all devices while the old ones were not.

    Raises:
      ValueError: ``source``, which made the new state, changed its structure, or made it
        differ between devices.
    """
    if jax.tree.structure(new) != jax.tree.structure(old):  # type: ignore[operator]
        raise ValueError(
            f"{source} must return a state of the structure that it got, but it turned "
            f"{jax.tree.structure(old)} into {jax.tree.structure(new)}. {cure}"
        )

    def keep_type(
        path: jax.tree_util.KeyPath, new_leaf: ArrayLike, old_leaf: jax.Array
    ) -> jax.Array:
        array = strongly_typed(new_leaf)
        apart = sorted(map(str, varying_axes(array) - varying_axes(old_leaf)))
        if apart:
            names = ", ".join(map(repr, apart))
            raise ValueError(
                f"{source} made its state{jax.tree_util.keystr(path)} vary over the mesh "
                f"axes {apart}, over which it was one value. Average the gradients before "
                f"tx.update, grads = jax.lax.pmean(grads, ({names},)), or, for a model per "
                "device, give each a state of its own: initialise it outside shard_map and "
                f"pass it in sharded, or jax.lax.pcast(state, ({names},), to='varying') "
                "(jax.lax.pvary in JAX 0.8)."
            )
        if array.dtype != old_leaf.dtype:
            array = array.astype(old_leaf.dtype)
        sharding = jax.typeof(old_leaf).sharding
        if jax.typeof(array).sharding.spec != sharding.spec:  # on explicit meshes
            array = jax.sharding.reshard(array, sharding)
        axes = varying_axes(old_leaf) - varying_axes(array)
        return to_varying(array, axes) if axes else array

    return jax.tree_util.tree_map_with_path(keep_type, new, old)


def select(
    condition: jax.Array, new: optax.OptState, old: optax.OptState
) -> optax.OptState:
    """``new`` where the condition holds, ``old`` elsewhere, leaf by leaf."""
    return jax.tree.map(lambda n, o: jnp.where(condition, n, o), new, old)


def zeros(like: jax.ShapeDtypeStruct) -> jax.Array:
    """Zeros of one dtype, sharding and manual-axis type with ``like``."""
    if like.sharding is not None:
        return jnp.zeros_like(like)
    # In a partly manual region, whose axis types zeros_like does not take over.
    array, axes = jnp.zeros(like.shape, like.dtype), varying_axes(like)
    return to_varying(array, axes) if axes else array
