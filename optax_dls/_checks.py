"""Arguments that cannot be right, refused with a word on what to do instead."""

import contextlib
import numbers
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax

from . import rules
from ._devices import AxisName
from ._dtypes import cast_to_float32, only_arrays
from ._scaler_state import LossScalingState, holds_scaler
from .rules._rule import NEEDS


def check_arguments(
    inner: optax.GradientTransformation,
    rule: rules.Rule,
    check_updates: bool,
    axis_name: AxisName | None,
) -> None:
    if not callable(getattr(inner, "init", None)) or not callable(
        getattr(inner, "update", None)
    ):
        cure = (
            "Call the optimizer first: dynamic_loss_scaling(optax.adam(1e-3))."
            if callable(inner)
            else "Pass an optimizer, or optax.chain(...) of several transformations."
        )
        raise TypeError(
            "inner must be an optax.GradientTransformation (with init and update), got "
            f"{inner!r}. {cure}"
        )
    if not isinstance(rule, rules.Rule):
        raise TypeError(
            f"rule must be a Rule, got {rule!r}. Call rules.dynamic() or "
            "rules.static(128.0), or build one: rules.Rule(init, update)."
        )
    if not isinstance(rule.needs, tuple) or not set(rule.needs) <= set(NEEDS):
        raise ValueError(
            f"rule.needs must be a tuple of names among {NEEDS}, got {rule.needs!r}."
        )
    if not isinstance(check_updates, bool):
        raise TypeError(f"check_updates must be True or False, got {check_updates!r}.")
    names = axis_name if isinstance(axis_name, tuple | list) else (axis_name,)
    if any(isinstance(name, numbers.Number) for name in names):
        raise TypeError(
            f"axis_name must be the name of a mapped axis or a tuple of names, got "
            f"{axis_name!r}. Leave it out unless you know that you need it."
        )


def check_one_scaler(state: LossScalingState) -> None:
    if holds_scaler(state.inner_state):
        raise ValueError(
            "inner already holds a loss scaler, and one loss has one scale. Wrap the "
            "whole optimizer once: dynamic_loss_scaling(chain(...))."
        )


def check_state(state: LossScalingState, rule: rules.Rule) -> None:
    if not isinstance(state, LossScalingState):
        raise TypeError(
            "state must be the LossScalingState that tx.init(params) gives, got "
            f"{type(state).__name__}. Call state = tx.init(params) first, and restore a "
            "checkpoint into that structure. The state of an optimizer that ran without "
            "loss scaling goes under a new scaler by "
            "tx.init(params)._replace(inner_state=old_state)."
        )
    if state.scaler.loss_scale.ndim:
        raise ValueError(
            "state must hold one scale, got scales of shape "
            f"{state.scaler.loss_scale.shape}. Take the step of a population under "
            "jax.vmap: jax.vmap(tx.update)(grads, state, params)."
        )
    _, expected = jax.eval_shape(rule.init)
    found = jax.tree.structure(state.scaler.rule_state)
    if found != jax.tree.structure(expected):  # type: ignore[operator]
        raise TypeError(
            "state must come from the init of this very transformation, got one whose "
            f"rule_state is a {type(state.scaler.rule_state).__name__}, not a "
            f"{type(expected).__name__}. Move a run from one wrapper or rule to another by "
            "new = tx.init(params)._replace(inner_state=old.inner_state), and "
            "optax.tree.set(new, loss_scale=loss_scale(old)) for its scale, unless that has "
            "sunk."
        )


def check_inner_state(
    inner_state: optax.OptState,
    inner: optax.GradientTransformation,
    params: optax.Params | None,
) -> None:
    """Raises where the moments of half-precision parameters are in half precision."""
    cast_params = cast_to_float32(params)
    if jax.tree.all(jax.tree.map(lambda cast, p: cast is p, cast_params, params)):
        return
    expected = jax.eval_shape(inner.init, cast_params)
    if jax.tree.structure(expected) != jax.tree.structure(inner_state):  # type: ignore[operator]
        return  # the optimizer itself knows better what is wrong
    leaves, _ = jax.tree_util.tree_flatten_with_path(inner_state)
    for (path, leaf), wanted in zip(leaves, jax.tree.leaves(expected), strict=True):
        # Moments only: scalars are hyperparameters, which users set as they like.
        if jnp.ndim(leaf) and leaf.dtype != wanted.dtype:
            raise TypeError(
                f"state.inner_state{jax.tree_util.keystr(path)} must be {wanted.dtype}, "
                f"got {leaf.dtype}: the optimizer gets half-precision parameters cast to "
                "float32. Cast a state from elsewhere: jax.tree.map("
                "lambda old, new: old.astype(new.dtype), old_state, "
                "tx.init(params).inner_state)."
            )


@contextlib.contextmanager
def blaming_foreign_state(
    inner_state: optax.OptState,
    inner: optax.GradientTransformation,
    params: optax.Params,
) -> Iterator[None]:
    """Says where the optimizer fails on a state that is not of its own making.

    Only then: there are optimizers whose state changes its structure for good reasons.
    """
    try:
        yield
    except Exception as error:
        difference = None
        with contextlib.suppress(Exception):  # of an init that does not trace
            difference = _difference_from_init(inner_state, inner, params)
        if difference is None:
            raise
        raise ValueError(
            "state must come from the init of this optimizer for these parameters, but "
            f"{difference}. Are the states of two optimizers swapped? Pass each its own; "
            "and restore a checkpoint into the structure of tx.init(params)."
        ) from error


def _difference_from_init(
    inner_state: optax.OptState,
    inner: optax.GradientTransformation,
    params: optax.Params,
) -> str | None:
    """The first leaf that is not as ``init`` makes it, in words; None if there is none."""

    def shapes(tree: optax.OptState) -> dict[str, tuple[int, ...]]:
        leaves = jax.tree.leaves_with_path(tree)
        return {jax.tree_util.keystr(path): jnp.shape(leaf) for path, leaf in leaves}

    expected = shapes(jax.eval_shape(inner.init, only_arrays(params)))
    found = shapes(inner_state)
    for path, shape in expected.items():
        if path not in found:
            return f"it has no state.inner_state{path}"
        if found[path] != shape:
            return (
                f"state.inner_state{path} has shape {found[path]}, and tx.init(params) "
                f"makes it {shape}"
            )
    extra = [path for path in found if path not in expected]
    return f"tx.init(params) makes no state.inner_state{extra[0]}" if extra else None


def checked_value(value: object) -> jax.Array | None:
    """``value=`` as an array, if it can be a loss; None if there is none."""
    if value is None:
        return None
    if not isinstance(value, jax.Array | np.ndarray | np.generic | float | int):
        raise TypeError(
            f"value must be the true loss, a scalar, got {type(value).__name__}. Without "
            "auxiliary data: value=loss."
        )
    if jnp.shape(value) != ():
        raise ValueError(
            f"value must be the true loss, a scalar of shape (), got shape "
            f"{jnp.shape(value)}. Reduce it, e.g. with jnp.mean."
        )
    return jnp.asarray(value)
