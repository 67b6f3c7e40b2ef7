"""An error on the host for a run that only skips, with what may be wrong with it."""

import numbers
from collections.abc import Mapping
from typing import TYPE_CHECKING

import jax
import numpy as np

from .._lookup import scaler_state
from ._run import check_is_history

if TYPE_CHECKING:
    from ._history import History


class LossScaleStalledError(RuntimeError):
    """Too many steps in a row were skipped: see :func:`raise_if_stalled`."""


def raise_if_stalled(
    state: object,
    max_consecutive_skips: int = 100,
    history: "History | Mapping[str, np.ndarray] | None" = None,
) -> None:
    """Raises once more steps in a row were skipped than scaling explains.

    Call it on the host, outside ``jit``, as often as you log: it waits for the
    device. No number of skips raises inside the update itself.

    Args:
      state: anything that holds exactly one scaler, see :func:`scaler_state`.
      max_consecutive_skips: how many are fine, at least 0. From the default start of
        2**15 down to the default floor of 2**-14 takes 29; 100 leaves room for a
        start from 2**32 and a burst of bad batches.
      history: of this run, if there is one: the error then has what :func:`diagnose`
        finds in it, instead of a general advice.

    Raises:
      LossScaleStalledError: ``consecutive_skips`` (of any member) is above the limit.
      TypeError, ValueError: as :func:`scaler_state`, or a limit or a history that is none.

    Example:
      >>> import jax.numpy as jnp
      >>> import optax
      >>> import optax_dls as dls
      >>> tx = dls.dynamic_loss_scaling(optax.sgd(0.1))
      >>> state = tx.init(jnp.zeros(1))
      >>> dls.raise_if_stalled(state)
      >>> for _ in range(3):
      ...     _, state = tx.update(jnp.array([jnp.nan]), state)
      >>> try:
      ...     dls.raise_if_stalled(state, max_consecutive_skips=2)
      ... except dls.LossScaleStalledError as error:
      ...     print(str(error).split(";")[0])
      The last 3 steps were all skipped (limit 2, total_skips=3)
    """
    if isinstance(max_consecutive_skips, bool) or not isinstance(
        max_consecutive_skips, numbers.Integral
    ):
        raise TypeError(
            "max_consecutive_skips must be a whole number of at least 0, got "
            f"{max_consecutive_skips!r}."
        )
    if max_consecutive_skips < 0:
        raise ValueError(
            f"max_consecutive_skips must be at least 0, got {max_consecutive_skips}."
        )
    if history is not None:
        check_is_history(history)
    scaler = scaler_state(state)
    if isinstance(scaler.consecutive_skips, jax.core.Tracer):
        raise TypeError(
            "raise_if_stalled reads the state on the host and cannot run inside jit, got "
            "a traced state. Call it outside the train step, on the state it returns."
        )
    skips = int(np.max(scaler.consecutive_skips))
    if skips <= max_consecutive_skips:
        return
    finite = bool(np.all(scaler.grads_finite))
    raise LossScaleStalledError(
        f"The last {skips} steps were all skipped (limit {max_consecutive_skips}, "
        f"total_skips={int(np.max(scaler.total_skips))}); the loss scale is now "
        f"{np.min(scaler.loss_scale):g}, and the gradients of the last step were "
        + ("finite, so the loss or the updates were not." if finite else "not.")
        + (_findings(history) or _general_advice(finite))
    )


def _findings(history: "History | Mapping[str, np.ndarray] | None") -> str:
    from ._diagnose import diagnose

    if history is None or not _records(history):
        return ""
    return "".join(f"\n{finding}" for finding in diagnose(history))


def _records(history: "History | Mapping[str, np.ndarray]") -> int:
    if isinstance(history, Mapping):
        return np.size(history.get("loss_scale", ()))
    return len(history)


def _general_advice(finite: bool) -> str:
    scale = " If the scale is fixed or still large, lower it; at the floor it is not the cause."
    return (
        ("" if finite else scale)
        + " Look for NaN or inf in the batch, a learning rate that made the parameters "
        "diverge, or an operation whose forward pass overflows in float16."
    )
