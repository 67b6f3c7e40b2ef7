"""The record of a training run: one row a step, written without waiting."""

import collections
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax
from jax.typing import ArrayLike

from ._file import read_lines, write_lines
from ._record import METRICS, Row, Scalar, as_column, named_values, whole_number
from ._steps import Steps, many_steps, one_step

# So many steps come to the host together, once as many later ones are waiting: the device
# has long computed them then.
BATCH = 256


class History:
    """What a training run did, step by step: scale, skips, loss, and more.

    Appending does not wait for the device: the values of a step are copied there, so that
    the state may be donated. They come to the host some hundred steps later, or when they
    are read by index, iteration, :meth:`arrays` or :meth:`save`. Nothing is repaired: a
    loss that was NaN is NaN here.

    A history lives on the host, outside ``jit``. Several threads may append to one, and it
    can be copied and pickled.

    Args:
      tx: the optimizer with loss scaling. The history then knows the bounds and the
        interval of its rule, as :attr:`settings`, and :func:`diagnose` uses them. Without
        it, ``diagnose`` goes by what it sees.
      capacity: how many records to keep, at least 1. When it is full, the oldest go, and
        :attr:`dropped` counts them. Thinning out would keep the whole run, but would hide
        single skips; what went is in the file of an earlier :meth:`save`. 100,000
        records take some 50 MB on the host.

    Raises:
      TypeError, ValueError: ``capacity`` is not a whole number of at least 1.
      TypeError: ``tx`` is not what ``loss_scaling`` and its shorthands give.

    Example:
      >>> import jax.numpy as jnp
      >>> import optax
      >>> import optax_dls as dls
      >>> tx = dls.dynamic_loss_scaling(optax.sgd(0.1))
      >>> history, state = dls.History(tx), tx.init(jnp.zeros(1))
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

    def __init__(
        self,
        tx: optax.GradientTransformation | None = None,
        *,
        capacity: int = 100_000,
    ) -> None:
        if whole_number("capacity", capacity) < 1:
            raise ValueError(f"capacity must be at least 1, got {capacity}.")
        self.settings: dict[str, float] = _settings_of(tx)
        self.dropped = 0
        self._capacity = capacity
        self._rows: collections.deque[Row] = collections.deque(maxlen=capacity)
        self._on_device: collections.deque[Steps] = collections.deque()
        self._next_step = 0
        self._lock = threading.RLock()

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
        with self._lock:
            self._add(one_step(values, self._number(step)))

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
        with self._lock:
            self._add(many_steps(values, self._number(step), self._capacity))

    def __len__(self) -> int:
        """How many records are kept."""
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Scalar]:
        """One record, as Python numbers and strings: what loggers take."""
        if isinstance(index, slice):
            raise TypeError(
                "history[...] takes one index, got a slice. Write list(history)[a:b], or "
                "slice the columns of history.arrays()."
            )
        with self._lock:
            self._fetch(len(self._on_device))
            try:
                return dict(self._rows[index])
            except IndexError:
                raise IndexError(
                    f"There is no record {index}: the history has {len(self)}."
                ) from None

    def __iter__(self) -> Iterator[dict[str, Scalar]]:
        """The records, oldest first."""
        with self._lock:
            self._fetch(len(self._on_device))
            rows = tuple(self._rows)
        return map(dict, rows)

    def __repr__(self) -> str:
        """Size and range of steps; reads nothing from the device."""
        with self._lock:
            steps = ""
            if self._rows:
                first, last = (self._rows[i]["step"] for i in (0, -1))
                steps = f", steps {first} to {last}"
            return f"History({len(self)} records{steps}, {self.dropped} dropped)"

    def __getstate__(self) -> dict[str, Any]:
        """Everything on the host, for ``pickle`` and ``copy``."""
        with self._lock:
            self._fetch(len(self._on_device))
            state = dict(
                vars(self), _rows=self._rows.copy(), settings={**self.settings}
            )
        del state["_lock"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.RLock())

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
        lines: list[Mapping[str, object]] = list(self)
        if self.settings:
            lines.insert(0, {"settings": self.settings})
        write_lines(path, lines)

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
        history = cls(capacity=capacity)
        history.settings, rows = read_lines(path)
        for row in rows:
            history._add(Steps({}, [row], 1))
        return history

    def _number(self, step: int | None) -> int:
        """The number of the next step."""
        return self._next_step if step is None else whole_number("step", step)

    def _add(self, steps: Steps) -> None:
        if not steps.count:
            return
        before = len(self)
        self._rows.extend(steps.rows)
        self.dropped += before + steps.count - len(self)
        self._next_step = int(steps.rows[-1]["step"]) + 1
        if steps.columns:
            self._on_device.append(steps)
        if len(self._on_device) >= 2 * BATCH:
            self._fetch(BATCH)

    def _fetch(self, count: int) -> None:
        """Fills in the values of the oldest steps that are not on the host yet."""
        steps = [self._on_device.popleft() for _ in range(count)]
        columns = jax.device_get([part.columns for part in steps])
        for part, values in zip(steps, columns, strict=True):
            part.fill_in(values)


def _settings_of(tx: optax.GradientTransformation | None) -> dict[str, float]:
    if tx is None:
        return {}
    rule = getattr(tx, "rule", None)
    if rule is None:
        raise TypeError(
            "tx must be what loss_scaling or one of its shorthands gave, got "
            f"{type(tx).__name__}. In a chain, pass the link with the loss scaling; or "
            "leave it out. The number of records is History(capacity=...)."
        )
    return dict(rule.settings)
