"""Findings on what a run does not gain: loss, updates and gradients."""

import numpy as np

from ..rules._rule import DEFAULT_MAX_SCALE
from ._run import BAD_LUCK, Finding, Run, power

# Above this share of flushed entries, the gradient is not the true one any more.
MUCH_UNDERFLOW = 0.05
VERY_MUCH_UNDERFLOW = 0.25
# So many values show that a column does not move, and that a loss has a trend.
ENOUGH = 20
# A loss that is so many times above its start has not got there by chance.
BLOW_UP = 10
# Up to here a scale may be at its ceiling in an ordinary run.
HIGH_SCALE = 2.0**20
# The largest scale that a float16 loss survives is 2^15: its gradient is the scale itself.
FLOAT16_MAX = float(np.finfo(np.float16).max)


def divergence(run: Run) -> Finding | None:
    loss, step = run.loss[run.good_loss], run.step[run.good_loss]
    bad = run.step[run.bad_loss]
    ended = bool(bad.size and step.size and bad[-1] > step[-1])
    if not run.applied or underflow(run) or not loss.size:
        return None
    start = _start(loss)
    blew_up = start > 0 and np.abs(loss[-5:]).max() >= BLOW_UP * start
    if not (blew_up if ended else _rose(loss) or _is_stuck(loss)):
        return None
    top = int(np.argmax(np.abs(loss)))
    end = (
        f"not finite from step {bad[0]} on"
        if ended
        else f"{np.median(loss[-5:]):.3g} at the end"
    )
    return Finding(
        "divergence",
        f"the loss went from {loss[0]:.3g} at step {step[0]} to {loss[top]:.3g} at step "
        f"{step[top]}, and is {end}",
        "a learning rate that is too high, or a change in the data; not loss scaling",
        "a lower learning rate, warm-up, clipping (inside the wrapper)",
    )


