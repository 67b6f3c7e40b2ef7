"""The scaler inside any training state: read it, log it, act on a skip."""

import numbers
from collections.abc import Mapping
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from ._composition import check_breaks_no_scaler, is_of_optax, may_break_scaler
from ._scaler_state import (
    LossScalingState,
    ScalerState,
    holds_scaler,
    scaling_is_off,
)

Tree = TypeVar("Tree")


def scaler_state(state: object) -> ScalerState:
    """The one scaler that a training state holds.

    Args:
      state: the optimizer state, or anything that contains it: the state of a
        ``chain``, ``named_chain`` or ``inject_hyperparams``, a Flax ``TrainState``, an
        ``nnx.Optimizer``, replicated or sharded.

    Returns:
      Its :class:`ScalerState`, as plain arrays.

    Raises:
      TypeError: ``state`` is None, a number, or a transformation instead of its state.
      ValueError: it holds no scaler, or more than one, or one under a wrapper of Optax
        that breaks loss scaling (such as ``MultiSteps``, ``masked`` or ``contrib.sam``).
        The message has the cure.

    Example:
      >>> import jax.numpy as jnp
      >>> import optax
      >>> import optax_dls as dls
      >>> tx = optax.named_chain(("main", dls.dynamic_loss_scaling(optax.sgd(0.1))))
      >>> state = tx.init(jnp.zeros(3))
      >>> float(dls.scaler_state(state).loss_scale)
      32768.0
    """
    _check_is_state(state)
    found = _find_scalers(state)
    if not found:
        raise ValueError(_why_no_scaler(state))
    if len(found) > 1:
        raise ValueError(
            f"state holds {len(found)} loss scalers, at {', '.join(found)}, but one loss "
            "has one scale. Pass the part of the state that belongs to this loss; several "
            "parameter groups under one loss go inside one wrapper: "
            "dynamic_loss_scaling(partition(...))."
        )
    (node,) = found.values()
    if isinstance(node, LossScalingState):
        if holds_scaler(node.inner_state):
            raise ValueError(
                "state has a loss scaler around a loss scaler, but one loss has one "
                "scale. Give _replace(inner_state=...) the inner state alone: "
                "old.inner_state."
            )
        node = node.scaler
    if scaling_is_off(node):
        # A checkpoint of another wrapper may have been restored into this state.
        node = node._replace(loss_scale=jnp.ones((), jnp.float32))
    # The arrays may be boxed, as in nnx.Optimizer.
    return jax.tree.map(
        jnp.asarray, node, is_leaf=lambda leaf: hasattr(leaf, "__jax_array__")
    )


def _find_scalers(state: object) -> dict[str, LossScalingState | ScalerState]:
    """The scalers in a state, by where they are."""

    def is_leaf(node: object) -> bool:
        is_scaler = isinstance(node, LossScalingState | ScalerState)
        return is_scaler or may_break_scaler(node)

    found = {}
    for path, node in jax.tree.leaves_with_path(state, is_leaf=is_leaf):
        check_breaks_no_scaler(node)
        if isinstance(node, LossScalingState | ScalerState):
            found[jax.tree_util.keystr(path) or "the state itself"] = node
    return found


def _check_is_state(state: object) -> None:
    """Raises where ``state=`` is something else altogether."""
    if state is None or isinstance(state, numbers.Number | jax.Array | np.ndarray):
        raise TypeError(
            "state must be the optimizer state that tx.init or tx.update gave, got "
            f"{state!r}. Not a number: a scale kept apart goes stale, and then gradients "
            "are wrong by a factor."
        )
    if isinstance(state, optax.GradientTransformation):
        raise TypeError(
            "state must be the optimizer state that tx.init or tx.update gave, got the "
            "transformation itself. Pass opt_state, where opt_state = tx.init(params)."
        )


def _why_no_scaler(state: object) -> str:
    """What a state is in which no scaler was found, and what to do about it."""

    def is_saved_scaler(node: object) -> bool:
        return isinstance(node, Mapping) and set(ScalerState._fields) <= set(node)

    def is_leaf(node: object) -> bool:
        return is_saved_scaler(node) or is_of_optax(node)

    wrap = (
        "Wrap the optimizer, tx = dynamic_loss_scaling(optimizer) "
        "(no_loss_scaling(optimizer) for float32 and bfloat16), and pass the state that "
        "tx.init(params) gives."
    )
    for path, node in jax.tree.leaves_with_path(state, is_leaf=is_leaf):
        where = jax.tree_util.keystr(path)
        if is_saved_scaler(node):
            return (
                f"state holds no loss scaler, but a dict of its values (state{where}), as "
                "a checkpoint gives it that is restored without a structure. Restore it into "
                "that of tx.init(params): checkpointer.restore(path, "
                "jax.eval_shape(tx.init, params)), or "
                "flax.serialization.from_bytes(tx.init(params), data)."
            )
        if is_of_optax(node):
            return (
                f"state holds no loss scaler: state{where} is the {type(node).__name__} of "
                f"an optimizer without one. {wrap} A run that began without loss scaling "
                "goes on from tx.init(params)._replace(inner_state=old_state)."
            )
        for name, part in getattr(node, "__dict__", {}).items():
            if holds_scaler(part):
                return (
                    "state holds no loss scaler that JAX can see, since "
                    f"{type(node).__name__} is no pytree. Pass what is in it: "
                    f"state{where}.{name}."
                )
    return (
        "state holds no loss scaler: found no LossScalingState in "
        f"{type(state).__name__}. {wrap} The keyword state= always means this state: a loss "
        "function with a state of its own gets that by position."
    )


