"""The origin of an inf or a NaN, and whether an array holds one."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._dtypes import at_least_float32, is_inexact


class Nonfinite(NamedTuple):
    """Where the first inf or NaN came from; ``str()`` says it in a sentence.

    Attributes:
      kind: "operation"; "argument", which was not finite when it came in; or "constant",
        a literal or an array that the function closes over.
      name: the JAX primitive, or the path of the argument; "" for a constant.
      dtype: of the array that is not finite.
      shape: of the same array.
      value: "nan", "inf" or "-inf": the first of these that it holds.
      inputs_finite: false for an operation that made NaN from an inf that was a constant.
      source: "file.py:12 (function)", where the operation is written or the constant is
        used; "" where JAX does not know.
      inside: the calls around it, outermost first, such as ("jit(loss)",
        "scan, iteration 3", "cond, branch 1"). They count from 0, as indices do: the
        iteration of a scan is the index into ``xs``, also of a reversed one.
      backward: whether it belongs to the backward pass of a gradient.
    """

    kind: str
    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    value: str
    inputs_finite: bool = True
    source: str = ""
    inside: tuple[str, ...] = ()
    backward: bool = False

    def __str__(self) -> str:
        array = f"{self.dtype}[{','.join(map(str, self.shape))}]"
        if self.kind == "argument":
            return f"{self.name} ({array}) holds {self.value} already when it comes in"
        if self.kind == "constant":
            text = f"a constant of the function ({array}) holds {self.value}"
        else:
            inputs = "finite inputs" if self.inputs_finite else "a constant inf"
            text = f"{self.name} made {self.value} ({array}) from {inputs}"
        text += f", at {self.source}" if self.source else ""
        text += f", inside {' > '.join(self.inside)}" if self.inside else ""
        return text + (", in the backward pass" if self.backward else "")


def nonfinite(array: Any) -> str | None:
    """The first of "nan", "inf" and "-inf" that an array holds, or None."""
    if isinstance(array, jax.Ref) or not is_inexact(array):
        return None
    flags = np.asarray(_flags(array))
    return next(
        (v for v, f in zip(("nan", "inf", "-inf"), flags, strict=True) if f), None
    )


@jax.jit
def _flags(array: jax.Array) -> jax.Array:
    if jnp.iscomplexobj(array):
        array = jnp.stack([array.real, array.imag])
    wide = array.astype(at_least_float32(array.dtype))  # float8 has no inf to compare
    is_inf = jnp.isinf(wide)
    kinds = jnp.isnan(wide), is_inf & (wide > 0), is_inf & (wide < 0)
    return jnp.stack([jnp.any(kind) for kind in kinds])
