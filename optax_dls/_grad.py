"""The loss side: scale the loss, take its gradient, hand back the true value."""

import functools
import numbers
import warnings
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from ._dtypes import at_least_float32
from ._lookup import loss_scale, scaler_state, with_scaler
from ._retry import Output, check_max_retries, with_retries
from ._scaler_state import ScalerState, scaling_is_off
from ._unscale import unscale as divide_by_scale
from ._unscale import unscaled_dtypes


def scale_loss(loss: ArrayLike, state: object) -> jax.Array:
    r"""The loss times the scale, in at least float32.

    .. math:: \text{float32}(\text{loss}) \cdot S

    Args:
      loss: a real scalar of shape (). Return it in float32: the gradient that enters
        a float16 loss is S itself, in float16, so that no scale above 2**15 works.
      state: the optimizer state, or anything that holds exactly one scaler.

    Returns:
      Shape (), dtype float32 (float64 for a float64 loss). Differentiate this one, and
      give the gradient to ``tx.update``.

    Raises:
      ValueError: the loss is not a scalar, or as :func:`scaler_state`.
      TypeError: the loss is an integer, complex or no number at all.

    Warns:
      UserWarning: the loss is float16.

    Example:
      >>> import jax.numpy as jnp
      >>> import optax
      >>> import optax_dls as dls
      >>> state = dls.static_loss_scaling(optax.sgd(0.1), 128.0).init(jnp.zeros(3))
      >>> float(dls.scale_loss(jnp.float32(0.5), state))
      64.0
    """
    scaler = scaler_state(state)
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
            stacklevel=2,
        )
    if scaler.loss_scale.ndim:
        raise ValueError(
            "state must hold one scale, got scales of shape "
            f"{scaler.loss_scale.shape}. Take the step of a population under jax.vmap."
        )
    wide = at_least_float32(loss.dtype)
    return loss.astype(wide) * scaler.loss_scale.astype(wide)


def unscale(grads: optax.Updates, state: object) -> optax.Updates:
    r"""True gradients from scaled ones, for logging and for hand-written loops.

    .. math:: \text{float32}(g) / S

    ``tx.update`` takes *scaled* gradients and does this itself: do not hand it these.

    Args:
      grads: the gradients of a scaled loss.
      state: the state whose scale multiplied that loss, i.e. from *before*
        ``tx.update``, or anything that holds exactly one scaler.

    Returns:
      The same tree in at least float32. Integer, float0 and None leaves pass through.

    Raises:
      TypeError, ValueError: as :func:`scaler_state`.

    Example:
      >>> import jax.numpy as jnp
      >>> import optax
      >>> import optax_dls as dls
      >>> state = dls.static_loss_scaling(optax.sgd(0.1), 128.0).init(jnp.zeros(3))
      >>> dls.unscale({"w": jnp.array([128.0, 64.0], jnp.float16)}, state)
      {'w': Array([1. , 0.5], dtype=float32)}
    """
    return divide_by_scale(grads, loss_scale(state), unscaled_dtypes(grads))


