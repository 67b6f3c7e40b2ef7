"""How fast does each rule find the usable scale, and what does it lose on the way?

    python benchmarks/rules.py [--quick] [--picture FILE]

Simulated: a step overflows exactly if its scale is above the capacity of the model at that
step. Real: an MLP in float16 on handwritten digits. Prints the tables of the README.
"""

import argparse
import functools
import itertools
import pathlib
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import optax_dls as dls
from optax_dls import profiles, rules

BURST = 20
MAX_SCALE = 2.0**40
DEFAULT, CLASSIC, LOG_NORMAL = "level (default)", "classic (PyTorch)", "log-normal"
RULES: dict[str, Callable[..., rules.Rule]] = {
    DEFAULT: functools.partial(rules.dynamic, max_scale=MAX_SCALE),
    "level, gradient limit": functools.partial(
        rules.dynamic, gradient_limit=65504.0, max_scale=MAX_SCALE
    ),
    CLASSIC: functools.partial(
        rules.dynamic, recovery_interval=None, max_scale=MAX_SCALE
    ),
    "classic, hysteresis 2 (Megatron)": lambda init_scale: profiles.megatron(
        init_scale
    ),
    "overflow rate (fairseq, 0.25)": lambda init_scale: profiles.fairseq(
        init_scale, tolerance=0.25
    ),
    "window follows (metaseq)": lambda init_scale: profiles.metaseq(init_scale),
    "gradual (Chainer's, no ceiling)": functools.partial(
        rules.gradual, growth_interval=1000, max_scale=MAX_SCALE
    ),
    LOG_NORMAL: functools.partial(rules.log_normal, max_scale=MAX_SCALE),
}
REAL, FLOAT32 = (DEFAULT, CLASSIC, LOG_NORMAL), "float32, no scaling"
# The traces of the two tables, each under the name of its column.
HEALTHY = ("clean", "drift", "from 2^32", "drop of 10 bits", "sine", "heavy tail")
BAD = (
    *(f"NaN 1 in {number}" for number in (1000, 100, 30)),
    "drift and 3 bursts",
    "dips of 6 bits",
    "dips of 10 bits",
    "long dips of 10 bits",
    "unstable phases",
)


Key = TypeVar("Key", bound=Hashable)


class Trace(NamedTuple):
    """What a model can bear, step by step."""

    usable: np.ndarray  # log2 of the largest scale that an ordinary batch takes
    capacity: np.ndarray  # the same for the batch of this step
    is_bad: np.ndarray  # batches that are NaN at any scale
    init_scale: float = 2.0**15


class Outcome(NamedTuple):
    """What became of a rule on a trace."""

    lost: float  # share of the good steps that overflowed
    off: float  # mean distance of the scale from the usable one, in bits
    low: float  # share of the steps whose scale is over 8 bits below the usable one
    waits: tuple[int, ...]  # steps_to_recover


