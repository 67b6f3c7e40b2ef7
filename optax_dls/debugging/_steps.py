"""The steps of one call to a history: values on the device, and the rows they belong to."""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from ._record import METRICS, Row, Scalar, Values, plain, shape_of


@dataclasses.dataclass(frozen=True)
class Steps:
    """Some rows, and what has yet to be filled in there.

    Attributes:
      columns: by name; of shape () for a single step, else of shape (count,).
      rows: what is known on the host of the last steps; zeros hold the place of the rest.
      count: how many steps there are, with those that are too many to keep.
    """

    columns: dict[str, jax.Array | np.ndarray]
    rows: list[Row]
    count: int

    def fill_in(self, columns: Mapping[str, np.ndarray]) -> None:
        """Puts values from the device into the rows."""
        for name, column in columns.items():
            column = np.atleast_1d(column)[self.count - len(self.rows) :]
            values = plain(column)
            for row, value in zip(self.rows, values, strict=True):
                row[name] = value


def one_step(values: Values, step: int) -> Steps:
    """The values of a single step: scalars and texts.

    Raises:
      ValueError: a value has a shape.
    """
    for name, value in values.items():
        if shape_of(value) == ():
            continue
        cure = "Reduce it to one number."
        if name in METRICS:
            cure = (
                "The members of a population have one History each: "
                "history.append({k: v[i] for k, v in metrics.items()}). Steps that "
                "lax.scan stacked go to history.extend(metrics)."
            )
        raise ValueError(
            f"{name} must be a scalar of shape (), got shape {shape_of(value)}. {cure}"
        )
    columns = {k: v for k, v in values.items() if isinstance(v, jax.Array)}
    row: Row = {"step": step}
    row.update((k, v if isinstance(v, Scalar) else 0) for k, v in values.items())
    return Steps(_copy(columns), [row], 1)


def many_steps(values: Values, step: int, capacity: int) -> Steps:
    """The values of many steps, stacked; a number or a text alone holds for all.

    There are rows for the last ``capacity`` steps only.

    Raises:
      ValueError: a value has another shape than the steps.
    """
    shape = shape_of(values["loss_scale"])
    columns: dict[str, jax.Array | np.ndarray] = {}
    for name, value in values.items():
        if isinstance(value, tuple) or (
            isinstance(value, Scalar) and name not in METRICS
        ):
            continue
        if isinstance(value, Scalar) or value.shape != shape or len(shape) != 1:
            raise ValueError(
                "The values of many steps have the shape (steps,), got "
                f"{shape_of(value)} for {name} and {shape} for loss_scale. One step "
                "goes to history.append(metrics). Of a population, give each History "
                "the steps of one member: {k: v[:, i] for k, v in metrics.items()}."
            )
        columns[name] = value
    (count,) = shape
    first = max(count - capacity, 0)
    names = {k: v if isinstance(v, Scalar) else 0 for k, v in values.items()}
    rows: list[Row] = [{"step": step + i, **names} for i in range(first, count)]
    for name, texts in values.items():
        if isinstance(texts, tuple):
            if len(texts) != count:
                raise ValueError(
                    f"{name} must have one text for each of the {count} steps, got "
                    f"{len(texts)}."
                )
            for row, text in zip(rows, texts[first:], strict=True):
                del row[name]
                if text:
                    row[name] = text
    return Steps(_copy(columns), rows, count)


def _copy(
    columns: Mapping[str, jax.Array | np.ndarray],
) -> dict[str, jax.Array | np.ndarray]:
    """Copies in buffers of their own, since a training step may donate the originals."""
    # One of many processes may keep a history alone: it must not compute with the others.
    local = {
        k: v.addressable_data(0)
        if isinstance(v, jax.Array) and v.is_fully_replicated
        else v
        for k, v in columns.items()
    }
    on_device = {k: v for k, v in local.items() if isinstance(v, jax.Array)}
    devices = {device for v in on_device.values() for device in v.devices()}
    if len(devices) == 1 and jax.sharding.get_abstract_mesh().empty:
        copies = _copy_on_one_device(on_device)  # a tenth of the time
    else:
        copies = jax.device_put(on_device, may_alias=False)
    return {k: copies[k] if k in copies else v.copy() for k, v in local.items()}


@jax.jit
def _copy_on_one_device(columns: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return jax.tree.map(jnp.copy, columns)
