"""Float32 copies of half-precision parameters, for updates too small for float16."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from ._dtypes import at_least_float32, is_array, is_inexact


class MasterWeightsState(NamedTuple):
    """State of :func:`master_weights`.

    Attributes:
      master: float32 values of the half-precision parameters; None for every other leaf.
      inner_state: state of the wrapped transformation.
    """

    master: optax.Params
    inner_state: optax.OptState


def master_weights(
    tx: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    r"""Keeps float32 values of half-precision parameters, and updates those.

    With the parameters :math:`p`, their float32 values :math:`m` and the updates
    :math:`u` of ``tx``:

    .. math::

      m_{t+1} = m_t + u(m_t), \qquad p_{t+1} = \text{float16}(m_{t+1})

    float16 has 11 binary digits: an update of less than 2**-12 of its parameter rounds
    away when it is added, whatever the loss scale is. Added to the float32 value it adds
    up with those of later steps. Float32 parameters that the loss function casts to
    float16 do the same, and are the simpler way; take this one where the parameters
    themselves have to be float16 or bfloat16. It costs 4 bytes for each of them.

    Args:
      tx: the whole optimizer, with its loss scaling. This is the one wrapper that goes
        around ``dynamic_loss_scaling`` and not into it, since it has to see the
        parameters as they are. Their values are left as they were on a skipped step.

    Returns:
      A transformation with state :class:`MasterWeightsState`. Its updates are such that
      ``optax.apply_updates`` gives exactly the rounded float32 values, as long as a
      parameter does not change by a factor of more than 2**13 in one step. Other leaves
      pass through. ``update`` needs ``params``.

    Raises:
      TypeError: ``tx`` is not a gradient transformation.
      ValueError: ``update`` is called without ``params``.

    Example:
      >>> import jax.numpy as jnp
      >>> import optax
      >>> import optax_dls as dls
      >>> tx = dls.master_weights(dls.static_loss_scaling(optax.sgd(1e-4), 8.0))
      >>> params = jnp.ones(1, jnp.float16)
      >>> state = tx.init(params)
      >>> for _ in range(10):  # 1 - 1e-4 is 1 in float16
      ...     updates, state = tx.update(jnp.array([8.0]), state, params)
      ...     params = optax.apply_updates(params, updates)
      >>> print(params, f"{state.master[0]:.4f}")
      [0.999] 0.9990

    References:
      Micikevicius et al., `Mixed Precision Training
      <https://arxiv.org/abs/1710.03740>`_, 2018, section 3.1
    """
    if not callable(getattr(tx, "init", None)):
        raise TypeError(
            "tx must be an optax.GradientTransformation, got "
            f"{type(tx).__name__}. Write master_weights(dynamic_loss_scaling(optimizer))."
        )
    tx = optax.with_extra_args_support(tx)

    def init(params: optax.Params) -> MasterWeightsState:
        master = jax.tree.map(_float32_value, params)
        return MasterWeightsState(master, tx.init(_filled(master, params)))

    def update(
        grads: optax.Updates,
        state: MasterWeightsState,
        params: optax.Params | None = None,
        **extra_args: ArrayLike | Callable,
    ) -> tuple[optax.Updates, MasterWeightsState]:
        if params is None:
            raise ValueError(
                "master_weights needs the parameters: tx.update(grads, state, params)."
            )
        updates, inner_state = tx.update(
            grads, state.inner_state, _filled(state.master, params), **extra_args
        )
        master = jax.tree.map(_add, state.master, updates, is_leaf=_is_none)
        updates = jax.tree.map(_to, master, params, updates, is_leaf=_is_none)
        return updates, MasterWeightsState(master, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _is_none(leaf: object) -> bool:
    return leaf is None


def _float32_value(p: ArrayLike) -> ArrayLike | None:
    """A float32 copy of a half-precision parameter, else None."""
    if not is_array(p) or not is_inexact(p):
        return None
    dtype = jnp.result_type(p)
    if at_least_float32(dtype) == dtype:
        return None
    if isinstance(p, jax.ShapeDtypeStruct):
        return p.update(dtype=at_least_float32(dtype))
    return jnp.asarray(p, at_least_float32(dtype))


def _filled(master: optax.Params, params: optax.Params) -> optax.Params:
    """The parameters, with the float32 values where there are some."""
    return jax.tree.map(
        lambda m, p: p if m is None else m, master, params, is_leaf=_is_none
    )


def _add(m: jax.Array | None, u: ArrayLike | None) -> jax.Array | None:
    return m if m is None or u is None else m + jnp.asarray(u, m.dtype)


def _to(m: jax.Array | None, p: ArrayLike, u: ArrayLike | None) -> ArrayLike | None:
    """The update that takes ``p`` to the rounded ``m``; -0.0, which changes no bit, if none."""
    if m is None or u is None:
        return u
    # XLA may leave out the rounding of a cast and its way back, on GPUs for one.
    rounded = jax.lax.optimization_barrier(m.astype(jnp.result_type(p)))
    old, new = jnp.asarray(p, m.dtype), rounded.astype(m.dtype)
    return jnp.where(new == old, -jnp.zeros_like(m), new - old)
