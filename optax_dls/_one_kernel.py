"""A scaler that GPUs read and compute in one kernel."""

from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from ._devices import varying_axes

Tree = TypeVar("Tree")


def in_one_array(scaler: Tree) -> Tree:
    """The same numbers; on GPUs they are read from one array.

    XLA for GPUs makes a kernel of its own for each result that comes from single numbers.
    From one array it computes all of them in one kernel. Other platforms gain nothing.
    """
    leaves, treedef = jax.tree.flatten(scaler)
    kinds = {(leaf.shape, varying_axes(leaf)) for leaf in leaves}
    is_packable = all(leaf.dtype in (jnp.float32, jnp.int32, bool) for leaf in leaves)
    if len(kinds) > 1 or not is_packable:  # the state of a rule of the user's own
        return scaler
    numbers = lax.platform_dependent(
        *leaves, cuda=_through_one_array, rocm=_through_one_array, default=_as_they_are
    )
    return jax.tree.unflatten(treedef, numbers)


def _as_they_are(*numbers: jax.Array) -> tuple[jax.Array, ...]:
    return numbers


def _through_one_array(*numbers: jax.Array) -> tuple[jax.Array, ...]:
    # Without the barrier XLA would see through the array.
    array = lax.optimization_barrier(jnp.stack([_to_int32(x) for x in numbers]))
    return tuple(_from_int32(array[i], x.dtype) for i, x in enumerate(numbers))


def _to_int32(x: jax.Array) -> jax.Array:
    is_float = x.dtype == jnp.float32
    return lax.bitcast_convert_type(x, jnp.int32) if is_float else x.astype(jnp.int32)


def _from_int32(x: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    is_float = dtype == jnp.float32
    return lax.bitcast_convert_type(x, dtype) if is_float else x.astype(dtype)
