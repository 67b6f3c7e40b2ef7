"""g / S: gradients checked against their parameters, and divided by the scale."""

import contextlib
import functools
from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from ._dtypes import at_least_float32, is_inexact

Mask: TypeAlias = optax.Params | Callable[[optax.Params], optax.Params]


def unscaled_dtypes(grads: optax.Updates, mask: Mask | None = None) -> optax.Updates:
    """The dtypes of the unscaled gradients; None for a leaf that passes through.

    These are the leaves that cannot overflow, those that ``mask`` leaves out, and those
    that are no gradients: :func:`overwrites_with_gradient`.

    Args:
      grads: the gradients.
      mask: as for ``optax.masked``, a tree of bools like the gradients, or a prefix of
        it, or a function that makes it of them.

    Raises:
      TypeError, ValueError: ``mask`` is no such tree.
    """

    def unscaled_dtype(path: jax.tree_util.KeyPath, g: ArrayLike) -> np.dtype | None:
        if overwrites_with_gradient(path) or not is_inexact(g):
            return None
        return at_least_float32(jnp.result_type(g))

    dtypes = jax.tree_util.tree_map_with_path(unscaled_dtype, grads)
    return _masked(dtypes, grads, mask)


def overwrites_with_gradient(path: jax.tree_util.KeyPath) -> bool:
    """Whether a leaf is new state that travels as a gradient, as Flax's float8 scales do.

    Its gradient takes its place as it is. It is not linear in the loss.
    """
    keys = (getattr(entry, "key", getattr(entry, "name", None)) for entry in path)
    return "_overwrite_with_gradient" in keys


def scaled_leaves(grads: optax.Updates, dtypes: optax.Updates) -> optax.Updates:
    """The gradients without the leaves that pass through, for the finite check."""
    return jax.tree.map(
        lambda g, dtype: None if dtype is None else g, grads, dtypes, is_leaf=_is_none
    )


def align(
    grads: optax.Updates, params: optax.Params | None, mask: Mask | None = None
) -> tuple[optax.Updates, optax.Updates]:
    """Checks gradients against their parameters, leaf by leaf.

    Returns:
      The gradients as arrays, with zeros of the parameter's dtype for float0; and the
      dtypes in which the inner optimizer receives them: at least float32, that of the
      parameter where there is one. None stands for a leaf that passes through.

    Raises:
      ValueError: the trees differ other than by a None among the gradients.
      TypeError: a complex gradient of a real parameter.
    """
    if isinstance(params, optax.LookaheadParams):
        params = params.fast  # whose gradients they are
    if params is None:
        params = grads
    else:
        _check_structure(grads, params)
    arrays = jax.tree.map(_as_array, grads, params, is_leaf=_is_none)
    dtypes = jax.tree_util.tree_map_with_path(
        _unscaled_dtype, arrays, params, is_leaf=_is_none
    )
    return arrays, _masked(dtypes, params, mask)


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
        wide = at_least_float32(g.dtype)
        return (g.astype(wide) * reciprocal(wide)).astype(dtype)

    return jax.tree.map(unscale_leaf, grads, dtypes, is_leaf=_is_none)


def _masked(
    dtypes: optax.Updates, tree: optax.Params, mask: Mask | None
) -> optax.Updates:
    """The dtypes where the mask holds, else None."""
    if mask is None:
        return dtypes
    mask = mask(tree) if callable(mask) else mask
    _check_mask(mask, tree)

    def mask_part(flag: bool, part: optax.Updates) -> optax.Updates:
        return part if flag else jax.tree.map(lambda _: None, part)

    return jax.tree.map(mask_part, mask, dtypes)


def _check_mask(mask: optax.Params, tree: optax.Params) -> None:
    """Raises unless the mask is a tree of bools like the gradients, or a prefix of it."""
    for path, stays in jax.tree_util.tree_flatten_with_path(mask)[0]:
        if not isinstance(stays, bool | np.bool_):
            raise TypeError(
                f"mask{jax.tree_util.keystr(path)} must be True or False, got {stays!r}. "
                "False leaves the gradient as it is, neither scaled nor checked."
            )
    try:
        jax.tree.map(lambda stays, part: None, mask, tree)
    except ValueError as error:
        raise ValueError(
            "mask must be a tree like the gradients, or a prefix of it, got "
            f"{jax.tree.structure(mask)} for gradients of {jax.tree.structure(tree)}. "
            "Build it by jax.tree.map, or pass a function of the gradients."
        ) from error


def _is_none(leaf: object) -> bool:
    """For ``is_leaf``: keeps None in its place where a tree is mapped."""
    return leaf is None


def _as_array(g: ArrayLike | None, p: ArrayLike) -> jax.Array | None:
    if g is None:
        return None
    if jnp.result_type(g) == jax.dtypes.float0:
        dtype = jnp.result_type(p)
        return jnp.zeros(
            jnp.shape(g), jnp.int32 if dtype == jax.dtypes.float0 else dtype
        )
    return jnp.asarray(g)


def _unscaled_dtype(
    path: jax.tree_util.KeyPath, g: jax.Array | None, p: ArrayLike
) -> np.dtype | None:
    """The dtype in which the inner optimizer receives a gradient; None: as it is."""
    if g is None or not is_inexact(g) or overwrites_with_gradient(path):
        return None
    dtype = at_least_float32(jnp.result_type(p if is_inexact(p) else g))
    if jnp.iscomplexobj(g) and not jnp.issubdtype(dtype, jnp.complexfloating):
        raise TypeError(
            f"grads{jax.tree_util.keystr(path)} has dtype {g.dtype}, but its parameter is "
            f"real ({jnp.result_type(p)}), and a real parameter has a real gradient. "
            "Differentiate a real loss, or take the real part."
        )
    return dtype


def _check_structure(grads: optax.Updates, params: optax.Params) -> None:
    """Raises unless each gradient has a parameter; a None may stand for a subtree."""

    def has_parameter(g: ArrayLike | None, p: optax.Params) -> bool:
        return g is None or (p is not None and jax.tree_util.all_leaves([p]))

    with contextlib.suppress(ValueError):  # of tree.map, where the trees differ
        if jax.tree.all(jax.tree.map(has_parameter, grads, params, is_leaf=_is_none)):
            return

    def paths(tree: optax.Params) -> list[str]:
        flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_none)
        return [jax.tree_util.keystr(path) for path, _ in flat]

    of_grads, of_params = paths(grads), paths(params)
    extra = [path for path in of_grads if path not in set(of_params)]
    missing = [path for path in of_params if path not in set(of_grads)]
    what = [f"grads{path} has no parameter" for path in extra[:1]]
    what += [f"params{path} has no gradient" for path in missing[:1]]
    if not what:
        structures = f"{jax.tree.structure(grads)} and {jax.tree.structure(params)}"
        what = [
            f"the leaves agree, but not their containers or their Nones: {structures}"
        ]
    raise ValueError(
        "grads and params must be trees of one structure (a None among the gradients "
        f"aside), but {'; '.join(what)}. Pass tx.update the gradients of exactly the "
        "parameters that tx.init got."
    )
