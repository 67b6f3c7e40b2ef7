"""Findings on skipped steps: whose fault they are."""

import numpy as np

from ._run import (
    BAD_LUCK,
    FALL,
    TOLERABLE,
    Finding,
    Run,
    last_where,
    power,
    returns_soon,
)

# So many skips in a row are no search for a scale any more.
STALLED = 10
# So many overflows it takes a rule that returns to its level to find one from far above.
SEARCH = 50


def loss_not_finite(run: Run) -> Finding | None:
    bad, known = run.bad_loss, run.bad_loss | run.good_loss
    count, recorded = int(bad.sum()), int(known.sum())
    if not count:
        return None
    last_good = last_where(run.good_loss)
    since = np.count_nonzero(bad[last_good + 1 :])
    if last_good >= 0 and since < max(BAD_LUCK, count / 2):
        return _bad_batches(run, count, recorded)
    first = last_good + 1 + int(np.argmax(bad[last_good + 1 :]))
    inf = np.count_nonzero(np.isinf(run.loss[bad]))
    kind = "inf" if inf == count else "NaN" if not inf else "NaN or inf"
    skips = np.count_nonzero((run.skipped & bad)[first:])
    earlier = int((run.attempted - run.lost)[:first].sum())
    where = (
        f"from step {run.step[first]} on, in {since} records"
        if last_good >= 0
        else f"in all {count} records"
    )
    causes = (
        "NaN or inf in the data, or an operation of the forward pass that overflows or "
        "divides by zero"
    )
    if last_good >= 0:
        rate = "a learning rate at which the parameters grew until it does"
        began = earlier <= STALLED
        causes = f"{rate}; {causes}" if began else f"{causes}; {rate}"
    return Finding(
        "loss not finite",
        f"the loss is {kind} {where} ({skips} of them skipped); no scale helps there, as "
        "scaling acts after the loss",
        causes,
        "locate_nonfinite(loss_fn, params, batch) on such a batch; check the batch itself; "
        "a lower learning rate or warm-up if it began in training",
    )


def _bad_batches(run: Run, count: int, recorded: int) -> Finding | None:
    if count <= max(BAD_LUCK, TOLERABLE * recorded):
        return None
    lowered = np.any(run.scale[run.bad_loss] < run.used[run.bad_loss])
    return Finding(
        "bad batches",
        f"the loss was not finite in {count} of {recorded} records, and "
        f"{np.count_nonzero(run.skipped & run.bad_loss)} of these steps were skipped"
        + (
            f"; they took the scale down to {power(run.scale[run.bad_loss].min())}"
            if lowered
            else ""
        ),
        "batches whose loss is not finite: NaN or inf in the data, an empty batch or mask, "
        "or a forward pass that overflows on them",
        "locate_nonfinite(loss_fn, params, batch) on one of them"
        + ("; value=loss in tx.update, so that the scale stays" if lowered else ""),
    )


def updates_not_finite(run: Run) -> Finding | None:
    refused = run.skipped & run.grads_finite & ~run.bad_loss
    count = int(run.lost[refused].sum())
    wild = np.count_nonzero(np.isinf(run.numbers("update_norm")))
    if not wild and not _is_much(run, count):
        return None
    if wild:
        return Finding(
            "updates not finite",
            f"the update was not finite on {wild} applied steps",
            "the optimizer: a learning rate that is not finite, a division by zero",
            "check_updates=True skips such steps; look at schedule, clipping and eps",
        )
    unless = (
        "" if run.good_loss[refused].any() else " (or the loss given as value= was not)"
    )
    return Finding(
        "updates not finite",
        f"{count} of {run.steps} steps were skipped although their gradients were finite",
        "check_updates refused what the optimizer proposed: a learning rate that is not "
        f"finite, a division by zero in it{unless}",
        "look at schedule, clipping and eps of the optimizer; optimizer.update by hand on "
        "one such gradient",
    )


def overflow_at_the_floor(run: Run) -> Finding | None:
    there = run.used <= run.min_scale
    lost = int(run.lost[there].sum())
    if (
        run.is_fixed
        or lost < BAD_LUCK
        or lost <= TOLERABLE * run.attempted[there].sum()
    ):
        return None
    causes = (
        "not the scale: NaN or inf in the data, a learning rate at which the parameters "
        "diverged, or an operation whose value or derivative is not finite in float16"
    )
    if run.good_loss[there & run.skipped].any():
        causes = (
            "neither the scale nor the loss, which is finite: an operation whose derivative "
            "is not (a norm or square root at zero, an exp in float16), or parameters that "
            "grew too large"
        )
    return Finding(
        "overflow at the floor",
        f"{lost} steps were lost although the scale was at its floor {power(run.min_scale)}",
        causes,
        "locate_nonfinite on such a batch, on the gradient too; check the batch itself; a "
        "lower learning rate",
    )


