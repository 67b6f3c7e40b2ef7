"""One record of a history: the names in it, the values, and what is missing."""

import math
import numbers
from collections.abc import Mapping
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

Scalar = bool | int | float | str
Row = dict[str, Scalar]
Texts = tuple[str | None, ...]  # one for each of many steps
Values = dict[str, jax.Array | np.ndarray | Scalar | Texts]

METRICS = {
    "loss_scale": np.float32,
    "grads_finite": np.bool_,
    "consecutive_skips": np.int32,
    "total_skips": np.int32,
}
_LARGEST = {"step": 2**63, "consecutive_skips": 2**31, "total_skips": 2**31}
# JSON has no such numbers. As text they stay apart from a value that is missing.
NOT_IN_JSON = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def named_values(
    metrics: Mapping[str, ArrayLike], loss: object, extras: Mapping[str, object]
) -> Values:
    """All that one call gave, checked and by name; nothing is read from a device."""
    if not isinstance(metrics, Mapping) or not set(METRICS) <= set(metrics):
        got = f"the keys {list(metrics)}" if isinstance(metrics, Mapping) else metrics
        got = got if isinstance(got, str) else type(metrics).__name__
        raise TypeError(
            "metrics must be the dict of optax_dls.metrics(opt_state), with "
            f"{', '.join(METRICS)}; got {got}. Pass dls.metrics(opt_state), with the "
            "state that tx.update gave."
        )
    given = {"loss": loss, **extras}
    twice = [name for name in metrics if name == "step" or given.get(name) is not None]
    twice += [name for name in given if name in METRICS and name not in twice]
    if twice:
        raise ValueError(
            f"The name {twice[0]!r} is given twice, or belongs to the history itself. "
            "Give step and loss as keywords, and everything else a name of its own."
        )
    values = [*metrics.items(), *given.items()]
    return {name: _checked(name, value) for name, value in values if value is not None}


def _checked(name: str, value: object) -> jax.Array | np.ndarray | Scalar | Texts:
    if isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype.kind in "UO":
        value = value.tolist()
    if isinstance(value, list | tuple):
        if not all(text is None or isinstance(text, str) for text in value):
            raise TypeError(
                f"{name} must be a real number, a bool or a string, and of many steps an "
                "array or a list of strings and None; got "
                f"{list(value)[:3]!r}..."
            )
        return tuple(
            None if text is None else _checked_text(name, text) for text in value
        )
    if isinstance(value, jax.core.Tracer):
        raise TypeError(
            f"{name} is traced: a History lives on the host and cannot be used inside "
            "jit, scan or vmap. Return dls.metrics(state) from the traced function, and "
            "append it outside (history.extend(stacked) after lax.scan)."
        )
    if isinstance(value, str):
        return _checked_text(name, value)
    if isinstance(value, bool | int | float) and not isinstance(value, np.generic):
        return value
    if isinstance(value, jax.Array | np.ndarray | np.generic) and (
        value.dtype == bool
        or jnp.issubdtype(value.dtype, jnp.floating)
        or jnp.issubdtype(value.dtype, jnp.integer)
    ):
        if isinstance(value, jax.Array):
            return value
        host = np.asarray(value)
        return host if host.shape else plain(host)
    raise TypeError(
        f"{name} must be a real number, a bool or a string, got "
        f"{getattr(value, 'dtype', type(value).__name__)}. Log one scalar by name, e.g. "
        "norm=optax.tree.norm(grads)."
    )


def _checked_text(name: str, text: str) -> str:
    if text in NOT_IN_JSON:
        raise ValueError(
            f"{name} is the string {text!r}, which a saved history has for a number. "
            f"Pass float({text!r}), or another text."
        )
    return str(text)


def plain(column: np.ndarray) -> Any:
    """Its entries as Python numbers, exactly; of shape (), the number itself."""
    if jnp.issubdtype(column.dtype, jnp.floating):
        column = column.astype(np.float64)
    return column.tolist()


def shape_of(value: jax.Array | np.ndarray | Scalar | Texts) -> tuple[int, ...]:
    """As ``np.shape``, for texts too."""
    return (len(value),) if isinstance(value, tuple) else np.shape(value)


def whole_number(name: str, value: object) -> int:
    """The value of an argument that counts something."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(
            f"{name} must be a whole number on the host, got {type(value).__name__}. Count "
            "in Python: to read a number from the device would wait for it."
        )
    return int(value)


def is_record(record: object) -> TypeGuard[Row]:
    """Whether a line of a file has all that a record needs."""
    return (
        isinstance(record, dict)
        and {"step", *METRICS} <= set(record)
        and all(isinstance(value, Scalar) for value in record.values())
        and isinstance(record["loss_scale"], int | float)
        and isinstance(record["grads_finite"], bool)
        and all(
            isinstance(record[name], int) and abs(record[name]) < bound
            for name, bound in _LARGEST.items()
        )
    )


def as_column(name: str, values: list[Scalar | None]) -> np.ndarray:
    """One column, with what stands for a missing value."""
    if name == "step":
        return np.array(values, np.int64)
    if name in METRICS:
        return np.array(values, METRICS[name])
    kinds = {type(value) for value in values if value is not None}
    if kinds == {str}:
        return np.array(["" if value is None else value for value in values])
    if str in kinds:
        return np.array(values, object)
    if None in values or float in kinds or name == "loss":
        return np.array(
            [math.nan if value is None else value for value in values], np.float64
        )
    return np.array(values)
