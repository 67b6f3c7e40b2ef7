"""The scaler inside any training state: read it, log it, act on a skip."""

import numbers
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from ._scaler_state import (
    LossScalingState,
    ScalerState,
    holds_scaler,
    scaling_is_off,
)

Tree = TypeVar("Tree")

# Wrappers that a scaler must not be under, and the order that works instead.
_HIDES_SCALER = {
    optax.MultiStepsState: (
        "MultiSteps",
        "one overflow stays in its accumulator for ever",
        "MultiSteps(optimizer, k).gradient_transformation()",
    ),
    optax.ApplyIfFiniteState: (
        "apply_if_finite",
        "the scaler never hears of an overflow",
        "apply_if_finite(optimizer, n)",
    ),
    optax.ConditionallyTransformState: (
        "conditionally_transform",
        "the scaler misses steps, and the scaled gradient becomes the update",
        "conditionally_transform(optimizer, condition)",
    ),
    optax.ConditionallyMaskState: (
        "conditionally_mask",
        "the scaler misses steps",
        "conditionally_mask(optimizer, condition)",
    ),
    optax.MaskedState: (
        "masked",
        "the other leaves get the scaled gradient as their update",
        "masked(optimizer, mask)",
    ),
    optax.contrib.SAMState: (
        "contrib.sam",
        "one overflow stays in its cache for ever",
        "contrib.sam(optimizer, adversary)",
    ),
    optax.PartitionState: (
        "partition",
        "one loss has one scale, but the groups would be scaled apart",
        "partition(optimizers, labels)",
    ),
}


def scaler_state(state: object) -> ScalerState:
    """The one scaler that a training state holds.

    Args:
      state: the optimizer state, or anything that contains it: the state of a
        ``chain``, ``named_chain`` or ``inject_hyperparams``, a Flax ``TrainState``, an
        ``nnx.Optimizer``, replicated or sharded.

    Returns:
      Its :class:`ScalerState`, as plain arrays.

    Raises:
      TypeError: ``state`` is None or a number.
      ValueError: it holds no scaler, or more than one, or one under a wrapper that
        breaks loss scaling (``MultiSteps``, ``apply_if_finite``, ``conditionally_*``,
        ``masked``, ``partition``). The message has the cure.

    Example:
      >>> import jax.numpy as jnp
      >>> import optax
      >>> import optax_dls as dls
      >>> tx = optax.named_chain(("main", dls.dynamic_loss_scaling(optax.sgd(0.1))))
      >>> state = tx.init(jnp.zeros(3))
      >>> float(dls.scaler_state(state).loss_scale)
      32768.0
    """
    if state is None or isinstance(state, numbers.Number | jax.Array | np.ndarray):
        raise TypeError(
            "state must be the optimizer state that tx.init or tx.update gave, got "
            f"{state!r}. Not a number: a scale kept apart goes stale, and then gradients "
            "are wrong by a factor."
        )
    stops = (LossScalingState, ScalerState, *_HIDES_SCALER)
    nodes, _ = jax.tree_util.tree_flatten_with_path(
        state, is_leaf=lambda node: isinstance(node, stops)
    )
    found = []
    for path, node in nodes:
        if isinstance(node, LossScalingState | ScalerState):
            found.append((jax.tree_util.keystr(path) or "the state itself", node))
        elif isinstance(node, stops) and holds_scaler(node):
            wrapper, harm, right = _HIDES_SCALER[type(node)]
            raise ValueError(
                f"state has a loss scaler under optax.{wrapper}, where {harm}. Put the "
                f"scaler outside: dynamic_loss_scaling({right})."
            )
    if not found:
        raise ValueError(
            "state holds no loss scaler: found no LossScalingState in "
            f"{type(state).__name__}. Wrap the optimizer, "
            "tx = dynamic_loss_scaling(optimizer) (no_loss_scaling(optimizer) for "
            "float32 and bfloat16), and pass the state that tx.init(params) gives. The state "
            "of an optimizer that ran without loss scaling goes under a new scaler by "
            "tx.init(params)._replace(inner_state=old_state)."
        )
    if len(found) > 1:
        where = ", ".join(path for path, _ in found)
        raise ValueError(
            f"state holds {len(found)} loss scalers, at {where}, but one loss has one "
            "scale. Pass the part of the state that belongs to this loss; several "
            "parameter groups under one loss go inside one wrapper: "
            "dynamic_loss_scaling(partition(...))."
        )
    ((_, node),) = found
    if isinstance(node, LossScalingState):
        if holds_scaler(node.inner_state):
            raise ValueError(
                "state has a loss scaler around a loss scaler, but one loss has one "
                "scale. Give _replace(inner_state=...) the inner state alone: "
                "old.inner_state."
            )
        node = node.scaler
    if scaling_is_off(node):
        # Also where a checkpoint of another wrapper was restored into this state.
        node = node._replace(loss_scale=jnp.ones((), jnp.float32))
    # The arrays may be boxed, as in nnx.Optimizer.
    return jax.tree.map(
        jnp.asarray, node, is_leaf=lambda leaf: hasattr(leaf, "__jax_array__")
    )


def with_scaler(state: Tree, scaler: ScalerState) -> Tree:
    """``state`` with the values of another scaler, each boxed as it was."""

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
