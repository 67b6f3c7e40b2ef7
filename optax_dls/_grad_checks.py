"""What the loss side is given: losses, arguments and states, checked at trace time."""

import inspect
import numbers
import warnings
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ._dtypes import is_inexact
from ._lookup import scaler_state
from ._scaler_state import ScalerState, scaling_is_off


def checked_loss(loss: object, scaler: ScalerState) -> jax.Array:
    """The loss as an array. A float16 loss brings a warning."""
    if not isinstance(loss, jax.Array | np.ndarray | np.generic | numbers.Number):
        raise TypeError(
            f"loss must be a real scalar, got {type(loss).__name__}. Does the loss function "
            "return it?"
        )
    loss = jnp.asarray(loss)
    if loss.shape != ():
        raise ValueError(
            f"loss must be a scalar of shape (), got shape {loss.shape}. Reduce it, e.g. "
            "with jnp.mean."
        )
    if not jnp.issubdtype(loss.dtype, jnp.floating):
        raise TypeError(
            f"loss must be a real floating-point number, got dtype {loss.dtype}. Return "
            "float32."
        )
    if loss.dtype == jnp.float16 and not scaling_is_off(scaler):
        warnings.warn(
            "The loss is float16: its gradient is the loss scale itself, so scales above "
            "2**15 overflow. Return loss.astype(jnp.float32).",
            stacklevel=3,  # who called scale_loss
        )
    return loss


def one_scaler(state: object) -> ScalerState:
    """The scaler of a state, if it is not that of a population."""
    scaler = scaler_state(state)
    if scaler.loss_scale.ndim:
        raise ValueError(
            "state must hold one scale, got scales of shape "
            f"{scaler.loss_scale.shape}. Take the step of a population under jax.vmap."
        )
    return scaler


def scaler_for(
    fun: Callable, state: object, args: Sequence, kwargs: dict
) -> ScalerState:
    """The scaler in ``state=``, where the loss function gets its own arguments too."""
    if state is None:
        raise TypeError(
            "state= is missing: value_and_scaled_grad takes the scale from the "
            "optimizer state. Call value_and_scaled_grad(loss_fn)(params, ..., "
            "state=opt_state) with the opt_state that tx.init or tx.update gave."
        )
    try:
        signature = inspect.signature(fun)
    except (TypeError, ValueError):  # some builtins have none
        return one_scaler(state)
    own = signature.parameters.get("state")
    cure = (
        "The keyword state= is taken by value_and_scaled_grad, for the optimizer state. "
        "The argument of that name of fun itself goes positionally, or is bound by "
        "functools.partial(fun, state=...)."
    )
    try:
        scaler = one_scaler(state)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{error} {cure}" if own else str(error)) from None
    is_needed = own is not None and own.default is own.empty
    if is_needed and "state" not in signature.bind_partial(*args, **kwargs).arguments:
        raise TypeError(f"fun has not got its own argument state. {cure}")
    return scaler


def check_argnums(argnums: object, value_and_grad: Callable) -> None:
    """Raises unless these are positions of arguments.

    Frameworks have selections of their own, such as ``nnx.DiffState``.
    """
    for part in argnums if isinstance(argnums, tuple | list) else (argnums,):
        is_position = isinstance(part, numbers.Integral) and not isinstance(part, bool)
        if not is_position and (value_and_grad is jax.value_and_grad or callable(part)):
            raise TypeError(
                "argnums must be the position of the argument to differentiate, or several, "
                f"got {type(argnums).__name__}. Neither the optimizer nor the arguments of "
                "fun go here: value_and_scaled_grad(loss_fn)(params, batch, "
                "state=opt_state)."
            )


def check_differentiable(args: Sequence, argnums: int | Sequence[int]) -> None:
    """Raises unless ``jax.value_and_grad`` takes the arguments at ``argnums``."""
    for argnum in argnums if isinstance(argnums, Sequence) else (argnums,):
        if not -len(args) <= argnum < len(args):
            continue  # JAX has a good message
        for path, leaf in jax.tree_util.tree_flatten_with_path(args[argnum])[0]:
            if not _is_differentiable(leaf):
                raise TypeError(
                    f"args[{argnum % len(args)}]{jax.tree_util.keystr(path)} has no "
                    f"gradient: it is a {_kind(leaf)}. Pass value_and_grad="
                    "eqx.filter_value_and_grad for an Equinox model, nnx.value_and_grad for "
                    "an NNX one, and functools.partial(jax.value_and_grad, allow_int=True) "
                    "for integer parameters."
                )


def split_output(output: object, has_aux: bool) -> tuple:
    """(loss, aux) of what a loss function returned."""
    if has_aux:
        if not isinstance(output, tuple) or len(output) != 2:
            is_array = isinstance(output, jax.Array)
            raise TypeError(
                "has_aux=True, so fun must return a pair (loss, aux), got "
                f"{'one array' if is_array else type(output).__name__}. Return both, or "
                "leave has_aux out."
            )
        return output
    if isinstance(output, tuple | list | dict):
        raise TypeError(
            f"fun must return a scalar loss, got a {type(output).__name__}. If it returns "
            "(loss, aux), pass has_aux=True."
        )
    return output, None


def _is_number(leaf: object) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | np.generic | numbers.Number)


def _is_differentiable(leaf: ArrayLike) -> bool:
    """Whether a leaf is a float, or an array type of another library, which JAX knows."""
    if not _is_number(leaf):
        return hasattr(leaf, "__jax_array__")
    dtype = jnp.result_type(leaf)
    return is_inexact(leaf) or jnp.issubdtype(dtype, jax.dtypes.extended)


def _kind(leaf: object) -> str:
    return str(jax.typeof(leaf)) if _is_number(leaf) else type(leaf).__name__
