"""Gradients and parameters as the inner optimizer sees them: unscaled and wide."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike, DTypeLike


def is_none(leaf: object) -> bool:
    """For ``is_leaf``: keeps None in its place where a tree is mapped."""
    return leaf is None


def is_inexact(leaf: ArrayLike) -> bool:
    """Whether a leaf can hold inf or NaN: integers, bools and float0 cannot."""
    return jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)


def wide_dtype(dtype: DTypeLike) -> np.dtype:
    """float32 for every narrower float; float32, float64 and complex stay."""
    return jnp.dtype(jnp.float32 if jnp.finfo(dtype).bits < 32 else dtype)


def widen(params: optax.Params) -> optax.Params:
    """The parameters, with float32 views of the half-precision ones.

    Takes arrays and ``jax.ShapeDtypeStruct`` alike.
    """

    def widen_leaf(p: ArrayLike) -> ArrayLike:
        if not is_inexact(p) or wide_dtype(jnp.result_type(p)) == jnp.result_type(p):
            return p
        if isinstance(p, jax.ShapeDtypeStruct):
            return p.update(dtype=wide_dtype(p.dtype))
        return p.astype(wide_dtype(p.dtype))

    return jax.tree.map(widen_leaf, params)


def align(
    grads: optax.Updates, params: optax.Params | None
) -> tuple[optax.Updates, optax.Updates]:
    """Checks gradients against their parameters, leaf by leaf.

    Returns:
      The gradients as arrays, with zeros of the parameter's dtype for float0, and a
      tree of the dtypes that the inner optimizer receives them in: that of the
      parameter's view, or of the gradient's own where no parameters are given.

    Raises:
      ValueError: the trees differ other than by a None among the gradients.
      TypeError: a complex gradient of a real parameter.
    """
    paths_and_grads, treedef = jax.tree_util.tree_flatten_with_path(
        grads, is_leaf=is_none
    )
    if params is None:
        param_leaves = [None] * len(paths_and_grads)
    else:
        param_leaves = _flatten_like(grads, params)

    arrays, dtypes = [], []
    for (path, g), p in zip(paths_and_grads, param_leaves, strict=True):
        dtype = None
        if g is not None:
            if jnp.result_type(g) == jax.dtypes.float0:
                g = jnp.zeros(g.shape, jnp.int32 if p is None else p.dtype)
            g = jnp.asarray(g)
            if is_inexact(g):
                of = p if p is not None and is_inexact(p) else g
                dtype = wide_dtype(jnp.result_type(of))
                if jnp.iscomplexobj(g) and not jnp.issubdtype(
                    dtype, jnp.complexfloating
                ):
                    raise TypeError(
                        f"grads{jax.tree_util.keystr(path)} has dtype {g.dtype}, but its "
                        f"parameter is real ({p.dtype}); a gradient must not be complex "
                        "where its parameter is not. Differentiate a real loss, or take "
                        "the real part."
                    )
        arrays.append(g)
        dtypes.append(dtype)
    return treedef.unflatten(arrays), treedef.unflatten(dtypes)


def unscale(
    grads: optax.Updates, loss_scale: jax.Array, dtypes: optax.Updates
) -> optax.Updates:
    """g / S leaf by leaf, computed in at least float32 and returned in ``dtypes``.

    Multiplies by the reciprocal, which is exact for a power of two and which XLA
    fuses into what follows; leaves that are not inexact pass through.
    """

    @functools.cache
    def reciprocal(dtype: np.dtype) -> jax.Array:
        return (1 / loss_scale.astype(jnp.finfo(dtype).dtype)).astype(dtype)

    def unscale_leaf(g: ArrayLike | None, dtype: np.dtype | None) -> ArrayLike | None:
        if dtype is None:
            return g
        g = jnp.asarray(g)
        wide = wide_dtype(g.dtype)
        return (g.astype(wide) * reciprocal(wide)).astype(dtype)

    return jax.tree.map(unscale_leaf, grads, dtypes, is_leaf=is_none)


def _flatten_like(grads: optax.Updates, params: optax.Params) -> list[ArrayLike | None]:
    """The parameter of every gradient leaf; a None may stand for a whole subtree."""
    grad_leaves, treedef = jax.tree.flatten(grads, is_leaf=is_none)
    try:
        subtrees = treedef.flatten_up_to(params)
    except ValueError:
        subtrees = None
    if subtrees is not None and all(
        g is None or (p is not None and jax.tree_util.all_leaves([p]))
        for g, p in zip(grad_leaves, subtrees, strict=True)
    ):
        return subtrees

    def paths(tree: optax.Params) -> list[str]:
        flat = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_none)[0]
        return [jax.tree_util.keystr(path) for path, _ in flat]

    of_grads, of_params = paths(grads), paths(params)
    extra = [path for path in of_grads if path not in set(of_params)]
    missing = [path for path in of_params if path not in set(of_grads)]
    if extra or missing:
        what = "; ".join(
            ([f"grads{extra[0]} has no parameter"] if extra else [])
            + ([f"params{missing[0]} has no gradient"] if missing else [])
        )
    else:
        what = (
            "the leaves are the same but not their containers or their Nones: grads is "
            f"{jax.tree.structure(grads)}, params is {jax.tree.structure(params)}"
        )
    raise ValueError(
        "grads and params must be trees of one structure (a None among the gradients "
        f"aside), but {what}. Pass tx.update the gradients of exactly the parameters "
        "that tx.init got."
    )
