"""The record of a training run: one row a step, written without waiting."""

import collections
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence

import jax
import numpy as np
from jax.typing import ArrayLike

from ._chunk import Chunk, Row, Scalar
from ._record import (
    METRICS,
    NOT_IN_JSON,
    Texts,
    as_column,
    is_record,
    named_values,
    shape_of,
    whole_number,
)


class History:
    """What a training run did, step by step: scale, skips, loss, and more.

    Appending neither waits for the device nor reads from it: a row is copied on the
    device, so that the state may be donated, and comes to the host when it is read, by
    index, iteration, :meth:`arrays` or :meth:`save`. Nothing is repaired: a loss that
    was NaN is NaN here. A history lives on the host, outside ``jit``.

    Args:
      capacity: how many records to keep, at least 1. When it is full, the oldest go, and
        :attr:`dropped` counts them. Thinning out would keep the whole run, but would hide
        single skips; what went is in the file of an earlier :meth:`save`. 100,000
        records take some 50 MB on the host, and 4 bytes a value on the device until
        they are read.

    Raises:
      TypeError, ValueError: ``capacity`` is not a whole number of at least 1.

    Example:
      >>> import jax.numpy as jnp
      >>> import optax
      >>> import optax_dls as dls
      >>> tx = dls.dynamic_loss_scaling(optax.sgd(0.1))
      >>> history, state = dls.History(), tx.init(jnp.zeros(1))
      >>> for grad in (1.0, jnp.inf):
      ...     _, state = tx.update(jnp.array([grad]), state)
      ...     history.append(dls.metrics(state), loss=0.5)
      >>> history
      History(2 records, steps 0 to 1, 0 dropped)
      >>> for name, value in history[-1].items():
      ...     print(name, value)
      step 1
      loss_scale 16384.0
      grads_finite False
      consecutive_skips 1
      total_skips 1
      loss 0.5
      >>> history.arrays()["grads_finite"]
      array([ True, False])
    """

    def __init__(self, capacity: int = 100_000) -> None:
        if whole_number("capacity", capacity) < 1:
            raise ValueError(f"capacity must be at least 1, got {capacity}.")
        self._where: collections.deque[tuple[Chunk, int]] = collections.deque(
            maxlen=capacity
        )
        self._next_step = 0
        self.dropped = 0

    def append(
        self,
        metrics: Mapping[str, ArrayLike],
        /,
        *,
        step: int | None = None,
        loss: ArrayLike | None = None,
        **extras: ArrayLike | str | None,
    ) -> None:
        """Adds the record of one step.

        Args:
          metrics: ``dls.metrics(opt_state)``, after the update. More scalars in the same
            dict are kept like ``extras``.
          step: its number, on the host. By default one more than the last.
          loss: the true loss, as ``value_and_scaled_grad`` gives it.
          **extras: any scalar by name, on the device or not, or a string. None is left
            out. Norms of gradients are those of ``dls.unscale(grads, opt_state)``.

        Raises:
          TypeError: ``metrics`` is no such dict; a value is traced, or neither a real
            scalar nor a string; ``step`` is not a whole number on the host.
          ValueError: a value has a shape (so for the metrics of a population), a name is
            given twice, or a string reads as a number.
        """
        values = named_values(metrics, loss, extras)
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
                f"{name} must be a scalar of shape (), got shape {shape_of(value)}. "
                f"{cure}"
            )
        step = self._next_step if step is None else whole_number("step", step)
        on_device = {k: v for k, v in values.items() if isinstance(v, jax.Array)}
        row: Row = {"step": step}
        row.update((k, v) for k, v in values.items() if isinstance(v, Scalar))
        self._append(on_device, row)

    def extend(
        self,
        metrics: Mapping[str, ArrayLike],
        /,
        *,
        step: int | None = None,
        loss: ArrayLike | None = None,
        **extras: ArrayLike | str | Sequence[str | None] | None,
    ) -> None:
        """Adds the records of many steps, stacked as ``lax.scan`` returns them.

        Args:
          metrics: ``dls.metrics(opt_state)`` as the body of the scan returned it: arrays of
            shape (steps,).
          step: the number of the first. By default one more than the last.
          loss: shape (steps,).
          **extras: arrays of shape (steps,), lists of strings (and None) as
            ``GradientReport.first_nonfinite()`` gives, or a number or string that holds
            for all.

        Raises:
          TypeError, ValueError: as :meth:`append`, with (steps,) as the shape of all.

        Example:
          >>> import jax
          >>> import jax.numpy as jnp
          >>> import optax
          >>> import optax_dls as dls
          >>> tx = dls.dynamic_loss_scaling(optax.sgd(0.1))
          >>> def body(state, grads):
          ...     _, state = tx.update(grads, state)
          ...     return state, dls.metrics(state)
          >>> _, stacked = jax.lax.scan(body, tx.init(jnp.zeros(1)), jnp.ones((3, 1)))
          >>> history = dls.History()
          >>> history.extend(stacked, loss=jnp.array([3.0, 2.0, 1.0]), epoch=0)
          >>> [record["loss"] for record in history]
          [3.0, 2.0, 1.0]
        """
        values = named_values(metrics, loss, extras)
        shape = shape_of(values["loss_scale"])
        columns: dict[str, jax.Array | np.ndarray] = {}
        fixed: Row = {}
        texts: dict[str, Texts] = {}
        for name, value in values.items():
            if isinstance(value, tuple):
                texts[name] = value
                continue
            if isinstance(value, Scalar) and name not in METRICS:
                fixed[name] = value
                continue
            if isinstance(value, Scalar) or value.shape != shape or len(shape) != 1:
                raise ValueError(
                    "The values of many steps have the shape (steps,), got "
                    f"{shape_of(value)} for {name} and {shape} for loss_scale. One step "
                    "goes to history.append(metrics). Of a population, give each History "
                    "the steps of one member: {k: v[:, i] for k, v in metrics.items()}."
                )
            columns[name] = value
        step = self._next_step if step is None else whole_number("step", step)
        rows: list[Row] = [{"step": step + i, **fixed} for i in range(shape[0])]
        for name, column in texts.items():
            if len(column) != len(rows):
                raise ValueError(
                    f"{name} must have one text for each of the {len(rows)} steps, got "
                    f"{len(column)}."
                )
            for row, text in zip(rows, column, strict=True):
                if text:
                    row[name] = text
        if rows:
            self._add(Chunk.of_columns(columns, rows), len(rows))

    def __len__(self) -> int:
        """How many records are kept."""
        return len(self._where)

    def __getitem__(self, index: int) -> dict[str, Scalar]:
        """One record, as Python numbers and strings: what loggers take."""
        if isinstance(index, slice):
            raise TypeError(
                "history[...] takes one index, got a slice. Write list(history)[a:b], or "
                "slice the columns of history.arrays()."
            )
        try:
            chunk, i = self._where[index]
        except IndexError:
            raise IndexError(
                f"There is no record {index}: the history has {len(self)}."
            ) from None
        return chunk.record(i)

    def __iter__(self) -> Iterator[dict[str, Scalar]]:
        """The records, oldest first."""
        return (chunk.record(i) for chunk, i in tuple(self._where))

    def __repr__(self) -> str:
        """Size and range of steps; reads nothing from the device."""
        steps = ""
        if self._where:
            ends = (self._where[0], self._where[-1])
            first, last = (chunk.rows[i]["step"] for chunk, i in ends)
            steps = f", steps {first} to {last}"
        return f"History({len(self)} records{steps}, {self.dropped} dropped)"

    def arrays(self) -> dict[str, np.ndarray]:
        """The records as columns, for plots and statistics.

        Returns:
          ``step`` (int64), ``loss_scale`` (float32), ``grads_finite`` (bool),
          ``consecutive_skips`` and ``total_skips`` (int32), ``loss`` (float64), and one
          column for each further name: float64, int64, bool or text. Where a number is
          missing, there is NaN; where a text is missing, "".

        Example:
          >>> import optax_dls as dls
          >>> columns = dls.History().arrays()
          >>> {name: str(column.dtype) for name, column in columns.items()}["loss_scale"]
          'float32'
        """
        records = list(self)
        names = dict.fromkeys(["step", *METRICS, "loss"])
        for record in records:
            names.update(dict.fromkeys(record))
        return {
            name: as_column(name, [record.get(name) for record in records])
            for name in names
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the records as JSON Lines: one JSON object a line.

        The file is replaced as a whole, so a run that is killed while it saves leaves
        the last one. NaN and infinities are the strings "nan", "inf" and "-inf".

        Args:
          path: the file. ``path`` with ``.tmp`` behind it is used on the way.
        """
        unfinished = os.fspath(path) + ".tmp"
        with open(unfinished, "w", encoding="utf-8") as file:
            for record in self:
                line = {
                    name: str(value)
                    if isinstance(value, float) and not math.isfinite(value)
                    else value
                    for name, value in record.items()
                }
                file.write(json.dumps(line, allow_nan=False) + "\n")
        os.replace(unfinished, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str], capacity: int = 100_000) -> "History":
        """Reads what :meth:`save` wrote; appending goes on at the next step.

        Args:
          path: the file. A last line without its end, as of a run that was killed while
            it wrote line by line, is left out.
          capacity: as of :class:`History`.

        Returns:
          A new history.

        Raises:
          ValueError: a line is not a record; the message has its number.
        """
        history = cls(capacity)
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                try:
                    record = json.loads(line)
                except ValueError:
                    record = None
                    if not line.endswith("\n"):
                        break
                if not is_record(record):
                    raise ValueError(
                        f"Line {number} of {os.fspath(path)} is not a record of a "
                        f"training run: {line[:60]!r}. Each line is a JSON object with "
                        f"step, {', '.join(METRICS)}; mend or remove this one."
                    )
                known = {k: v for k, v in record.items() if v is not None}
                history._append(
                    {}, {k: NOT_IN_JSON.get(v, v) for k, v in known.items()}
                )
        return history

    def _append(self, on_device: dict[str, jax.Array], row: Row) -> None:
        chunk = self._where[-1][0] if self._where else Chunk()
        if not chunk.append(on_device, row):
            chunk = Chunk()
            chunk.append(on_device, row)
        self._add(chunk, 1)

    def _add(self, chunk: Chunk, count: int) -> None:
        """Keeps the last ``count`` rows of a chunk."""
        end = len(chunk.rows)
        before = len(self)
        self._where.extend((chunk, i) for i in range(end - count, end))
        self.dropped += before + count - len(self)
        self._next_step = int(chunk.rows[-1]["step"]) + 1