def _start(loss: np.ndarray) -> float:
    """How large a loss is that has not blown up yet."""
    if loss.min() >= 0 and loss[0] > 0:
        return float(loss[0])
    # Around zero the first says little.
    block = np.abs(loss[: max(loss.size // 10, 1)])
    return 1e3 * float(np.quantile(block, 0.9))


def _rose(loss: np.ndarray) -> bool:
    """Whether the loss is far above its start, or its best, and stays there."""
    start, size = _start(loss), np.abs(loss)
    if loss.size < ENOUGH or not start:
        return False
    later, tail = size[loss.size // 10 :], size[-max(loss.size // 10, 5) :]
    level = float(np.median(tail))
    # The first may be low by chance: so it has to be the lowest of many, far below a narrow
    # range, or one of several that are low.
    clipped = np.maximum(later, start)
    least, low, quarter, high = np.quantile(clipped, (0.02, 0.16, 0.25, 0.84))
    is_lowest = start < later.min()
    is_far = later.size >= 200 or level / start > (high / low) ** 2.5
    are_low = start < least and np.count_nonzero(size[:5] < quarter) >= 4
    # Where it does not jump at once, it starts where the first five are.
    jumps = np.median(size[1:6]) >= 3 * start
    base = start if jumps else max(start, float(np.median(size[:5])))
    if level >= BLOW_UP * base and (is_lowest and is_far or are_low):
        return True
    best = min(float(np.median(block)) for block in np.array_split(size, 10))
    is_above = level >= 2 * start and start < tail.min() and loss.min() >= 0
    return loss.size >= 50 and is_above and level >= BLOW_UP * best


def _is_stuck(loss: np.ndarray) -> bool:
    """Whether a supervised loss blew up, and came back no further than to its start."""
    tail = loss[-(loss.size // 3) :]
    if loss.size < ENOUGH or loss.min() < 0 or np.median(tail) < 0.8 * loss[0]:
        return False
    highest = max(loss[0], tail.max())
    # What lasts for five records is no outlier.
    windows = np.lib.stride_tricks.sliding_window_view(loss, 5)
    peak = np.median(windows, axis=1).max()
    is_dead = np.ptp(tail) <= 1e-3 * highest
    return bool(peak >= (2 if is_dead else 5) * highest > 0)


def underflow(run: Run) -> Finding | None:
    shares = {
        "round to zero": run.numbers("underflow_share"),
        "are zero": np.where(
            run.numbers("zero_share") < 1, 0, run.numbers("zero_share")
        ),
    }
    seen = {what: np.flatnonzero(np.isfinite(share)) for what, share in shares.items()}
    much = [
        (what, shares[what], known)
        for what, known in seen.items()
        if known.size and shares[what][known[-1]] >= MUCH_UNDERFLOW
    ]
    if not much:
        return None
    what, share, known = much[0]
    last, then = share[known[-1]], run.used[known[-1]]
    evidence = f"{last:.0%} of the entries still {what} at the scale {power(then)}"
    tops = run.used[(run.lost_later() > 0) & ~run.bad_loss]
    if np.any(tops <= 4 * run.scale[-1]):
        # The scale is as large as it can be, and some underflow is the price.
        return (
            None
            if last < VERY_MUCH_UNDERFLOW
            else Finding(
                "gradients too small",
                f"{evidence}, and overflow at {power(tops.min())}",
                "gradients that differ more in size than float16 numbers can",
                "gradient_report for the leaves with the largest; layer_scaling or float32 there",
            )
        )
    if run.scale[-1] >= run.max_scale:
        return Finding(
            "gradients too small",
            f"{evidence}, which is its ceiling",
            "a loss of tiny weight, or the mean over very many entries",
            "a higher max_scale; find_scale",
        )
    return Finding(
        "gradients too small",
        evidence,
        "a loss of tiny weight, or the mean over very many entries; the scale has not had "
        "the time to grow",
        "find_scale for a higher init_scale; a shorter growth_interval",
    )


def does_not_move(run: Run) -> Finding | None:
    if underflow(run) or _fell(run):
        return None
    norms = run.numbers("update_norm")
    norms = norms[np.isfinite(norms)]
    still = norms.size - 1 - _last_nonzero(norms)
    if norms.size >= ENOUGH and still >= 0.8 * norms.size:
        return Finding(
            "the parameters do not move",
            f"the update was exactly zero on the last {still} of {norms.size} applied steps",
            "gradients that are zero, since float16 flushes them before they are unscaled "
            "(a loss of tiny weight) or nothing depends on the parameters (dead units, "
            "stop_gradient); or a learning rate of zero",
            "print gradient_report(grads, state): if 100 % is zero, find_scale (with "
            "exponents up to 60) for init_scale and max_scale; else the schedule",
        )
    loss = run.loss[run.good_loss & ~run.skipped]
    sizes = run.numbers("param_norm")
    sizes = sizes[np.isfinite(sizes)]
    seen = [
        (name, values)
        for name, values in (("loss", loss), ("norm of the parameters", sizes))
        if values.size >= _enough(values) and values[0] and np.all(values == values[0])
    ]
    if not seen:
        return None
    name, values = seen[-1]
    moves = (
        f" although the update is not zero (norm {norms[-1]:.2g})"
        if norms.any()
        else ""
    )
    return Finding(
        "the parameters do not move",
        f"the {name} is exactly {values[0]:.6g} on all {values.size} applied steps{moves}",
        "float16 parameters: an update below half of their spacing, 0.05 % of a parameter, "
        "rounds away when it is added; or updates of zero",
        "keep the parameters in float32 and cast them in the loss, or float32 master "
        "weights; update_norm=optax.tree.norm(updates) in the history, if it is not there",
    )


def never_scaled(run: Run) -> Finding | None:
    for name in ("update_norm", "grad_norm"):
        jumps = _answers_to_scale(run, name)
        if jumps:
            return Finding(
                "the gradients are not scaled",
                f"{name} falls as the scale grows, by the same factor, at {jumps} of its "
                "moves: what is divided by the scale was never multiplied by it",
                "jax.value_and_grad instead of value_and_scaled_grad, or gradients that "
                "dls.unscale has divided already, handed to tx.update",
                "loss, grads = dls.value_and_scaled_grad(loss_fn)(params, batch, "
                "state=opt_state), and tx.update(grads, ...) with these very gradients",
            )
    return None


def _answers_to_scale(run: Run, name: str) -> int:
    """At how many moves of the scale a norm moved by its inverse; 0 if by chance."""
    norms = run.numbers(name)
    known = np.flatnonzero(np.isfinite(norms) & (norms > 0))
    if known.size < ENOUGH:
        return 0
    norm, scale = np.diff(np.log2(norms[known])), np.diff(np.log2(run.used[known]))
    moves = scale != 0
    count = int(np.count_nonzero(moves))
    if count < BAD_LUCK or np.count_nonzero(~moves) < BAD_LUCK:
        return 0
    drift = np.median(norm[~moves])
    noise = 2 * np.median(np.abs(norm[~moves] - drift)) / np.sqrt(count)
    slope = np.median((norm[moves] - drift) / scale[moves])
    return count if abs(slope + 1) < 0.25 and noise < 0.25 else 0


def at_the_ceiling(run: Run) -> Finding | None:
    lost = run.lost_later().sum()
    low = run.scale[-1] < max(run.max_scale, HIGH_SCALE)
    if low or lost or run.is_fixed or run.scale.min() == run.scale.max():
        return None
    # Updates that neither vanish nor answer to the scale are right.
    moves = np.count_nonzero(run.numbers("update_norm") > 0) >= ENOUGH
    if moves or _fell(run) or any(check(run) for check in (underflow, does_not_move)):
        return None
    if run.scale[-1] < DEFAULT_MAX_SCALE and not run.good_loss.any():
        return None
    return Finding(
        "at the ceiling without an overflow",
        f"the scale climbed to {power(run.scale[-1])}, its ceiling, and no step ever "
        "overflowed",
        "gradients that were never scaled (jax.value_and_grad instead of "
        "value_and_scaled_grad); a loss so tiny that its gradients are zero in float16; or "
        "nothing that is computed in float16",
        "record update_norm=optax.tree.norm(updates) to tell them apart: with SGD it halves "
        "when the scale doubles if the gradients were never scaled, it is exactly zero if "
        "they vanish (find_scale, a higher max_scale), and neither if no scaling is needed "
        "(no_loss_scaling)",
    )


def float16_loss(run: Run) -> Finding | None:
    largest = float(np.max(run.used[run.lost == 0], initial=0))
    values = np.unique(np.abs(run.loss[run.good_loss]))
    values = values[values <= FLOAT16_MAX]
    if values.size < ENOUGH or largest > FLOAT16_MAX or run.scale.max() < 2**15:
        return None
    if not np.all(values == values.astype(np.float16)):
        return None
    mantissa, exponent = np.frexp(values[values >= 2.0**-14])
    # A bfloat16 number has fewer digits; so have the small ones among multiples of a number.
    odd = mantissa * 2**11 % 2 == 1
    binades, counts = np.unique(exponent, return_counts=True)
    filled = binades[counts >= 5]
    if filled.size < 2 or any(odd[exponent == e].mean() < 0.2 for e in filled):
        return None
    return Finding(
        "float16 loss",
        f"all {values.size} different losses are float16 numbers, and the largest scale "
        f"of an applied step is {power(largest)}",
        "the loss is computed in float16: its gradient is the scale itself, which float16 "
        "can hold up to 2^15",
        "return loss.astype(jnp.float32), and take means in float32",
    )


def _fell(run: Run) -> bool:
    """Whether the loss is lower at the end than chance would have it."""
    loss = run.loss[run.good_loss]
    if loss.size < ENOUGH:
        return False
    first = loss[: max(loss.size // 10, min(loss.size // 3, 10))]
    last = float(np.median(loss[-(loss.size // 2) :]))
    return last < np.quantile(first, 0.1) and last < first[0] - 0.01 * abs(first[0])


def _enough(values: np.ndarray) -> int:
    """Equal values that show something: more of those that bfloat16 rounds to."""
    is_coarse = values.size and not np.float32(values[0]).view(np.uint32) & 0xFFFF
    return 5 * ENOUGH if is_coarse else ENOUGH


def _last_nonzero(values: np.ndarray) -> int:
    return int(np.flatnonzero(values)[-1]) if values.any() else -1
