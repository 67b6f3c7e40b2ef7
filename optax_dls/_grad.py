"""The loss side: scale the loss, take its gradient, hand back the true value."""

import functools
from collections.abc import Callable, Sequence

import jax
import optax
from jax.typing import ArrayLike

from . import _grad_checks
from ._dtypes import at_least_float32
from ._lookup import with_scaler
from ._retry import Output, check_max_retries, with_retries
from ._scaler_state import ScalerState, scaling_is_off
from ._unscale import Mask, unscaled_dtypes
from ._unscale import unscale as divide_by_scale
from ._unscaled_tag import tag_unscaled
from ._variables import with_copied_variables, write_values, written_values


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
    scaler = _grad_checks.one_scaler(state)
    loss = _grad_checks.checked_loss(loss, scaler)
    wide = at_least_float32(loss.dtype)
    with jax.named_scope("scale_loss"):
        return loss.astype(wide) * scaler.loss_scale.astype(wide)


def unscale(
    grads: optax.Updates, state: object, *, mask: Mask | None = None
) -> optax.Updates:
    r"""True gradients from scaled ones, for logging and for hand-written loops.

    .. math:: \text{float32}(g) / S

    ``tx.update`` takes *scaled* gradients and does this itself: do not hand it these.

    Args:
      grads: the gradients of a scaled loss.
      state: the state whose scale multiplied that loss, i.e. from *before*
        ``tx.update``, or anything that holds exactly one scaler.
      mask: as for :func:`value_and_scaled_grad`.

    Returns:
      The same tree in at least float32. Integer, float0 and None leaves pass through, and
      so do those that ``mask`` leaves out and those under a key
      ``_overwrite_with_gradient``.

    Raises:
      TypeError, ValueError: as :func:`scaler_state`; ValueError also for the state of a
        population, which is unscaled under ``jax.vmap``.

    Example:
      >>> import jax.numpy as jnp
      >>> import optax
      >>> import optax_dls as dls
      >>> state = dls.static_loss_scaling(optax.sgd(0.1), 128.0).init(jnp.zeros(3))
      >>> dls.unscale({"w": jnp.array([128.0, 64.0], jnp.float16)}, state)
      {'w': Array([1. , 0.5], dtype=float32)}
    """
    scaler = _grad_checks.one_scaler(state)
    unscaled = divide_by_scale(grads, scaler.loss_scale, unscaled_dtypes(grads, mask))
    if not scaling_is_off(scaler):
        tag_unscaled(unscaled, grads)
    return unscaled


