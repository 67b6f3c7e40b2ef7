"""A run as its history tells it: the columns, and the settings behind them."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..rules._rule import (
    DEFAULT_GROWTH_INTERVAL,
    DEFAULT_MAX_SCALE,
    DEFAULT_MIN_SCALE,
)
from ._record import METRICS

if TYPE_CHECKING:
    from ._history import History

# So many lost steps are bad luck; from as many overflows in a row at which the scale stays,
# it is at its floor. Systems that tolerate overflows tolerate two.
BAD_LUCK = 3
# A share of the steps that may be lost to bad batches before somebody has to look.
TOLERABLE = 0.01
# Probes and noise move the scale by fewer bits.
FALL = 5
NEEDED = ("step", "loss_scale", "consecutive_skips", "total_skips")


class Finding(NamedTuple):
    """One thing that is wrong with a run.

    Attributes:
      name: what it is, in a few words.
      evidence: the numbers that show it.
      causes: what usually is behind it.
      advice: what to try, in this order.
    """

    name: str
    evidence: str
    causes: str
    advice: str

    def __str__(self) -> str:
        return f"{self.name}: {self.evidence}\n  Likely: {self.causes}\n  Try: {self.advice}"


class Run(NamedTuple):
    """The columns of a history; all arrays have the shape (records,).

    Attributes:
      columns: as they were recorded.
      step: the number of the step.
      scale: after the step.
      used: the scale that the step was taken with.
      attempted: steps since the last record, more than one where the history has gaps.
      lost: how many of them were skipped.
      skipped: whether the recorded step was.
      grads_finite: whether its gradients were finite.
      loss: its true loss; what ``bad_loss`` and ``good_loss`` do not mark was not recorded.
      good_loss: where the loss is finite.
      bad_loss: where it is NaN or inf.
      held: steps that overflowed with a scale that stayed.
      settled: the first record with an applied step; the number of records if none was.
      growth_interval: of the rule, as far as it is known.
      min_scale: likewise.
      max_scale: likewise.
      is_fixed: whether the scale does not move: it is static, or starts at its floor.
    """

    columns: Mapping[str, np.ndarray]
    step: np.ndarray
    scale: np.ndarray
    used: np.ndarray
    attempted: np.ndarray
    lost: np.ndarray
    skipped: np.ndarray
    grads_finite: np.ndarray
    loss: np.ndarray
    good_loss: np.ndarray
    bad_loss: np.ndarray
    held: np.ndarray
    settled: int
    growth_interval: float
    min_scale: float
    max_scale: float
    is_fixed: bool

    @property
    def steps(self) -> int:
        return int(self.attempted.sum())

    @property
    def applied(self) -> int:
        return self.steps - int(self.lost.sum())

    def numbers(self, name: str) -> np.ndarray:
        """A further column, NaN where it was not recorded or the step was skipped."""
        column = np.asarray(self.columns.get(name, np.full(self.step.size, np.nan)))
        return np.where(self.skipped, np.nan, column.astype(np.float64))

    def lost_later(self) -> np.ndarray:
        """``lost``, without the search for a first scale."""
        return np.where(np.arange(self.lost.size) > self.settled, self.lost, 0)

    def overflows(self) -> int:
        """How often a skip came after an applied step; a burst of skips counts once."""
        after_skip = np.append(False, self.skipped[:-1])
        return int(np.count_nonzero((self.lost_later() > 0) & ~after_skip))


def returns_soon(run: Run) -> bool:
    """Whether the scale grows sooner after a single overflow than at other times."""
    if np.median(run.attempted) > 1:
        return False
    grows = run.scale > run.used
    moves = np.flatnonzero(grows | (run.lost > 0))
    ways = np.diff(np.cumsum(run.attempted)[moves], prepend=0)
    after_single = np.append(False, run.columns["consecutive_skips"][moves[:-1]] == 1)
    waits = ways[grows[moves] & after_single]
    return bool(waits.size and waits.min() < 0.9 * ways[1:].max())


def power(scale: float) -> str:
    """A scale as people write it: 2^15."""
    mantissa, exponent = math.frexp(scale)
    return f"2^{exponent - 1}" if mantissa == 0.5 else f"{scale:g}"


def last_where(mask: np.ndarray) -> int:
    """The last record of those; -1 if there is none."""
    return int(np.flatnonzero(mask)[-1]) if mask.any() else -1


def check_is_history(history: object) -> None:
    if not isinstance(history, Mapping) and not hasattr(history, "arrays"):
        raise TypeError(
            f"history must be a History or its arrays(), got {type(history).__name__}. A "
            "file is read by History.load(path)."
        )


def read_run(
    history: "History | Mapping[str, np.ndarray]", given: Mapping[str, float | None]
) -> Run:
    """What a history, or its columns, says of a run.

    Args:
      history: the record.
      given: settings that are told; a None is looked up in ``history.settings``, and then
        in what the record shows.
    """
    columns = history if isinstance(history, Mapping) else history.arrays()
    _check(columns)
    settings = {**getattr(history, "settings", {})}
    settings |= {name: value for name, value in given.items() if value is not None}

    step = np.asarray(columns["step"], np.int64)
    scale = np.asarray(columns["loss_scale"], np.float64)
    used = np.append(scale[:1], scale[:-1])
    streak = np.asarray(columns["consecutive_skips"], np.int64)
    skipped = streak > 0
    grads_finite = np.asarray(columns.get("grads_finite", ~skipped), bool)
    total = np.asarray(columns["total_skips"], np.int64)
    lost = np.diff(total, prepend=total[0] - int(skipped[0]))
    # A run that starts again in the middle of its history counts from zero again.
    lost = np.where(lost < 0, total, lost)
    lost = np.maximum(lost, skipped)
    attempted = np.maximum(np.diff(step, prepend=step[0] - 1), lost + ~skipped)
    # A streak that goes on has no applied step in it, however the steps are counted.
    goes_on = np.append(False, skipped[:-1] & (np.diff(streak) == lost[1:]))
    attempted = np.where(goes_on, lost, attempted)
    loss, known = _loss(history, columns, skipped)
    bad_loss = known & ~np.isfinite(loss)
    held = ~grads_finite & ~bad_loss & (scale == used) & (lost == attempted)
    held[0] = False  # what came before is not known

    low, high = settings.get("min_scale"), settings.get("max_scale")
    if low is None or high is None:
        is_constant = np.all(scale == scale[0]) and scale[0] > DEFAULT_MIN_SCALE
        is_fixed = bool(held.any() and is_constant)
    else:
        is_fixed = low == high
    low = _floor(scale, held, lost) if low is None else low
    interval = settings.get("growth_interval") or _interval(scale, attempted, lost)
    return Run(
        columns=columns,
        step=step,
        scale=scale,
        used=used,
        attempted=attempted,
        lost=lost,
        skipped=skipped,
        grads_finite=grads_finite,
        loss=loss,
        good_loss=known & np.isfinite(loss),
        bad_loss=bad_loss,
        held=held,
        settled=int(np.argmax(np.append(lost < attempted, True))),
        growth_interval=interval,
        min_scale=low,
        max_scale=DEFAULT_MAX_SCALE if high is None else high,
        is_fixed=is_fixed,
    )


def _check(columns: Mapping[str, np.ndarray]) -> None:
    missing = [name for name in NEEDED if name not in columns]
    if missing:
        raise ValueError(
            f"history has no column {missing[0]!r}. Pass a History, or what its arrays() "
            f"gives, with {', '.join(NEEDED)}."
        )
    size = np.size(columns["loss_scale"])
    if not size:
        raise ValueError("history is empty. Append dls.metrics(opt_state) to it first.")
    for name, column in columns.items():
        if np.shape(column) != (size,):
            raise ValueError(
                f"The columns of a history have the shape (records,), got {np.shape(column)} "
                f"for {name} and {np.shape(columns['loss_scale'])} for loss_scale. Of a "
                "population, pass one member: {k: v[:, i] for k, v in columns.items()}."
            )


def _loss(
    history: "History | Mapping[str, np.ndarray]",
    columns: Mapping[str, np.ndarray],
    skipped: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """The loss, and where it was recorded: in a column NaN stands for a missing one too."""
    size = skipped.size
    if "loss" not in columns:
        return np.full(size, np.nan), np.zeros(size, bool)
    loss = np.asarray(columns["loss"], np.float64)
    if not isinstance(history, Mapping):
        known = np.fromiter(("loss" in record for record in history), bool)
        return loss, known[:size] if known.size >= size else ~np.isnan(loss)
    known = ~np.isnan(loss)
    if not known.any():
        # A History has such a column of float64 where no loss was recorded.
        is_empty = (
            set(METRICS) <= set(columns)
            and np.asarray(columns["loss"]).dtype == np.float64
        )
        return loss, np.full(size, not is_empty)
    # One that is recorded nearly always was NaN where it is missing at the end, or where the
    # step was skipped.
    applied = np.flatnonzero(~skipped)
    finite = np.flatnonzero(known[applied])
    if finite.size:
        if applied.size - 1 - finite[-1] > 2 * np.max(np.diff(finite), initial=1):
            known[applied[finite[-1] + 1] :] = True
        if finite.size >= 0.9 * (finite[-1] + 1):
            known |= skipped
    return loss, known


def _floor(scale: np.ndarray, held: np.ndarray, lost: np.ndarray) -> float:
    """Where the scale stays although one step after the other overflows, if it does."""
    lowest = float(scale.min())
    streak = longest = 0
    for stays, count in zip(held & (scale == lowest), lost, strict=True):
        streak = streak + int(count) if stays else 0
        longest = max(longest, streak)
    return lowest if longest >= BAD_LUCK else DEFAULT_MIN_SCALE


def _interval(scale: np.ndarray, attempted: np.ndarray, lost: np.ndarray) -> float:
    """Steps that the scale takes to grow where no skip disturbs it, if that is seen."""
    ratio = scale / np.append(scale[:1], scale[:-1])
    if np.median(attempted) > 1:
        # Gaps hide single moves: so many growths must have undone the backoffs.
        growths = np.log2(scale[-1] / scale[0]) + lost[1:].sum()
        return attempted.sum() / growths if growths >= 1 else DEFAULT_GROWTH_INTERVAL
    moves = np.flatnonzero((ratio > 1) | (lost > 0))
    grows = lost[moves] == 0
    if not grows.any():
        return DEFAULT_GROWTH_INTERVAL
    ways = np.diff(np.cumsum(attempted)[moves], prepend=0)
    longest = float(np.max(ways[grows]))
    # Where it rested for much longer, that was the way back from a burst.
    rest = max(float(ways.max()), float(attempted[moves[-1] + 1 :].sum()))
    return DEFAULT_GROWTH_INTERVAL if rest > 3 * longest else longest
