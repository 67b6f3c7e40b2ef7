"""Rows of a history that share their columns: on the device until they are read."""

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Scalar = bool | int | float | str
Row = dict[str, Scalar]
Arrays = dict[str, jax.Array]

# One buffer takes so many rows: a jax.Array costs some 2 kB on the host, whatever is in
# it, so that one for each value of a long run would fill the memory.
CHUNK_ROWS = 256


class Chunk:
    """Some rows: the values that were on a device as columns, the others on the host."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self._columns: dict[str, jax.Array | np.ndarray] = {}
        self._filled: jax.Array | None = None
        self._kinds: dict[str, object] = {}
        self._full = False
        self._host: dict[str, list] = {}
        self._is_read = True

    def append(self, values: Arrays, row: Row) -> bool:
        """Adds a row without waiting; False if it does not fit in here."""
        values = _on_one_device(values)
        if not self.rows:
            self._kinds = _kinds(values)
        if self._full or self._kinds != _kinds(values):
            return False
        if values:
            with _only_their_device(values):
                if self._filled is None:
                    self._columns, self._filled = _first(values)
                else:
                    self._columns, self._filled = _next(
                        self._columns, self._filled, values
                    )
            self._is_read = False
        self.rows.append(row)
        self._full = len(self.rows) == CHUNK_ROWS
        return True

    @classmethod
    def of_columns(cls, columns: dict, rows: list[Row]) -> "Chunk":
        """Whole columns, with one entry a row; takes no more."""
        chunk = cls()
        chunk.rows, chunk._full, chunk._is_read = rows, True, False
        values = {k: v for k, v in columns.items() if isinstance(v, jax.Array)}
        values = _on_one_device(values)
        if values:
            with _only_their_device(values):
                values = _copy(values)
        chunk._columns = {
            k: values[k] if k in values else v.copy() for k, v in columns.items()
        }
        return chunk

    def record(self, i: int) -> Row:
        """Row ``i`` on the host; waits for the device if it has to."""
        if not self._is_read:
            host = jax.device_get(self._columns)
            # jit sorts the names; _kinds has them in the order they were given in.
            names = self._kinds or host
            self._host = {name: plain_list(host[name]) for name in names}
            self._is_read = True
            if self._full:
                self._columns, self._filled = {}, None
        row = self.rows[i]
        columns = {name: column[i] for name, column in self._host.items()}
        return {"step": row["step"], **columns, **row}


def plain_list(column: np.ndarray) -> Any:
    """Its entries as Python numbers, exactly; of shape (), the number itself."""
    if jnp.issubdtype(column.dtype, jnp.floating):
        column = column.astype(np.float64)
    return column.tolist()


def _kinds(values: Arrays) -> dict[str, object]:
    """What a column has one of: its device and dtype."""
    return {name: (value.devices(), value.dtype) for name, value in values.items()}


def _on_one_device(values: Arrays) -> Arrays:
    """The values on one local device, still on the way there perhaps."""
    local = {}
    for name, value in values.items():
        # One of many processes may keep a history alone: it must compute alone too.
        local[name] = value.addressable_data(0) if value.is_fully_replicated else value
    device = (
        min(next(iter(local.values())).devices(), key=lambda d: d.id) if local else None
    )
    return {
        name: value if value.devices() == {device} else jax.device_put(value, device)
        for name, value in local.items()
    }


def _only_their_device(values: Arrays) -> contextlib.AbstractContextManager:
    """Suspends a context mesh: JAX would refuse arrays that are not on all of it."""
    if jax.sharding.get_abstract_mesh().empty:
        return contextlib.nullcontext()
    (device,) = next(iter(values.values())).devices()
    return jax.set_mesh(jax.sharding.Mesh(np.array([device]), ("history",)))


# A training step may donate the state that the values are part of: all three copy.
_copy = jax.jit(lambda values: jax.tree.map(jnp.copy, values))


@jax.jit
def _first(values: Arrays) -> tuple[Arrays, jax.Array]:
    columns = {k: jnp.broadcast_to(v, (CHUNK_ROWS,)) for k, v in values.items()}
    return columns, jnp.ones((), jnp.int32)


# The buffers are small and not donated: on a CPU, at least with jaxlib 0.8, a call that donates
# waits for all it is given. The count is an array too, so that nothing crosses over.
@jax.jit
def _next(
    columns: Arrays, filled: jax.Array, values: Arrays
) -> tuple[Arrays, jax.Array]:
    columns = {
        name: jax.lax.dynamic_update_index_in_dim(column, values[name], filled, 0)
        for name, column in columns.items()
    }
    return columns, filled + 1