def with_scaler(state: Tree, scaler: ScalerState) -> Tree:
    """``state`` with the values of ``scaler`` in the place of those of its own.

    The values of an ``nnx.Optimizer`` are in boxes, and stay in them.
    """

    def replace(node: object) -> object:
        if not isinstance(node, ScalerState):
            return node
        return jax.tree.unflatten(jax.tree.structure(node), jax.tree.leaves(scaler))

    return jax.tree.map(
        replace, state, is_leaf=lambda node: isinstance(node, ScalerState)
    )


def loss_scale(state: object) -> jax.Array:
    """The scale S that the next loss is multiplied by.

    Args:
      state: anything that holds exactly one scaler, see :func:`scaler_state`.

    Returns:
      Shape (), dtype float32 (with a leading axis where the state has one).

    Raises:
      TypeError, ValueError: as :func:`scaler_state`.

    Example:
      >>> import jax.numpy as jnp
      >>> import optax
      >>> import optax_dls as dls
      >>> state = dls.static_loss_scaling(optax.sgd(0.1), 128.0).init(jnp.zeros(3))
      >>> float(dls.loss_scale(state))
      128.0
    """
    return scaler_state(state).loss_scale


def metrics(state: object) -> dict[str, jax.Array]:
    """What to log of the scaler: small arrays, still on the device.

    Args:
      state: anything that holds exactly one scaler, see :func:`scaler_state`.

    Returns:
      ``loss_scale`` (float32), ``grads_finite`` (bool), ``consecutive_skips`` and
      ``total_skips`` (int32), each of shape (). Reading their values waits for the
      device, so read them when you log, not every step.

    Raises:
      TypeError, ValueError: as :func:`scaler_state`.

    Example:
      >>> import jax.numpy as jnp
      >>> import optax
      >>> import optax_dls as dls
      >>> tx = dls.dynamic_loss_scaling(optax.sgd(0.1))
      >>> _, state = tx.update(jnp.array([jnp.inf]), tx.init(jnp.zeros(1)))
      >>> for name, value in dls.metrics(state).items():
      ...     print(name, value)
      loss_scale 16384.0
      grads_finite False
      consecutive_skips 1
      total_skips 1
    """
    scaler = scaler_state(state)
    return {
        "loss_scale": scaler.loss_scale,
        "grads_finite": scaler.grads_finite,
        "consecutive_skips": scaler.consecutive_skips,
        "total_skips": scaler.total_skips,
    }


def rollback_if_skipped(state: object, new: Tree, old: Tree) -> Tree:
    r"""Keeps ``old`` where the last step was skipped, ``new`` elsewhere.

    .. math:: \text{consecutive\_skips} > 0\ ?\ \text{old} : \text{new}

    For everything that a forward pass writes and an overflow spoils: batch
    statistics, moving averages, counters of applied steps.

    Args:
      state: the optimizer state *after* ``tx.update``, see :func:`scaler_state`.
      new: a tree of arrays, from this step.
      old: the same tree from before it, with the same shapes and dtypes. NNX writes in
        place, so there take a copy: ``jax.tree.map(jnp.copy, nnx.state(...))``.

    Returns:
      The tree to go on with. Where the scaler has leading axes (one member of a
      population each), they select along the leading axes of every leaf.

    Raises:
      TypeError, ValueError: as :func:`scaler_state`; ValueError also where the trees,
        shapes or dtypes differ, and where all of ``new`` *is* ``old``.

    Example:
      >>> import jax.numpy as jnp
      >>> import optax
      >>> import optax_dls as dls
      >>> tx = dls.dynamic_loss_scaling(optax.sgd(0.1))
      >>> _, state = tx.update(jnp.array([jnp.inf]), tx.init(jnp.zeros(1)))
      >>> dls.rollback_if_skipped(state, {"mean": jnp.inf}, {"mean": 0.5})["mean"].item()
      0.5
    """
    skipped = scaler_state(state).consecutive_skips > 0

    def select(
        path: jax.tree_util.KeyPath, new_leaf: ArrayLike, old_leaf: ArrayLike
    ) -> jax.Array:
        shapes = f"{jax.typeof(new_leaf)} and {jax.typeof(old_leaf)}"
        is_number = isinstance(new_leaf, int | float) or isinstance(
            old_leaf, int | float
        )
        if jnp.shape(new_leaf) != jnp.shape(old_leaf) or not (
            is_number or jnp.result_type(new_leaf) == jnp.result_type(old_leaf)
        ):
            raise ValueError(
                f"new and old must have equal shapes and dtypes, got {shapes} at "
                f"{jax.tree_util.keystr(path)}. Pass the same collection from after and "
                "from before the step."
            )
        trailing = (1,) * (jnp.ndim(new_leaf) - skipped.ndim)
        condition = skipped.reshape(skipped.shape + trailing)
        return jnp.where(condition, old_leaf, new_leaf)

    if jax.tree.structure(new) != jax.tree.structure(old):  # type: ignore[operator]
        raise ValueError(
            "new and old must be trees of one structure, got "
            f"{jax.tree.structure(new)} and {jax.tree.structure(old)}. Pass the same "
            "collection from after and from before the step."
        )
    same = jax.tree.leaves(jax.tree.map(lambda n, o: n is o, new, old))
    if same and all(same):
        raise ValueError(
            "new and old are the same arrays, so there is nothing to roll back to. NNX "
            "writes in place: take a copy before the step, "
            "old = jax.tree.map(jnp.copy, nnx.state(model, nnx.BatchStat))."
        )
    return jax.tree_util.tree_map_with_path(select, new, old)
