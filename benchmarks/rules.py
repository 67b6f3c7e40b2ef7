"""How fast does each rule find the usable scale, and what does it lose on the way?

    python benchmarks/rules.py [--quick]

Simulated: a step overflows exactly if its scale is above the capacity of the model at that
step. Real: an MLP in float16 on handwritten digits. Prints the tables of the README.
"""

import argparse
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import optax_dls as dls
from optax_dls import profiles, rules

BURST = 20
MAX_SCALE = 2.0**40
RULES: dict[str, Callable[..., rules.Rule]] = {
    "dynamic, recovery 10 (default)": functools.partial(
        rules.dynamic, max_scale=MAX_SCALE
    ),
    "dynamic, recovery 1": functools.partial(
        rules.dynamic, recovery_interval=1, max_scale=MAX_SCALE
    ),
    "dynamic, no recovery (PyTorch)": functools.partial(
        rules.dynamic, recovery_interval=None, max_scale=MAX_SCALE
    ),
    "dynamic, gradient limit": functools.partial(
        rules.dynamic, gradient_limit=65504.0, max_scale=MAX_SCALE
    ),
    "hysteresis 2, no recovery (Megatron)": lambda init_scale: profiles.megatron(
        init_scale
    ),
    "overflow rate (fairseq, 0.25)": lambda init_scale: profiles.fairseq(
        init_scale, tolerance=0.25
    ),
    "window follows (metaseq)": lambda init_scale: profiles.metaseq(init_scale),
    "gradual (Chainer's, no ceiling)": functools.partial(
        rules.gradual, growth_interval=1000, max_scale=MAX_SCALE
    ),
    "log-normal": functools.partial(rules.log_normal, max_scale=MAX_SCALE),
}


class Trace(NamedTuple):
    """What a model can bear, step by step."""

    usable: np.ndarray  # log2 of the largest scale that an ordinary batch takes
    capacity: np.ndarray  # the same for the batch of this step
    is_bad: np.ndarray  # batches that are NaN at any scale
    init_scale: float = 2.0**15