def value_and_scaled_grad(
    fun: Callable,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    value_and_grad: Callable = jax.value_and_grad,
    max_retries: int | None = None,
) -> Callable:
    r"""Like ``jax.value_and_grad``: the true value, and the scaled gradient.

    .. math:: (\text{loss},\ \nabla (S \cdot \text{float32}(\text{loss})))

    The value comes out of the forward pass as it was, it is not divided back; so it is
    right even where the scaled one overflows.

    Args:
      fun: returns a scalar loss, or ``(loss, aux)`` with ``has_aux``.
      argnums: which positional arguments to differentiate.
      has_aux: whether ``fun`` returns auxiliary data beside the loss.
      value_and_grad: what takes the gradient. ``nnx.value_and_grad`` and
        ``eqx.filter_value_and_grad`` serve those frameworks, and
        ``functools.partial(jax.value_and_grad, allow_int=True)`` integer parameters.
      max_retries: for batches that cannot be lost, as in on-policy reinforcement
        learning: where gradients overflow, compute them again at half the scale, up to
        so many times, in a ``lax.while_loop``. The optimizer needs
        ``loss_scaling(optimizer, rules.retrying(rules.dynamic()))``. Off by default,
        since a lost batch in two thousand costs less than a second read of every
        gradient. A NaN that stays, and a loss that is not finite, lead to an ordinary
        skip with one backoff; so does a scale that is more than ``2**max_retries`` times
        too high. Devices that share a scale retry together; so do the members of a
        population that JAX cannot tell apart (``axis_name=()``).

    Returns:
      A function of the arguments of ``fun`` and of ``state=``, the optimizer state (or
      anything that holds exactly one scaler), which gives ``(loss, grads)`` or
      ``((loss, aux), grads)``. Hand the gradients to ``tx.update`` with the same state.

      With ``max_retries``, also 0, it gives ``(loss, grads, state)``: hand that state to
      ``tx.update``, which then moves the scale as if each retry had been a step that
      overflowed. Only the counters in it are new (``total_retries`` among them). The
      scale is the one that came in, and the gradients, in at least float32, are what
      that scale would have given: so it stays the only scale, and even the old state
      unscales them rightly.

    Raises:
      TypeError: ``state=`` is missing, or the loss is an integer or complex; or ``fun``
        does not return what ``has_aux`` says.
      ValueError: the loss is not a scalar, or as :func:`scaler_state`.

    Example:
      >>> import jax.numpy as jnp
      >>> import optax
      >>> import optax_dls as dls
      >>> state = dls.static_loss_scaling(optax.sgd(0.1), 128.0).init(jnp.zeros(2))
      >>> loss_fn = lambda w, x: jnp.sum(w * x)
      >>> dls.value_and_scaled_grad(loss_fn)(jnp.ones(2), jnp.arange(2.0), state=state)
      (Array(1., dtype=float32), Array([  0., 128.], dtype=float32))

      A gradient of 4 overflows float16 at 2**15 and at 2**14, but not at 2**13:

      >>> rule = dls.rules.retrying(dls.rules.dynamic(init_scale=2.0**15))
      >>> tx = dls.loss_scaling(optax.sgd(1.0), rule)
      >>> params = jnp.zeros(1)
      >>> grad_fn = dls.value_and_scaled_grad(
      ...     lambda w: jnp.sum(4.0 * w.astype(jnp.float16).astype(jnp.float32)),
      ...     max_retries=3,
      ... )
      >>> loss, grads, state = grad_fn(params, state=tx.init(params))
      >>> updates, state = tx.update(grads, state, params)
      >>> print(updates, dls.loss_scale(state), optax.tree.get(state, "total_retries"))
      [-4.] 8192.0 2
    """
    if not callable(fun):
        raise TypeError(
            f"fun must be a loss function, got {type(fun).__name__}. Pass the function, "
            "and its arguments to what this returns."
        )
    check_max_retries(max_retries)
    # Not every framework's function has argnums.
    keywords = {} if isinstance(argnums, int) and argnums == 0 else {"argnums": argnums}

    @functools.wraps(fun)
    def value_and_scaled_grad_fun(*args, state=None, **kwargs):  # type: ignore[no-untyped-def]
        if state is None:
            raise TypeError(
                "state= is missing: value_and_scaled_grad takes the scale from the "
                "optimizer state. Call value_and_scaled_grad(loss_fn)(params, ..., "
                "state=opt_state) with the opt_state that tx.init or tx.update gave."
            )
        scaler = scaler_state(state)

        def attempt(scaler: ScalerState) -> Output:
            def scaled_fun(*args, **kwargs):  # type: ignore[no-untyped-def]
                loss, aux = _split(fun(*args, **kwargs), has_aux)
                return scale_loss(loss, scaler), (loss, aux)

            differentiated = value_and_grad(scaled_fun, has_aux=True, **keywords)
            (_, value), grads = differentiated(*args, **kwargs)
            return value, grads

        if max_retries is None:
            (loss, aux), grads = attempt(scaler)
            return ((loss, aux) if has_aux else loss), grads
        ((loss, aux), grads), scaler = with_retries(attempt, scaler, max_retries)
        return ((loss, aux) if has_aux else loss), grads, with_scaler(state, scaler)

    return value_and_scaled_grad_fun


def _split(output: object, has_aux: bool) -> tuple:
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
