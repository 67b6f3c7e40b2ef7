"""Which operation made the first inf or NaN?

``jax.debug_nans`` names an operation too, but of a loop, a ``cond`` or a fused program
only the whole; ``checkify`` sees no inf, so no float16 overflow. Hence own code.
"""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._nonfinite import Nonfinite, nonfinite

_NUMBERS = jax.Array | np.ndarray | np.generic | float | complex


def locate_nonfinite(fn: Callable, /, *args: Any, **kwargs: Any) -> Nonfinite | None:
    """The operation from which the first inf or NaN in the outputs of ``fn`` came.

    For debugging, on the host: runs ``fn`` operation by operation. It looks into ``jit``,
    ``checkpoint``, custom derivatives, the branch that ``cond`` takes, and the first 1000
    iterations of ``scan`` and ``while_loop``.

    To search the backward pass as well, give it a function that computes gradients. Such
    a function needs the loss scale of the step that failed, so give it the state from
    *before* that step, with the parameters and the batch from before it. The ``tx.update``
    of that step has lowered the scale, and at a lower scale the same gradient may be
    finite.

    Each operation runs by itself, in its own dtype. A compiled program may keep more
    precision between operations that it fuses, so it can overflow elsewhere or not at all.

    An inf or NaN is reported only if it reaches an output: not the one that ``jnp.where``
    drops, nor the -inf of a mask before ``softmax``. It is followed back to the first
    operation that made it from finite inputs, or that made NaN from a constant inf. Arrays
    are followed as a whole, so a second fault in an array that holds an inf already is
    not told apart.

    A factor of a derivative that JAX computes in the forward pass, such as the
    ``0.5 / sqrt(x)`` of ``sqrt``, belongs to the forward pass. For the backward rule of a
    ``custom_vjp`` the line is the one where the function is called.

    Some things are one operation, and it does not look into them: ``shard_map``, ``pmap``,
    Pallas kernels, ``custom_linear_solve`` and other primitives that hold functions, and a
    loop whose fault comes after iteration 1000. What is written into a ``jax.Ref`` is not
    followed.

    Args:
      fn: anything that ``jax.jit`` takes.
      *args: its arguments. Arrays and floats are traced; integers, bools, strings and
        the like are passed as they are. An argument that holds inf on purpose, such as a
        mask to be added, is reported like any other: let ``fn`` close over it instead.
      **kwargs: its keyword arguments, likewise.

    Returns:
      None if every output is finite, else where the first inf or NaN began. An argument
      that is not finite comes before anything else. A constant that is not finite, such as
      a batch that ``fn`` closes over, is reported if no operation is to blame.

    Raises:
      TypeError: ``fn`` is no function, or the call is inside ``jit`` or another
        transformation, where there are no values to look at.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import optax
      >>> import optax_dls as dls
      >>> @jax.jit
      ... def loss_fn(w):
      ...     return jnp.mean(jnp.exp(w.astype(jnp.float16)).astype(jnp.float32))
      >>> fault = dls.locate_nonfinite(jax.value_and_grad(loss_fn), jnp.array([1.0, 12.0]))
      >>> fault.name, str(fault.dtype), fault.value, fault.inside
      ('exp', 'float16', 'inf', ('jit(loss_fn)',))
      >>> print(dls.locate_nonfinite(loss_fn, jnp.array([1.0, jnp.nan])))
      args[0] (float32[2]) holds nan already when it comes in
      >>> print(dls.locate_nonfinite(loss_fn, jnp.array([1.0, 2.0])))
      None

      The step that overflowed, with the state that it started from:

      >>> def scaled(w):
      ...     return jnp.sum(w.astype(jnp.float16).astype(jnp.float32))
      >>> tx, params = dls.dynamic_loss_scaling(optax.sgd(0.1), init_scale=2.0**16), jnp.ones(2)
      >>> before = tx.init(params)
      >>> grad_fn = dls.value_and_scaled_grad(scaled)
      >>> _, grads = grad_fn(params, state=before)
      >>> _, after = tx.update(grads, before, params)
      >>> def at(state):
      ...     return dls.locate_nonfinite(lambda w: grad_fn(w, state=state), params)
      >>> at(before).name, at(after)
      ('convert_element_type', None)
    """
    if not callable(fn):
        raise TypeError(
            f"fn must be a function, got {type(fn).__name__}. Pass the function, and its "
            "arguments after it: locate_nonfinite(loss_fn, params, batch)."
        )
    paths, treedef = jax.tree_util.tree_flatten_with_path((args, kwargs))
    leaves = [leaf for _, leaf in paths]
    traced = [i for i, leaf in enumerate(leaves) if isinstance(leaf, _NUMBERS)]
    _check_concrete(leaves)
    for i in traced:
        if value := nonfinite(leaves[i]):
            path = ("args", "kwargs")[paths[i][0][0].idx]
            name = path + jax.tree_util.keystr(paths[i][0][1:])
            dtype, shape = jnp.result_type(leaves[i]), np.shape(leaves[i])
            return Nonfinite("argument", name, dtype, shape, value)

    # Here, as it takes longer to import than all the rest, for a few users.
    from ._interpret import Interpreter, Place, Value

    def flat_fn(*arrays: jax.Array) -> list:
        filled = dict(enumerate(leaves)) | dict(zip(traced, arrays, strict=True))
        args, kwargs = jax.tree.unflatten(treedef, filled.values())
        outputs = jax.tree.leaves(fn(*args, **kwargs))
        return [x for x in outputs if isinstance(x, _NUMBERS)]

    inputs = [leaves[i] for i in traced]
    closed = jax.make_jaxpr(flat_fn)(*inputs)
    _check_concrete(closed.consts)
    interpreter = Interpreter()
    # They would raise at the first inf that is harmless.
    with jax.debug_nans(False), jax.debug_infs(False):
        outputs = interpreter.run(closed, [Value(x) for x in inputs], Place())
    fault = interpreter.earliest(outputs)
    return None if fault is None else interpreter.faults[fault]


def _check_concrete(arrays: Iterable[object]) -> None:
    if any(isinstance(array, jax.core.Tracer) for array in arrays):
        raise TypeError(
            "locate_nonfinite looks at values, so it runs on the host: call it outside "
            "jit, grad, vmap and scan, on a function that holds them inside, such as "
            "locate_nonfinite(jax.grad(loss_fn), params)."
        )
