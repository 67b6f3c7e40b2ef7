"""Calls outside of jit: compiled once, not on each call."""

import functools
from collections.abc import Callable

import jax
import optax
from jax.typing import ArrayLike

from ._dtypes import is_array, only_arrays
from ._scaler_state import LossScalingState
from ._unscaled_tag import check_scaled

# A trace must know them: they may decide which way a Python function goes.
_FLAGS = (bool, int, str)


def compiled_outside_jit(
    update: optax.TransformUpdateExtraArgsFn,
) -> optax.TransformUpdateExtraArgsFn:
    """``update``, compiled once where it is called outside of ``jit``.

    An un-jitted conditional would be compiled anew on each call. Under a trace a program
    of ours would be wrong: it remembers what the optimizer did in another trace. So it
    would where a function is among the extra arguments, which may see new data each time.
    """

    @functools.partial(jax.jit, static_argnames=("structure", "flags"))
    def jitted_update(
        grads: optax.Updates,
        state: LossScalingState,
        params: optax.Params | None,
        arrays: list[ArrayLike | None],
        structure: jax.tree_util.PyTreeDef,
        flags: tuple[bool | int | str | None, ...],
    ) -> tuple[optax.Updates, LossScalingState]:
        leaves = [f if x is None else x for x, f in zip(arrays, flags, strict=True)]
        extra_args = jax.tree.unflatten(structure, leaves)
        return update(grads, state, params, **extra_args)

    def call(
        grads: optax.Updates,
        state: LossScalingState,
        params: optax.Params | None = None,
        **extra_args: ArrayLike | Callable,
    ) -> tuple[optax.Updates, LossScalingState]:
        # Here, since in the compiled program every array is another one.
        check_scaled(grads, "grads")
        check_scaled(extra_args.get("grad"), "grad")
        params = only_arrays(params)
        leaves, structure = jax.tree.flatten(extra_args)
        is_traced = any(
            isinstance(leaf, jax.core.Tracer)
            for leaf in (*leaves, *jax.tree.leaves((grads, state, params)))
        )
        flags = [leaf if isinstance(leaf, _FLAGS) else None for leaf in leaves]
        arrays = [leaf if flags[i] is None else None for i, leaf in enumerate(leaves)]
        if is_traced or not all(x is None or is_array(x) for x in arrays):
            return update(grads, state, params, **extra_args)
        return jitted_update(grads, state, params, arrays, structure, tuple(flags))

    return call
