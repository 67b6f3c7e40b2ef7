"""Which dtypes can overflow, and the casts of narrow ones to float32."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike, DTypeLike


def is_inexact(leaf: ArrayLike) -> bool:
    """Whether a leaf can hold inf or NaN: integers, bools and float0 cannot."""
    return jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)


def is_array(leaf: object) -> bool:
    """Whether a leaf is a number or an array, and not a function or a text."""
    return isinstance(leaf, bool | int | float | complex) or hasattr(leaf, "dtype")


def only_arrays(tree: optax.Params) -> optax.Params:
    """None in the place of every other leaf, such as the functions of an Equinox model."""
    return jax.tree.map(lambda leaf: leaf if is_array(leaf) else None, tree)


def at_least_float32(dtype: DTypeLike) -> np.dtype:
    """float32 for every narrower float; float32, float64 and complex stay."""
    return jnp.dtype(jnp.float32 if jnp.finfo(dtype).bits < 32 else dtype)


def cast_to_float32(params: optax.Params) -> optax.Params:
    """The parameters, with the half-precision ones cast to float32.

    Takes arrays and ``jax.ShapeDtypeStruct`` alike.
    """

    def cast_leaf(p: ArrayLike) -> ArrayLike:
        dtype = jnp.result_type(p)
        if not is_inexact(p) or at_least_float32(dtype) == dtype:
            return p
        if isinstance(p, jax.ShapeDtypeStruct):
            return p.update(dtype=at_least_float32(dtype))
        return jnp.asarray(p, at_least_float32(dtype))

    return jax.tree.map(cast_leaf, params)
