"""What is wrong with a run, from its history: findings with numbers, causes and cures."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..rules._rule import (
    DEFAULT_GROWTH_INTERVAL,
    DEFAULT_MAX_SCALE,
    DEFAULT_MIN_SCALE,
)

if TYPE_CHECKING:
    from ._history import History

# Lost beyond two probes an interval, a run has a problem; three are bad luck.
BAD_LUCK = 3
# Above this share of flushed entries, the gradient is not the true one any more.
MUCH_UNDERFLOW = 0.05
# So many halvings at once are a burst of bad batches and no search for a scale.
BURST = 8


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


class _Run(NamedTuple):
    """The columns of a history, and what the rule was told."""

    steps: int
    scale: np.ndarray
    used: np.ndarray  # the scale that a step was taken with
    lost: np.ndarray  # steps that were skipped since the last record
    settled: int  # the first record after the search for a first scale
    columns: Mapping[str, np.ndarray]
    growth_interval: int
    min_scale: float
    max_scale: float


def diagnose(
    history: "History | Mapping[str, np.ndarray]",
    *,
    growth_interval: int = DEFAULT_GROWTH_INTERVAL,
    min_scale: float = DEFAULT_MIN_SCALE,
    max_scale: float = DEFAULT_MAX_SCALE,
) -> list[Finding]:
    """Says what is wrong with a run; an empty list if nothing is seen.

    One skipped step now and then is the probe for a larger scale, and no finding; nor is
    the search for a first scale. The more the history holds, the more can be found: pass
    ``loss=`` on every step, and from time to time ``underflow_share=`` and
    ``nonfinite_leaf=`` (both from a :class:`GradientReport`, the former of a gradient
    computed in float32) and ``update_norm=``.

    Args:
      history: a :class:`History`, or what its ``arrays()`` gives.
      growth_interval: of the rule; the defaults are those of ``rules.dynamic``.
      min_scale: of the rule.
      max_scale: of the rule.

    Returns:
      A list of :class:`Finding`; ``print`` each.

    Raises:
      TypeError: this is no history.
      ValueError: the history is empty, or ``growth_interval`` is below 1.

    Example:
      A run that overflows at every step, although the scale is at its floor:

      >>> import numpy as np
      >>> import optax_dls as dls
      >>> skips = np.arange(1, 41)
      >>> history = {"step": skips - 1, "loss_scale": np.maximum(2.0**15 / 2.0**skips, 2.0**-14),
      ...            "consecutive_skips": skips, "total_skips": skips}
      >>> [finding.name for finding in dls.diagnose(history)]
      ['overflow at the floor']
    """
    if not isinstance(history, Mapping) and not hasattr(history, "arrays"):
        raise TypeError(
            f"history must be a History or its arrays(), got {type(history).__name__}. A "
            "file is read by History.load(path)."
        )
    if not growth_interval >= 1:
        raise ValueError(
            f"growth_interval must be at least 1, as of the rule, got {growth_interval!r}."
        )
    columns = history if isinstance(history, Mapping) else history.arrays()
    scale = np.asarray(columns["loss_scale"], np.float64)
    if not scale.size:
        raise ValueError("history is empty. Append dls.metrics(opt_state) to it first.")
    skipped = columns["consecutive_skips"] > 0
    total = np.asarray(columns["total_skips"], np.int64)
    applied = np.flatnonzero(~skipped)
    run = _Run(
        steps=max(int(columns["step"][-1] - columns["step"][0]) + 1, scale.size),
        scale=scale,
        used=np.append(scale[:1], scale[:-1]),
        lost=np.diff(total, prepend=total[0] - int(skipped[0])),
        settled=int(applied[0]) if applied.size else scale.size,
        columns=columns,
        growth_interval=growth_interval,
        min_scale=min_scale,
        max_scale=max_scale,
    )
    findings = [check(run) for check in _CHECKS]
    return [finding for finding in findings if finding is not None]


def _expected(run: _Run) -> float:
    """So many steps may be lost before something is wrong."""
    return 2 * run.steps / run.growth_interval + BAD_LUCK


def _frequent_overflow(run: _Run) -> Finding | None:
    lost = int(run.lost[run.settled :].sum())
    at_floor = run.lost[run.used <= run.min_scale].sum() > lost / 2
    if lost <= _expected(run) or at_floor:
        return None
    expected = run.steps / run.growth_interval
    told = run.scale[run.settled :] >= run.used[run.settled :]
    kept = np.count_nonzero(told & (run.lost[run.settled :] > 0)) > lost / 2
    return Finding(
        "frequent overflow",
        f"{lost} of {run.steps} steps were lost after the first applied one, where about "
        f"{expected:.1f} are expected (one probe every {run.growth_interval} steps)",
        "batches whose loss is not finite"
        if kept
        else "batches that now and then are not finite or far larger than the rest",
        ("" if kept else "value=loss in tx.update; ")
        + "a look at the batches that are skipped; gradient_report on one of them to see "
        "which leaf it is; normalise what is large in the forward pass",
    )


def _overflow_at_the_floor(run: _Run) -> Finding | None:
    lost = int(run.lost[run.used <= run.min_scale].sum())
    if lost < BAD_LUCK:
        return None
    return Finding(
        "overflow at the floor",
        f"{lost} steps were lost although the scale was at its floor {run.min_scale:g}",
        "not the scale: NaN or inf in the data, a learning rate at which the parameters "
        "diverged, or an operation that overflows or divides by zero in the forward pass",
        "locate_nonfinite on such a batch; check the batch itself; a lower learning rate",
    )


def _same_leaf(run: _Run) -> Finding | None:
    leaves = run.columns.get("nonfinite_leaf")
    if leaves is None:
        return None
    start = run.settled if run.settled < len(leaves) else 0
    # Where the loss itself is not finite, all leaves are bad, and the first says nothing.
    loss = np.asarray(run.columns.get("loss", np.zeros(len(leaves))), np.float64)
    leaves = np.where(np.isfinite(loss), leaves, "")
    named = [str(leaf) for leaf in leaves[start:] if isinstance(leaf, str) and leaf]
    # Probes for a larger scale fail in the leaf with the largest gradients, as they must.
    if len(named) <= _expected(run):
        return None
    worst = max(set(named), key=named.count)
    if named.count(worst) < 0.9 * len(named):
        return None
    return Finding(
        "the same leaf every time",
        f"{named.count(worst)} of {len(named)} overflows are in {worst}",
        "one layer whose gradients are far larger than those of the others, or an operation "
        "whose derivative is not finite, as that of a norm at zero",
        "gradient_report for its magnitudes; locate_nonfinite on the gradient; compute it in "
        "float32, or scale its output down",
    )


def _underflow(run: _Run) -> Finding | None:
    shares = run.columns.get("underflow_share")
    if shares is None or not np.isfinite(shares).any():
        return None
    last = float(shares[np.isfinite(shares)][-1])
    if last < MUCH_UNDERFLOW:
        return None
    ceiling = run.scale[-1] >= run.max_scale
    return Finding(
        "gradients too small",
        f"{last:.0%} of the entries still round to zero at the scale {run.scale[-1]:g}"
        + (", which is its ceiling" if ceiling else ""),
        "a loss of tiny weight, or the mean over very many entries"
        + ("" if ceiling else "; the scale has not had the time to grow"),
        "a higher max_scale; find_scale"
        if ceiling
        else "find_scale for a higher init_scale; a shorter growth_interval",
    )


def _cannot_grow(run: _Run) -> Finding | None:
    grew = np.any(np.diff(run.scale) > 0)
    lost = run.lost[run.settled :] > 0
    often = run.steps >= 2 * run.growth_interval and np.count_nonzero(lost) > 1
    shares = run.columns.get("underflow_share")
    needs = shares is not None and bool(np.nanmax(shares, initial=0) >= MUCH_UNDERFLOW)
    if grew or not (often or (needs and run.scale[-1] < run.max_scale)):
        return None
    if often:
        gap = run.steps / (np.count_nonzero(lost) + 1)
        evidence = (
            f"an overflow about every {gap:.0f} steps, and it grows after "
            f"{run.growth_interval} finite ones"
        )
    else:
        evidence = f"{run.steps} steps, and it grows after {run.growth_interval}"
    return Finding(
        "the scale never grows",
        evidence,
        "bad batches that reset the count"
        if often
        else "a growth interval longer than the run",
        "value=loss in tx.update, so that bad batches do not count; a shorter growth_interval"
        if often
        else "find_scale for a higher init_scale; a shorter growth_interval",
    )


def _divergence(run: _Run) -> Finding | None:
    loss = run.columns.get("loss")
    if loss is None or np.isfinite(loss).sum() < 20:
        return None
    finite = loss[np.isfinite(loss)]
    blocks = [float(np.median(block)) for block in np.array_split(finite, 10)]
    best, last = min(blocks), blocks[-1]
    rise = (last - best) / max(abs(best), abs(blocks[0] - best), 1e-30)
    if rise < 1 or run.scale[-1] <= run.min_scale or _underflow(run):
        return None
    return Finding(
        "divergence",
        f"the loss rose from {best:.3g} to {last:.3g} while the scale was healthy "
        f"({run.scale[-1]:g})",
        "a learning rate that is too high, or a change in the data; not loss scaling",
        "a lower learning rate, warm-up, clipping (inside the wrapper)",
    )


def _collapsed(run: _Run) -> Finding | None:
    after = np.arange(run.scale.size) > run.settled
    streak = np.where(after, run.columns["consecutive_skips"], 0)
    end = int(np.argmax(streak))
    fall = min(int(streak[end]), run.scale.size)
    if fall < BURST:
        return None
    before = run.scale[max(end - fall, 0)]
    missing = np.log2(before / run.scale[-1])
    if missing < BURST / 2:
        return None
    return Finding(
        "collapsed after a burst",
        f"{fall} skips in a row took the scale from {before:g} to {run.scale[end]:g}; "
        f"without a recovery_interval it needs {missing * run.growth_interval:.0f} steps to "
        "climb back",
        "a burst of bad batches",
        "recovery_interval=10, the default of dynamic_loss_scaling; value=loss in "
        "tx.update: then a loss that is not finite leaves the scale alone; "
        "optax.tree.set(opt_state, loss_scale=...) to put it back now",
    )


def _float16_loss(run: _Run) -> Finding | None:
    loss = run.columns.get("loss")
    if loss is None:
        return None
    distinct = np.unique(loss[np.isfinite(loss)]).astype(np.float32)
    distinct = distinct[np.abs(distinct) < np.finfo(np.float16).max]
    if distinct.size < 20 or not np.all(distinct == distinct.astype(np.float16)):
        return None
    return Finding(
        "float16 loss",
        f"all {distinct.size} different losses are float16 numbers, and the largest scale "
        f"of an applied step is {np.max(run.used[run.lost == 0], initial=0):g}",
        "the loss is computed in float16: its gradient is the scale itself, which float16 "
        "can hold up to 2^15",
        "return loss.astype(jnp.float32), and take means in float32",
    )


def _wrong_order(run: _Run) -> Finding | None:
    norms = run.columns.get("update_norm")
    if norms is None:
        return None
    moved = (run.columns["consecutive_skips"] > 0) & (np.nan_to_num(norms) != 0)
    if not moved.any():
        return None
    return Finding(
        "a wrapper in the wrong order",
        f"on {np.count_nonzero(moved)} skipped steps the update was not zero",
        "a transformation chained behind the loss scaling, such as weight decay",
        "put everything inside: dynamic_loss_scaling(chain(...))",
    )


_CHECKS: tuple[Callable[[_Run], Finding | None], ...] = (
    _overflow_at_the_floor,
    _frequent_overflow,
    _same_leaf,
    _underflow,
    _cannot_grow,
    _divergence,
    _collapsed,
    _float16_loss,
    _wrong_order,
)