def traces(steps: int, seed: int = 0) -> dict[str, Trace]:
    generator = np.random.default_rng(seed)
    time = np.arange(steps)
    noise = 0.2 * generator.standard_normal(steps)
    flat = np.full(steps, 17.7)
    drift = flat + np.cumsum(0.01 * generator.standard_normal(steps))
    sine = flat + 4 * np.sin(2 * np.pi * time / 20_000)
    drop = flat - 10 * (time >= steps // 2)
    never = np.zeros(steps, bool)
    bursts = never.copy()
    for start in (steps // 10, steps // 3, 2 * steps // 3):
        bursts[start : start + BURST] = True
    phases = noise - np.where(
        time % 10_000 < 300, 6 * np.abs(generator.standard_normal(steps)), 0
    )
    tail = 0.5 * generator.standard_t(2.5, steps)
    is_nan = {
        f"NaN 1 in {number}": generator.random(steps) < 1 / number
        for number in (2000, 1000, 300, 100, 60, 30)
    }
    return {
        "clean": Trace(flat, flat + noise, never),
        "drift": Trace(drift, drift + noise, never),
        "from 2^32": Trace(flat, flat + noise, never, 2.0**32),
        "drop of 10 bits": Trace(drop, drop + noise, never),
        "sine": Trace(sine, sine + noise, never),
        "heavy tail": Trace(flat, flat + tail, never),
        **{name: Trace(flat, flat + noise, is_bad) for name, is_bad in is_nan.items()},
        "bursts of 5": Trace(flat, flat + noise, time % 3000 >= 2995),
        "drift and 3 bursts": Trace(drift, drift + noise, bursts),
        "dips of 6 bits": dips(noise, 6, 50),
        "dips of 10 bits": dips(noise, 10, 50),
        "long dips of 10 bits": dips(noise, 10, 1000),
        "unstable phases": Trace(flat, flat + phases, never),
    }


def dips(noise: np.ndarray, bits: float, length: int) -> Trace:
    """At the end of every 5000 steps, gradients are larger by so many bits for a while.

    The usable scale dips with them: a rule that stayed up would lose all of these steps.
    """
    is_dip = np.arange(noise.size) % 5000 >= 5000 - length
    usable = 17.7 - bits * is_dip
    return Trace(usable, usable + noise, np.zeros(noise.size, bool))


def sweep(steps: int, seed: int = 0) -> dict[str, Trace]:
    """Healthy batches: the capacity over a bit, and its noise from none to one bit."""
    generator = np.random.default_rng(seed)
    never = np.zeros(steps, bool)
    swept = {}
    for tenth, noise in itertools.product(range(10), (0, 0.1, 0.2, 0.35, 0.5, 0.7, 1)):
        flat = np.full(steps, 17 + tenth / 10)
        capacity = flat + noise * generator.standard_normal(steps)
        swept[f"2^{flat[0]:.1f}, noise {noise}"] = Trace(flat, capacity, never)
    return swept


@functools.partial(jax.jit, static_argnums=0)
def simulate(
    rule: rules.Rule, capacity: jax.Array, is_bad: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """log2 of the scale of every step, and whether the step was applied.

    The last axis is that of the steps; several traces run side by side.
    """

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

    def one(capacity, is_bad):
        start = (*rule.init(), jnp.array(True))
        return jax.lax.scan(step, start, (capacity, is_bad))[1]

    return jnp.vectorize(one, signature="(n),(n)->(n),(n)")(capacity, is_bad)


def steps_to_recover(log2_scale: np.ndarray, is_bad: np.ndarray) -> tuple[int, ...]:
    """After each burst: steps until the scale is within two bits of where it was."""
    began = np.flatnonzero(is_bad & ~np.append(False, is_bad[:-1]))
    ended = np.flatnonzero(is_bad & ~np.append(is_bad[1:], True)) + 1
    waits = []
    for start, end in zip(began, ended, strict=False):  # the last one may not end
        is_back = log2_scale[end:] >= log2_scale[start] - 2
        waits.append(int(np.argmax(is_back)) if is_back.any() else is_back.size)
    return tuple(waits)


def outcomes(
    make: Callable[..., rules.Rule], of: Mapping[Key, Trace]
) -> dict[Key, Outcome]:
    """What became of the rule on each trace. Those that start alike run side by side."""
    results = {}
    for init_scale in {trace.init_scale for trace in of.values()}:
        alike = {
            key: trace for key, trace in of.items() if trace.init_scale == init_scale
        }
        log2_scales, finites = simulate(
            make(init_scale=init_scale),
            jnp.asarray([trace.capacity for trace in alike.values()], jnp.float32),
            jnp.asarray([trace.is_bad for trace in alike.values()]),
        )
        for (key, trace), log2_scale, finite in zip(
            alike.items(), np.asarray(log2_scales), np.asarray(finites), strict=True
        ):
            gap = trace.usable - log2_scale
            results[key] = Outcome(
                lost=float(np.mean(~finite[~trace.is_bad])),
                off=float(np.mean(np.abs(gap))),
                low=float(np.mean(gap > 8)),
                waits=steps_to_recover(log2_scale, trace.is_bad),
            )
    return {key: results[key] for key in of}


def mean_outcomes(
    make: Callable[..., rules.Rule],
    make_traces: Callable[[int, int], Mapping[str, Trace]],
    steps: int,
    seeds: Iterable[int],
) -> dict[str, Outcome]:
    """The means over seeds, and the waits of all of them."""
    found = outcomes(
        make,
        {
            (name, seed): trace
            for seed in seeds
            for name, trace in make_traces(steps, seed).items()
        },
    )
    by_name: dict[str, list[Outcome]] = {name: [] for name, _ in found}
    for (name, _), outcome in found.items():
        by_name[name].append(outcome)
    return {
        name: Outcome(
            lost=float(np.mean([outcome.lost for outcome in same])),
            off=float(np.mean([outcome.off for outcome in same])),
            low=float(np.mean([outcome.low for outcome in same])),
            waits=tuple(itertools.chain(*(outcome.waits for outcome in same))),
        )
        for name, same in by_name.items()
    }


def simulated(steps: int) -> dict[str, list[list[str]]]:
    """The tables of healthy and of bad batches, with a row for each rule."""
    tables: dict[str, list[list[str]]] = {"healthy": [], "bad": []}
    of = traces(steps)
    for name, make in RULES.items():
        results = outcomes(make, of)
        cells = {
            trace: f"{o.lost:.2%}, {o.off:.1f}, {o.low:.1%}"
            for trace, o in results.items()
        }
        wait = f"{np.mean(results['drift and 3 bursts'].waits):.0f}"
        tables["healthy"].append([name, *(cells[trace] for trace in HEALTHY)])
        tables["bad"].append([name, *(cells[trace] for trace in BAD), wait])
    return tables


def digits(
    steps: int, one_in: int | None = None, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Batches of pixels and labels, of which one in so many holds a NaN.

    Without ``one_in`` these are 20 in a row, a third of the way in.
    """
    data = load_digits()
    generator = np.random.default_rng(seed)
    order = generator.integers(len(data.target), size=(steps, 64))
    pixels = (data.data[order] / 16).astype(np.float32)
    is_bad = generator.random(steps) < (1 / one_in if one_in else 0)
    if one_in is None:
        is_bad[steps // 3 : steps // 3 + BURST] = True
    pixels[is_bad, 0, 0] = np.nan
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


class Trained(NamedTuple):
    """Of every step of a run."""

    loss: jax.Array  # without its weight
    skipped: jax.Array
    flushed: jax.Array  # share of the gradient's entries that only float16 makes zero
    log2_scale: jax.Array
    log2_usable: jax.Array  # the scale that takes the largest gradient to 65504


@functools.partial(jax.jit, static_argnums=(0, 3))
def train(
    rule: rules.Rule,
    params: list[jax.Array],
    batches: tuple[jax.Array, jax.Array],
    dtype: jax.typing.DTypeLike = jnp.float16,
) -> Trained:
    # A long run learns more slowly, or its loss would be 0 long before its end.
    learning_rate = min(1e-3, 3 / len(batches[1]))
    tx = dls.loss_scaling(optax.adam(learning_rate, eps=1e-12), rule)
    loss_in_dtype = functools.partial(loss_fn, dtype=dtype)

    def zeros(grads: list[jax.Array]) -> jax.Array:
        number = sum((jnp.sum(g == 0) for g in grads), jnp.int32(0))
        return number / sum(g.size for g in grads)

    def step(carry, batch):
        params, state = carry
        log2_scale = jnp.log2(dls.loss_scale(state))
        loss, grads = dls.value_and_scaled_grad(loss_in_dtype)(
            params, batch, state=state
        )
        exact = jax.grad(loss_fn)(params, batch, jnp.float32)
        largest = jnp.max(jnp.stack([jnp.max(jnp.abs(g)) for g in exact]))
        flushed = zeros(grads) - zeros(exact)
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), Trained(
            loss=loss / 1e-4,
            skipped=state.scaler.consecutive_skips > 0,
            flushed=flushed,
            log2_scale=log2_scale,
            log2_usable=jnp.log2(65504 / largest),
        )

    return jax.lax.scan(step, (params, tx.init(params)), batches)[1]


class Run(NamedTuple):
    """One rule on the digits."""

    trained: Trained
    is_bad: np.ndarray

    def cell(self) -> str:
        lost = np.sum(self.trained.skipped & ~self.is_bad)
        flushed = np.mean(self.trained.flushed[~self.is_bad])
        loss = np.mean(self.trained.loss[-500:], where=~self.is_bad[-500:])
        return f"{lost}, {flushed:.1%}, {loss:.2g}"


def real(steps: int) -> dict[str, dict[str, Run]]:
    """By the kind of run, and by rule."""
    kinds = {
        f"20 NaN in a row, {steps} steps": digits(steps),
        f"NaN 1 in 100, {steps} steps": digits(steps, 100),
        f"NaN 1 in 1000, {10 * steps} steps": digits(10 * steps, 1000),
    }
    chosen = {name: RULES[name](init_scale=2.0**15) for name in REAL}
    runs: dict[str, dict[str, Run]] = {}
    for kind, batches in kinds.items():
        is_bad = np.isnan(batches[0]).any((1, 2))
        runs[kind] = {
            name: Run(train(rule, start_params(), batches), is_bad)
            for name, rule in chosen.items()
        }
        exact = train(rules.static(1.0), start_params(), batches, jnp.float32)
        runs[kind][FLOAT32] = Run(exact, is_bad)
    return runs


def draw(kind: str, runs: Mapping[str, Run], path: pathlib.Path) -> None:
    """The scale over time, and how much of the gradient is flushed to zero."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (above, below) = plt.subplots(
        2, figsize=(8, 5.5), height_ratios=[3, 2], sharex=True, layout="constrained"
    )
    usable = np.asarray(runs[DEFAULT].trained.log2_usable)
    steps = np.flatnonzero(~runs[DEFAULT].is_bad)  # a NaN has no usable scale
    label = "where the largest gradient reaches 65504"
    above.plot(steps, usable[steps], color="0.8", lw=0.5, label=label)
    for name, color in ((LOG_NORMAL, "C0"), (DEFAULT, "black"), (CLASSIC, "C3")):
        trained = runs[name].trained
        above.plot(trained.log2_scale, color=color, lw=1, label=name)
        smooth = np.convolve(trained.flushed[steps], np.full(50, 1 / 50), "valid")
        below.plot(steps[49:], 100 * smooth, color=color, label=name)
    title = f"Digits in float16: {kind}"
    above.set(ylabel="log2 of the scale", title=title)
    above.legend(frameon=False, fontsize=8, loc="lower left")
    below.set(xlabel="step", ylabel="% of the gradient\nflushed to zero")
    figure.savefig(path, dpi=90)


def markdown(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a fifth of the steps")
    parser.add_argument("--picture", type=pathlib.Path, help="where to draw one")
    arguments = parser.parse_args()
    part = 5 if arguments.quick else 1
    tables = simulated(100_000 // part)
    lost = "good steps lost, mean bits off, over 8 bits low"
    print(markdown([lost, *HEALTHY], tables["healthy"]), end="\n\n", flush=True)
    print(markdown([lost, *BAD, "recovery"], tables["bad"]), end="\n\n", flush=True)
    runs = real(3000 // part)
    rows = [
        [name, *(of_kind[name].cell() for of_kind in runs.values())]
        for name in (*REAL, FLOAT32)
    ]
    print(markdown(["good steps lost, flushed to zero, loss", *runs], rows))
    if arguments.picture:
        kind = next(kind for kind in runs if "1 in 100," in kind)
        draw(kind, runs[kind], arguments.picture)


if __name__ == "__main__":
    main()