def value_and_scaled_grad(
    fun: Callable,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    value_and_grad: Callable = jax.value_and_grad,
    max_retries: int | None = None,
    mask: Mask | None = None,
) -> Callable:
    r"""Like ``jax.value_and_grad``: the true value, and the scaled gradient.

    .. math:: (\text{loss},\ \nabla (S \cdot \text{float32}(\text{loss})))

    The value is that of the forward pass. It is not divided back, so it is right even
    where the scaled one overflows.

    Args:
      fun: returns a scalar loss, or ``(loss, aux)`` with ``has_aux``. If an argument of
        its own is named ``state``, pass that one positionally.
      argnums: which positional arguments to differentiate.
      has_aux: whether ``fun`` returns auxiliary data beside the loss.
      value_and_grad: what takes the gradient. ``nnx.value_and_grad`` and
        ``eqx.filter_value_and_grad`` serve those frameworks, and
        ``functools.partial(jax.value_and_grad, allow_int=True)`` integer parameters. A
        function of your own may accumulate over micro-batches, as below. It is called as
        ``value_and_grad(scaled_fun, has_aux=True)``, with ``argnums`` if they are not 0.
      max_retries: how often to take a gradient again that overflows, each time at half
        the scale; see below. At most 226, from the largest scale to the smallest.
      mask: which gradients are linear in the loss, a tree of bools like the gradients, or
        a prefix of it, or a function that makes it of them. Where it is False, retries
        leave the leaf as it is, neither rescaled nor checked. Leaves under a key
        ``_overwrite_with_gradient``, where Flax keeps the float8 scales, are left out
        without it.

    Returns:
      A function of the arguments of ``fun`` and of ``state=``, the optimizer state (or
      anything that holds exactly one scaler), which gives ``(loss, grads)`` or
      ``((loss, aux), grads)``. Hand the gradients to ``tx.update`` with the same state.
      With ``max_retries``, also 0, it gives ``(loss, grads, state)``.

      ``jax.vmap`` maps every keyword argument, so bind the state of one scaler first:
      ``jax.vmap(functools.partial(grad_fn, state=state), in_axes=(None, 0))``.

    Retries:
      They are for batches that cannot be lost, as in on-policy reinforcement learning.
      They are off by default, since a lost batch in two thousand costs less than a second
      read of every gradient.

      - Build the optimizer as ``loss_scaling(optimizer,
        rules.retrying(rules.dynamic()))``.
      - Hand the state that comes back to ``tx.update``, or to the next call where several
        gradients make one update. The scale then moves as if each retry had been a step
        that overflowed. Of several gradients, the one with the most retries counts.
      - Only counters are new in that state, among them ``total_retries``. Its scale is
        still S, and the gradients are those of S, in at least float32.
      - What no retry mends is an ordinary skip with one backoff: a NaN that stays, or a
        scale that is more than ``2**max_retries`` times too high. A loss that is not
        finite is not retried.
      - Devices that share a scale retry together. So do the members of a population that
        JAX cannot tell apart (``axis_name=()``).
      - Each attempt starts from the same NNX variables, such as batch statistics and
        random counters. They keep what the last attempt wrote.
      - For gradients of single examples, map inside a ``value_and_grad`` of your own.
        Under an outer ``jax.vmap`` each example retries and counts alone.

    Raises:
      TypeError: ``state=`` is missing, or the loss is an integer or complex; or ``fun``
        does not return what ``has_aux`` says; or an argument to differentiate is not all
        floats.
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
      >>> def loss_fn(w, x):
      ...     return jnp.sum(x * w.astype(jnp.float16).astype(jnp.float32))
      >>> grad_fn = dls.value_and_scaled_grad(loss_fn, max_retries=3)
      >>> loss, grads, state = grad_fn(params, 4.0, state=tx.init(params))
      >>> updates, state = tx.update(grads, state, params)
      >>> print(updates, dls.loss_scale(state), optax.tree.get(state, "total_retries"))
      [-4.] 8192.0 2

      The mean over micro-batches, retried as a whole:

      >>> def mean_of_micro_batches(fun, has_aux):
      ...     grad_fn = jax.value_and_grad(fun, has_aux=has_aux)
      ...     def mean(params, batches):
      ...         def add(total, batch):
      ...             return jax.tree.map(jnp.add, total, grad_fn(params, batch)), None
      ...         shapes = jax.eval_shape(grad_fn, params, batches[0])
      ...         zeros = jax.tree.map(jnp.zeros_like, shapes)
      ...         total, _ = jax.lax.scan(add, zeros, batches)
      ...         return jax.tree.map(lambda x: x / len(batches), total)
      ...     return mean
      >>> grad_fn = dls.value_and_scaled_grad(
      ...     loss_fn, value_and_grad=mean_of_micro_batches, max_retries=3
      ... )
      >>> loss, grads, state = grad_fn(params, jnp.array([8.0, 4.0]), state=state)
      >>> print(dls.unscale(grads, state), optax.tree.get(state, "total_retries"))
      [6.] 3
    """
    if not callable(fun):
        raise TypeError(
            f"fun must be a loss function, got {type(fun).__name__}. Pass the function, "
            "and its arguments to what this returns."
        )
    _grad_checks.check_argnums(argnums, value_and_grad)
    check_max_retries(max_retries)
    # Not every framework's function has argnums.
    keywords = {} if isinstance(argnums, int) and argnums == 0 else {"argnums": argnums}

    def attempt(scaler: ScalerState, args: tuple, kwargs: dict) -> Output:
        def scaled_fun(*args, **kwargs):  # type: ignore[no-untyped-def]
            output = fun(*args, **kwargs)
            loss, aux = _grad_checks.split_output(output, has_aux)
            return scale_loss(loss, scaler), (loss, aux)

        differentiated = value_and_grad(scaled_fun, has_aux=True, **keywords)
        (_, value), grads = differentiated(*args, **kwargs)
        return value, grads

    @functools.wraps(fun)
    def value_and_scaled_grad_fun(*args, state=None, **kwargs):  # type: ignore[no-untyped-def]
        scaler = _grad_checks.scaler_for(fun, state, args, kwargs)
        if value_and_grad is jax.value_and_grad:
            _grad_checks.check_differentiable(args, argnums)
        if max_retries is None:
            (loss, aux), grads = attempt(scaler, args, kwargs)
            return ((loss, aux) if has_aux else loss), grads

        def attempt_on_copies(scaler: ScalerState) -> Output:
            copies = with_copied_variables((args, kwargs))
            (loss, aux), grads = attempt(scaler, *copies)
            written = written_values(copies, (args, kwargs))
            return (loss, (aux, written)), grads

        output, scaler = with_retries(attempt_on_copies, scaler, max_retries, mask)
        (loss, (aux, written)), grads = output
        write_values((args, kwargs), written)
        return ((loss, aux) if has_aux else loss), grads, with_scaler(state, scaler)

    return value_and_scaled_grad_fun
