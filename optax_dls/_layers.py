"""A loss scale for one layer: set before its backward pass, undone right after it."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from ._devices import agree, largest_on_all_devices
from ._dtypes import cast_to_float32, is_inexact
from ._finite import all_finite, largest_finite
from ._stable_types import zeros_of_type
from ._unscale import unscale, unscaled_dtypes

# Eleven binary orders below the end of float16, for the sums inside of a layer.
LOG2_LARGEST_COTANGENT = 5
BACKOFF_FACTOR = 2.0**-8
ATTEMPTS = 4
# The name of these operations in profiles, beside those of the layer.
_scope = functools.partial(jax.named_scope, "layer_scaling")


def layer_scaling(fn: Callable) -> Callable:
    r"""Runs the backward pass of one layer at a scale of its own.

    With :math:`\bar y` the gradient that arrives at the output, :math:`J` the derivative
    of the layer, and :math:`s` the power of two that brings the largest :math:`|\bar y|`
    just below 2**5:

    .. math:: (\bar\theta, \bar x) = \tfrac1s J^T (s \bar y)

    Where that overflows, it is taken again with s / 2**8, up to three times. What is not
    finite then is handed on, and the step is skipped.

    The product is taken in the dtype of the layer, everything around it in float32. So
    between layers gradients have the range of float32, and in deep float16 networks
    whose early layers underflow under any single loss scale, they no longer do. The
    forward pass is that of ``fn``.

    A scale for the whole loss is not needed for such layers, but keep the optimizer under
    ``dynamic_loss_scaling`` for the rest, and for the skips.

    Args:
      fn: a layer, a function of its parameters and inputs, all of which are positional
        arguments and arrays (bind settings with ``functools.partial``). A parameter that it
        closes over instead ends in JAX's ``UnexpectedTracerError``. It takes float32 inputs
        (those of other scaled layers are) and casts them itself, as Flax modules do with
        ``dtype=``. All its outputs share one scale: add the residual outside.

    Returns:
      ``fn`` with float32 outputs in the place of half-precision ones, and gradients in
      float32 for float32 arguments. Reverse mode only, and once: no second derivatives.
      On several devices each layer costs two small all-reduces; collectives inside of it
      are fine, except over an axis of ``vmap``.

    Raises:
      TypeError: ``fn`` is not callable, or an argument is no array.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import optax_dls as dls
      >>> def layer(w, x):
      ...     return x.astype(jnp.float16) @ w.astype(jnp.float16)
      >>> w, x = jnp.full((2, 2), 0.5), jnp.ones((1, 2))
      >>> def loss(w, layer):
      ...     return 1e-9 * jnp.sum(layer(w, x).astype(jnp.float32))
      >>> print(jax.grad(loss)(w, layer)[0])  # 1e-9 is zero in float16
      [0. 0.]
      >>> print(jax.grad(loss)(w, dls.layer_scaling(layer))[0].round(12))
      [1.e-09 1.e-09]

    References:
      Zhao, Vogel and Ahmed, `Adaptive Loss Scaling for Mixed Precision Training
      <https://arxiv.org/abs/1910.12385>`_, 2019, whose scales accumulate from layer to
      layer; here each is undone at once, so that layers need not know of each other.
    """
    if not callable(fn):
        raise TypeError(
            f"fn must be a layer, a function of its parameters and inputs, got "
            f"{type(fn).__name__}. For a Flax module pass module.apply."
        )

    @functools.wraps(fn)
    def scaled_fn(*args):  # type: ignore[no-untyped-def]
        _check_args(args)
        dtypes = jax.tree.map(jnp.result_type, args)

        def narrow_fn(*wide_args):  # type: ignore[no-untyped-def]
            return fn(*jax.tree.map(_astype, wide_args, dtypes))

        @jax.custom_vjp
        def call(*wide_args):  # type: ignore[no-untyped-def]
            return cast_to_float32(narrow_fn(*wide_args))

        def forward(*wide_args):  # type: ignore[no-untyped-def]
            output, vjp = jax.vjp(narrow_fn, *wide_args)
            return cast_to_float32(output), (vjp, output)

        def backward(residuals, cotangents):  # type: ignore[no-untyped-def]
            vjp, output = residuals

            def attempt(scale):  # type: ignore[no-untyped-def]
                with _scope():
                    scaled = jax.tree.map(
                        lambda g, y: _times(g, scale, y.dtype), cotangents, output
                    )
                grads = vjp(scaled)
                with _scope():
                    return unscale(grads, scale, unscaled_dtypes(grads))

            return _first_finite(attempt, _first_scale(cotangents))

        call.defvjp(forward, backward)
        return call(*cast_to_float32(args))

    return scaled_fn


def _times(g: jax.Array, scale: jax.Array, dtype: jnp.dtype) -> jax.Array:
    if not is_inexact(g):  # float0, of an output that is no float
        return g
    return (g * scale.astype(jnp.finfo(g.dtype).dtype).astype(g.dtype)).astype(dtype)


def _astype(leaf: jax.Array, dtype: jnp.dtype) -> jax.Array:
    return leaf if jnp.result_type(leaf) == dtype else leaf.astype(dtype)


def _check_args(args: tuple) -> None:
    for path, leaf in jax.tree_util.tree_flatten_with_path(args)[0]:
        if isinstance(leaf, bool) or not isinstance(
            leaf, jax.Array | np.ndarray | np.generic | int | float | complex
        ):
            raise TypeError(
                f"args{jax.tree_util.keystr(path)} must be an array, got {leaf!r}. Bind what "
                "is not one: layer_scaling(functools.partial(layer, train=True))."
            )


@_scope()
def _first_scale(cotangents: optax.Updates) -> jax.Array:
    """The power of two that brings the largest cotangent just below the limit."""
    # Layers may sum over devices, which have to scale alike then.
    largest = largest_on_all_devices(
        largest_finite(cotangents), jnp.float32(1), axis_name=None
    )
    _, exponent = jnp.frexp(largest)
    # The reciprocal of 2**127 is no normal number. From below there is no such limit: the
    # scale of the largest float32 number is 2**-123.
    exponent = jnp.minimum(LOG2_LARGEST_COTANGENT - exponent, 126)
    return jnp.ldexp(jnp.ones_like(largest), exponent)


def _first_finite(
    attempt: Callable[[jax.Array], optax.Updates], scale: jax.Array
) -> optax.Updates:
    """The gradients at the first of a few ever smaller scales that gives finite ones."""

    def body(carry):  # type: ignore[no-untyped-def]
        scale, count, *_ = carry
        grads = attempt(scale)
        with _scope():
            # One decision, since a layer may wait for other devices.
            (finite,) = agree([all_finite(grads)], jnp.float32(1), None)
        return scale * BACKOFF_FACTOR, count + 1, finite, grads

    start = (scale, jnp.zeros_like(scale, jnp.int32))
    outputs = jax.eval_shape(body, (*start, None, None))[2:]
    carry = (*start, *jax.tree.map(zeros_of_type, outputs))
    return lax.while_loop(lambda carry: ~carry[2] & (carry[1] < ATTEMPTS), body, carry)[
        -1
    ]