def overflow_at_a_fixed_scale(run: Run) -> Finding | None:
    lost = int(run.lost.sum())
    if not run.is_fixed or not _is_much(run, lost):
        return None
    unless = (
        ""
        if run.good_loss[run.skipped].any()
        else "; or a loss that is not finite, given as value= (record loss= to see it)"
    )
    return Finding(
        "overflow at a fixed scale",
        f"{lost} of {run.steps} steps were lost, and the scale stayed at "
        f"{power(run.scale[-1])}",
        "a static scale, or a min_scale, that is too high for these gradients; or gradients "
        f"that no scale makes finite{unless}",
        "find_scale, which tells the two apart; dynamic_loss_scaling; locate_nonfinite if "
        "they overflow at every scale",
    )


def no_step_applied(run: Run) -> Finding | None:
    streak = int(run.columns["consecutive_skips"][-1])
    if streak < (STALLED if run.applied else BAD_LUCK):
        return None
    last = run.step[-1] - streak
    since = f" since step {last}" if run.applied else ""
    before = run.scale[max(np.searchsorted(run.step, last, "right") - 1, 0)]
    return Finding(
        "no step applied",
        f"the last {streak} steps were skipped, none was applied{since}, and the scale went "
        f"from {power(before)} to {power(run.scale[-1])}",
        "a scale that is still too high, if it goes on falling; else gradients that no scale "
        "makes finite",
        "find_scale for init_scale, which also says whether a scale helps at all; "
        "locate_nonfinite on the gradient if none does",
    )


def frequent_overflow(run: Run) -> Finding | None:
    later = run.lost_later()
    lost, overflows = int(later.sum()), run.overflows()
    held = run.held & ~run.good_loss & (later > 0)
    held = np.count_nonzero(held) > np.count_nonzero(later) / 2
    expected = 0.0 if run.is_fixed else run.steps / run.growth_interval
    probes = 2 * expected
    if np.log2(run.scale[run.settled :][:1] / run.scale[-1]).sum() >= FALL:
        probes = 0.0  # where a probe fails, the scale is where it was
    search = 0
    if returns_soon(run):
        # It asks some times whether its level is to blame, and a search goes on for longer.
        probes, search = 2 * probes, SEARCH if run.settled else 0
    # A burst is one overflow. Where the scale stays, little is lost by a few.
    few = BAD_LUCK + search + (not held) * probes
    usual = max(few, TOLERABLE * run.steps)
    if lost <= usual or (overflows <= usual and lost <= run.steps / 10):
        return None
    return Finding(
        "frequent overflow",
        f"{lost} of {run.steps} steps were lost after the first applied one, where about "
        f"{expected:.1f} are expected (one probe every {run.growth_interval:g} steps)",
        "batches whose loss is not finite, since the scale stayed on them"
        if held
        else "batches that now and then are not finite or far larger than the rest",
        ("" if held else "value=loss in tx.update; ")
        + "a look at the batches that are skipped; gradient_report on one of them to see "
        "which leaf it is; normalise what is large in the forward pass",
    )


def same_leaf(run: Run) -> Finding | None:
    leaves = run.columns.get("nonfinite_leaf")
    if leaves is None:
        return None
    start = run.settled if run.settled < run.step.size else 0
    # Where the loss itself is not finite, all leaves are bad, and the first says nothing.
    named = [
        str(leaf)
        for leaf, bad in zip(leaves[start:], run.bad_loss[start:], strict=True)
        if isinstance(leaf, str) and leaf and not bad
    ]
    # Probes for a larger scale fail in the leaf with the largest gradients, as they must.
    if len(named) <= 2 * run.steps / run.growth_interval + BAD_LUCK:
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


def wrong_order(run: Run) -> Finding | None:
    norms = np.nan_to_num(np.asarray(run.columns.get("update_norm", 0.0), np.float64))
    moved = np.count_nonzero(run.skipped & (norms != 0))
    if not moved or moved < np.count_nonzero(run.skipped) / 2:
        return None
    return Finding(
        "a wrapper in the wrong order",
        f"on {moved} of {np.count_nonzero(run.skipped)} skipped steps the update was not zero",
        "a transformation chained behind the loss scaling, such as weight decay",
        "put everything inside: dynamic_loss_scaling(chain(...))",
    )


def _is_much(run: Run, lost: int) -> bool:
    """Whether so many lost steps are more than bad luck."""
    if not run.applied:
        return lost >= BAD_LUCK
    return lost > max(BAD_LUCK, TOLERABLE * run.steps)