def traces(steps: int, seed: int = 0) -> dict[str, Trace]:
    generator = np.random.default_rng(seed)
    noise = 0.2 * generator.standard_normal(steps)
    flat = np.full(steps, 17.7)
    drift = flat + np.cumsum(0.01 * generator.standard_normal(steps))
    never = np.zeros(steps, bool)
    bursts = never.copy()
    for start in (steps // 10, steps // 3, 2 * steps // 3):
        bursts[start : start + BURST] = True
    drop = flat - 10 * (np.arange(steps) >= steps // 2)
    phases = noise - np.where(
        np.arange(steps) % 10_000 < 300, 6 * np.abs(generator.standard_normal(steps)), 0
    )
    return {
        "clean": Trace(flat, flat + noise, never),
        "drift": Trace(drift, drift + noise, never),
        "drift and 3 bursts": Trace(drift, drift + noise, bursts),
        "from 2^32": Trace(flat, flat + noise, never, 2.0**32),
        "drop of 10 bits": Trace(drop, drop + noise, never),
        "unstable phases": Trace(flat, flat + phases, never),
    }


@functools.partial(jax.jit, static_argnums=0)
def simulate(
    rule: rules.Rule, capacity: jax.Array, is_bad: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """log2 of the scale of every step, and whether the step was applied."""

    def step(carry, inputs):
        loss_scale, rule_state, last_finite = carry
        capacity, is_bad = inputs
        log2_scale = jnp.log2(loss_scale)
        finite = ~is_bad & (log2_scale <= capacity)
        facts = {
            "last_finite": last_finite,
            "largest_gradient": 65504 * jnp.exp2(-capacity),
        }
        told = {name: facts[name] for name in rule.needs}
        after = rule.update(finite, loss_scale, rule_state, **told)
        return (*after, finite), (log2_scale, finite)

    start = (*rule.init(), jnp.array(True))
    return jax.lax.scan(step, start, (capacity, is_bad))[1]


def steps_to_recover(log2_scale: np.ndarray, is_bad: np.ndarray) -> float:
    """Mean steps after a burst until the scale is within two bits of where it was."""
    ends = np.flatnonzero(is_bad[:-1] & ~is_bad[1:]) + 1
    waits = []
    for end in ends:
        is_back = log2_scale[end:] >= log2_scale[end - BURST] - 2
        waits.append(np.argmax(is_back) if is_back.any() else is_back.size)
    return float(np.mean(waits)) if waits else float("nan")


def simulated(steps: int) -> list[list[str]]:
    """A row for each rule: what it lost and how low it was, trace by trace."""
    rows = []
    for name, make in RULES.items():
        cells, wait = [], 0.0
        make = functools.cache(make)  # one program for all traces that start alike
        for trace in traces(steps).values():
            log2_scale, finite = map(
                np.asarray,
                simulate(
                    make(init_scale=trace.init_scale),
                    jnp.asarray(trace.capacity, jnp.float32),
                    jnp.asarray(trace.is_bad),
                ),
            )
            gap = trace.usable - log2_scale
            lost = np.sum(~finite & ~trace.is_bad)
            cells.append(f"{lost}, {np.mean(np.abs(gap)):.1f}, {np.mean(gap > 8):.1%}")
            if trace.is_bad.any():
                wait = steps_to_recover(log2_scale, trace.is_bad)
        rows.append([name, *cells, f"{wait:.0f}"])
    return rows


def digits(steps: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Batches of pixels and labels; a third of the way in, 20 of them hold a NaN."""
    data = load_digits()
    generator = np.random.default_rng(seed)
    order = generator.integers(len(data.target), size=(steps, 64))
    pixels = (data.data[order] / 16).astype(np.float32)
    pixels[steps // 3 : steps // 3 + BURST, 0, 0] = np.nan
    return pixels, data.target[order]


@jax.jit
def start_params(seed: int = 0) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(seed), 3)
    shapes = ((64, 128), (128, 128), (128, 10))
    return [
        jax.random.normal(key, shape) / shape[0] ** 0.5
        for key, shape in zip(keys, shapes, strict=True)
    ]


def loss_fn(
    params: list[jax.Array],
    batch: tuple[jax.Array, jax.Array],
    dtype: jax.typing.DTypeLike = jnp.float16,
) -> jax.Array:
    """Cross-entropy with the weight of a side loss, so that float16 needs a scale."""
    x = batch[0].astype(dtype)
    for weights in params[:-1]:
        x = jnp.tanh(x @ weights.astype(dtype))
    logits = (x @ params[-1].astype(dtype)).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch[1])
    return 1e-4 * losses.mean()


@functools.partial(jax.jit, static_argnums=0)
def train(
    rule: rules.Rule, params: list[jax.Array], batches: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The loss without its weight, skips, and the share of entries flushed to zero."""
    tx = dls.loss_scaling(optax.adam(1e-3, eps=1e-12), rule)

    def zeros(grads: list[jax.Array]) -> jax.Array:
        number = sum((jnp.sum(g == 0) for g in grads), jnp.int32(0))
        return number / sum(g.size for g in grads)

    def step(carry, batch):
        params, state = carry
        loss, grads = dls.value_and_scaled_grad(loss_fn)(params, batch, state=state)
        flushed = zeros(grads) - zeros(jax.grad(loss_fn)(params, batch, jnp.float32))
        updates, state = tx.update(grads, state, params)
        carry = optax.apply_updates(params, updates), state
        return carry, (loss / 1e-4, state.scaler.consecutive_skips > 0, flushed)

    return jax.lax.scan(step, (params, tx.init(params)), batches)[1]


def real(steps: int) -> list[list[str]]:
    batches = digits(steps)
    is_bad = np.isnan(batches[0]).any((1, 2))
    rows = []
    for name, make in RULES.items():
        loss, skipped, flushed = map(
            np.asarray, train(make(init_scale=2.0**15), start_params(), batches)
        )
        rows.append(
            [
                name,
                f"{np.sum(skipped & ~is_bad)}",
                f"{np.mean(flushed[~is_bad]):.1%}",
                f"{np.mean(flushed[steps // 3 + BURST : steps // 3 + 520]):.1%}",
                f"{np.mean(loss[-100:]):.4f}",
            ]
        )
    return rows


def markdown(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a fifth of the steps")
    part = 5 if parser.parse_args().quick else 1
    steps = 100_000 // part
    header = ["steps lost, mean bits off, over 8 bits low", *traces(steps), "recovery"]
    print(markdown(header, simulated(steps)))
    print()
    header = ["rule", "steps lost", "flushed to zero", "after the burst", "loss"]
    print(markdown(header, real(3000 // part)))


if __name__ == "__main__":
    main()
