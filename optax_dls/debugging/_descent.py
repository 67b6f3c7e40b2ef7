"""Findings on a scale that went down, and how far it is from coming back."""

from typing import NamedTuple

import numpy as np

from ._progress import divergence
from ._run import BAD_LUCK, FALL, Finding, Run, last_where, power, returns_soon

# So many halvings at once are a burst of bad batches.
BURST = 8
# After so many applied steps without a growth the scale is not on its way back.
PATIENCE = 100
# Overflows one by one have to explain this share of the fall.
MOST = 2 / 3
# Overflows that come more often than this are a search, or no matter of single batches.
APART = 10
# Some bits lower, a scale that was too high overflows this many times more rarely.
RARER = 3
# How long a scale lasts, as a share of how long its neighbour does, whichever is shorter:
# 0.4 in the mean where bad batches come by chance, 0.55 where one hides in each epoch.
# Where the gradients grow steadily, it is 0.7 or so.
EVEN = 0.6
# By chance, the times between bad batches scatter as much as their mean; where the scale
# held for long and then gradients grew, by more.
UNEVEN = 1.1


def collapsed(run: Run) -> Finding | None:
    after = np.arange(run.scale.size) > run.settled
    streak = np.where(after, run.columns["consecutive_skips"], 0)
    end = int(np.argmax(streak))
    fall, low = int(streak[end]), run.scale[end]
    before = run.scale[max(last_where(~run.skipped[:end]), 0)]
    applied = int((run.attempted - run.lost)[end + 1 :].sum())
    # Growing as fast as that, it is on its way back, or is back where it is probing.
    grows = np.any(run.scale[end + 1 :][: PATIENCE // 2] > low)
    missing = np.log2(before / run.scale[-1])
    if fall < BURST or missing < BURST / 2 or applied < PATIENCE or grows:
        return None
    return Finding(
        "collapsed after a burst",
        f"{fall} skips in a row took the scale from {power(before)} to {power(low)}; after "
        f"{applied} applied steps it is at {power(run.scale[-1])}, and at one growth every "
        f"{run.growth_interval:g} steps it needs {missing * run.growth_interval:.0f} more",
        "a burst of bad batches, and a rule that doubles the scale only after "
        f"{run.growth_interval:g} finite steps in a row",
        "dynamic_loss_scaling with its default settings, which returns to its level within "
        "some ten steps for each skip; value=loss in tx.update: then a loss that is not "
        "finite leaves the scale alone; optax.tree.set(opt_state, loss_scale=...) to put it "
        "back now",
    )


class Descent(NamedTuple):
    """A way down by single overflows, most of them at a lower scale than all before.

    Attributes:
      events: the records with these overflows.
      lower: how many of them were at such a scale.
      half: the one of these with which the lower half of the way begins.
      end: the last record of the way: the end of the history, or the arrival at the floor.
      stays: steps from each of them to the next, and from the last to the end.
    """

    events: np.ndarray
    lower: int
    half: int
    end: int
    stays: np.ndarray

    @property
    def high_stays(self) -> np.ndarray:
        return self.stays[self.events < self.half]

    @property
    def low_stays(self) -> np.ndarray:
        return self.stays[self.events >= self.half]


def slid(run: Run) -> Finding | None:
    way = _descent(run)
    if way is None or divergence(run):
        return None
    is_bad = np.count_nonzero(run.bad_loss[way.events]) > way.events.size / 2
    if not is_bad and not _knows_nothing_of_the_scale(run, way):
        return None
    # The last stay is not over.
    above, below = (
        stays.sum() / max(count, 1)
        for stays, count in (
            (way.high_stays, way.high_stays.size),
            (way.low_stays, way.low_stays.size - 1),
        )
    )
    rule, default = _old_rule(run)
    told = is_bad or "grad_norm" in run.columns
    grow = "" if told else "; or, where it is never over, gradients that grow"
    record = "" if told else "; grad_norm= in the history, which tells the two apart"
    value = "value=loss in tx.update, where the loss is not finite; "
    return Finding(
        "slid after single overflows",
        f"{way.events.size} single overflows took the scale from "
        f"{power(run.used[way.events[0]])} to {power(run.scale[way.end])}; they came every "
        f"{above:.0f} steps above {power(run.used[way.half])} and every {below:.0f} below, "
        "so a lower scale did not help",
        f"bad batches now and then{rule}{grow}",
        default
        + ("" if run.good_loss[way.events].any() else value)
        + "a look at the batches that are skipped"
        + record,
    )


def _old_rule(run: Run) -> tuple[str, str]:
    """Of a rule that does not return to its level: how it moves, and what is better."""
    if returns_soon(run):
        return "", ""
    is_known = np.median(run.attempted) == 1
    steps = f"{run.growth_interval:.0f}" if is_known else "many"
    moves = (
        ", and a rule that halves the scale at each overflow and doubles it only after "
        f"{steps} finite steps in a row"
    )
    better = (
        "dynamic_loss_scaling with its default settings, which returns to its level after "
        "such an overflow; "
    )
    return moves, better


def _descent(run: Run) -> Descent | None:
    """How single overflows took the scale down; None if they did not."""
    start, streak = run.settled, run.columns["consecutive_skips"]
    if run.is_fixed or start >= run.scale.size:
        return None
    begin = start + last_where(run.scale[start:] == run.scale[start:].max())
    lowered = (np.arange(run.scale.size) > begin) & (run.scale < run.used)
    goes_on = np.append(streak[1:] > 1, False)
    is_single = lowered & (run.lost > 0) & (streak <= 1) & ~goes_on
    # A burst goes lower, but the scale may have come back from it.
    failed = np.minimum.accumulate(np.where(is_single, run.used, np.inf))
    lower = np.flatnonzero(is_single & (run.used < np.append(np.inf, failed[:-1])))
    if lower.size < FALL:
        return None
    at_floor = np.append(run.scale[lower[-1] :] <= run.min_scale, True)
    end = min(int(lower[-1] + np.argmax(at_floor)), run.scale.size - 1)
    events = lower[0] + np.flatnonzero(is_single[lower[0] : end + 1])
    fall = np.log2(run.scale[begin] / run.scale[-1])
    by_events = np.log2(run.used[lower] / run.scale[lower]).sum()
    when = np.cumsum(run.attempted)
    stays = np.diff(np.append(when[events], when[end]))
    is_short = stays.sum() < max(APART * events.size, PATIENCE)
    if fall < FALL or by_events < MOST * fall or is_short:
        return None
    return Descent(events, lower.size, int(lower[lower.size // 2]), end, stays)


def _knows_nothing_of_the_scale(run: Run, way: Descent) -> bool:
    """Whether low scales overflowed as high ones did, and the gradients did not grow."""
    rate = way.low_stays.size / way.low_stays.sum()
    held = RARER * rate < way.high_stays.size / way.high_stays.sum()
    is_probing = way.events.size > 2 * way.lower
    is_uneven = way.stays.std() > UNEVEN * way.stays.mean()
    if held or is_probing or is_uneven or _grew(run, way):
        return False
    stays = way.stays[:-1]
    # Between records with gaps nobody knows where the overflow was.
    gap = np.median(run.attempted) - 1
    shorter, longer = np.sort([stays[1:], stays[:-1]], axis=0) + gap
    # The same batch of each epoch comes back to the step, which no growth does.
    return bool(np.mean(shorter / longer) < EVEN or np.ptp(stays) == 0)


def _grew(run: Run, way: Descent) -> bool:
    """Whether the gradients grew as the scale fell, as far as that was recorded."""
    fall = np.log2(run.used[way.events[0]] / run.scale[way.end])
    for name in ("grad_norm", "update_norm"):
        norms = run.numbers(name)
        is_known = np.isfinite(norms) & (norms > 0)
        halves = slice(way.events[0], way.half), slice(way.half, way.end + 1)
        high, low = (norms[half][is_known[half]] for half in halves)
        if high.size and low.size:
            # From the one half to the other it is half of the way.
            return bool(np.log2(np.median(low) / np.median(high)) > fall / 4)
    return False


def never_grows(run: Run) -> Finding | None:
    moves = run.lost_later() > 0
    # Between records with gaps, growths and backoffs undo each other unseen.
    unseen = np.log2(run.scale[-1] / run.scale[0]) + run.lost[1:].sum() >= 1
    grew = np.any(np.diff(run.scale) > 0) or (np.median(run.attempted) > 1 and unseen)
    if grew or run.is_fixed or _descent(run):
        return None
    # Where it did not grow in spite of a whole interval, skips are not what keeps it.
    ends = np.cumsum(run.attempted)[moves]
    rests = np.diff(np.concatenate([[0], ends, [run.steps]]))
    is_long = run.steps >= 2 * run.growth_interval
    if run.overflows() <= BAD_LUCK or not is_long or rests.max() >= run.growth_interval:
        return None
    return Finding(
        "the scale never grows",
        f"an overflow about every {run.steps / (run.overflows() + 1):.0f} steps, and it "
        f"grows after {run.growth_interval:g} finite ones",
        "bad batches that reset the count",
        "dynamic_loss_scaling with its default settings, whose count goes on after an "
        "overflow; value=loss in tx.update; a shorter growth_interval",
    )
