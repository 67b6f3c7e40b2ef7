"""States whose shapes, dtypes, shardings and weak types never change."""

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from ._devices import to_varying, varying_axes


def strongly_typed(leaf: ArrayLike) -> jax.Array:
    """``leaf`` as an array whose dtype is its own, not that of what it meets."""
    array = jnp.asarray(leaf)
    return array.astype(array.dtype) if jax.typeof(array).weak_type else array


def strongly_typed_copy(leaf: ArrayLike) -> ArrayLike:
    """The same in a buffer that nothing else holds."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    return strongly_typed(jnp.array(leaf, copy=True))


def keep_types(
    new: optax.OptState, old: optax.OptState, source: str, cure: str
) -> optax.OptState:
    """The new state with the dtypes, shardings and manual-axis types of the old one.

    Some optimizers promote: Adam does the moments of an integer parameter. Some replace
    a leaf by a fresh array, as Adafactor does: JAX then knows that it is equal on all
    devices, while the old one was not.

    Raises:
      ValueError: ``source``, which made the new state, changed its structure or a shape,
        or made it differ between devices.
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
        where = source, jax.tree_util.keystr(path)
        _check_shape(array, old_leaf, *where, cure)
        _check_varies_no_further(array, old_leaf, *where)
        if array.dtype != old_leaf.dtype:
            array = array.astype(old_leaf.dtype)
        sharding = jax.typeof(old_leaf).sharding
        if jax.typeof(array).sharding.spec != sharding.spec:  # on explicit meshes
            array = jax.sharding.reshard(array, sharding)
        axes = varying_axes(old_leaf) - varying_axes(array)
        return to_varying(array, axes) if axes else array

    return jax.tree_util.tree_map_with_path(keep_type, new, old)


def tree_where(
    condition: jax.Array, new: optax.OptState, old: optax.OptState
) -> optax.OptState:
    """``new`` where the condition holds, ``old`` elsewhere, leaf by leaf."""
    return jax.tree.map(lambda n, o: jnp.where(condition, n, o), new, old)


def zeros_of_type(like: jax.ShapeDtypeStruct) -> jax.Array:
    """Zeros with the dtype, sharding and manual-axis type of ``like``."""
    if like.sharding is not None:
        return jnp.zeros_like(like)
    # In a partly manual region, whose axis types zeros_like does not take over.
    array, axes = jnp.zeros(like.shape, like.dtype), varying_axes(like)
    return to_varying(array, axes) if axes else array


def no_update(like: jax.Array | jax.ShapeDtypeStruct) -> jax.Array:
    """-0.0, which added to a parameter changes no bit of it: -0.0 + 0.0 would be 0.0."""
    zeros = jnp.zeros_like(like) if isinstance(like, jax.Array) else zeros_of_type(like)
    return -zeros if jnp.issubdtype(like.dtype, jnp.inexact) else zeros


def _check_shape(
    new: jax.Array, old: jax.Array, source: str, path: str, cure: str
) -> None:
    if new.shape != old.shape:
        raise ValueError(
            f"{source} must return a state of the shapes that it got, but its state{path} "
            f"was {jax.typeof(old)} and is {jax.typeof(new)}. {cure}"
        )


def _check_varies_no_further(
    new: jax.Array, old: jax.Array, source: str, path: str
) -> None:
    """Raises if a leaf that was one value on several devices no longer is."""
    apart = sorted(map(str, varying_axes(new) - varying_axes(old)))
    if apart:
        names = ", ".join(map(repr, apart))
        raise ValueError(
            f"{source} made its state{path} vary over the mesh axes {apart}, over which it "
            "was one value. Average the gradients before tx.update, "
            f"grads = jax.lax.pmean(grads, ({names},)), or, for a model per device, give "
            "each a state of its own: initialise it outside shard_map and pass it in "
            f"sharded, or jax.lax.pcast(state, ({names},), to='varying') (jax.lax.pvary in "
            "JAX 0.8)."
        )
