"""What a step costs with loss scaling, ours and others', against none at all.

    python benchmarks/speed.py [--quick] [--out FOLDER]

Steps take turns in one process; a ratio is that to plain AdamW in the same round, as the
median with its quartiles; other times are medians, those of Python the fastest of three.
Writes speed.md and speed.png. Other libraries are optional
(pip install flax jmp keras mixed-precision-for-jax jaxamp); a missing one is a line that
says so. Note that jamp installs itself under the name jmp. On a GPU the same command
measures there, and compares the conditional with a select.
"""

import argparse
import concurrent.futures
import functools
import importlib.metadata
import os
import pathlib
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

# Large temporaries fault in page by page at every call otherwise, and hide the rest.
MALLOC = (
    "glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=9000000000:"
    "glibc.malloc.top_pad=1000000000"
)
if __name__ == "__main__" and os.environ.get("GLIBC_TUNABLES") != MALLOC:
    environment = os.environ | {"GLIBC_TUNABLES": MALLOC, "KERAS_BACKEND": "jax"}
    os.execve(sys.executable, [sys.executable, *sys.argv], environment)

import jax
import jax.numpy as jnp
import models
import numpy as np
import optax
import peers
from peers import Method, Params

import optax_dls as dls

PLAIN, OURS = "no scaling", "optax_dls"
GROWTH = ("leaves", "parameters")


class Measured(NamedTuple):
    """Of each method; and why some are missing."""

    seconds: dict[str, list[float]]  # of every round
    page_faults: dict[str, list[int]]
    compile_seconds: dict[str, float]
    left_out: dict[str, str]

    def ratio(self, name: str) -> str:
        ratios = np.divide(self.seconds[name], self.seconds[PLAIN])
        low, median, high = np.quantile(ratios, [0.25, 0.5, 0.75])
        return f"{median:.2f} [{low:.2f}, {high:.2f}]"

    def milliseconds(self, name: str) -> float:
        return float(np.median(self.seconds[name])) * 1e3


def build(
    methods: Mapping[str, Callable[[optax.GradientTransformation], Method]],
    number_of_leaves: int,
) -> tuple[dict[str, Method], dict[str, str]]:
    """The methods that are installed and can be compiled, and why the others cannot."""
    built, left_out = {}, {}
    for name, make in methods.items():
        try:
            method = make(optax.adamw(1e-3))
        except ImportError as error:
            left_out[name] = f"not installed: {error.name}"
            continue
        if number_of_leaves > method.max_leaves:
            left_out[name] = "not measured"
            continue
        built[name] = method
    return built, left_out


def measure(
    methods: Mapping[str, Callable[[optax.GradientTransformation], Method]],
    params: Params,
    scaled_grads: Callable[..., Params],
    batches: Mapping[str, object],
    *,
    donate: bool = True,
    rounds: int = 21,
    compile_together: bool = True,
) -> dict[str, Measured]:
    """Times one step of each method in turn, for so many rounds of each batch.

    Two programs compile at once, unless it is the seconds of that which are of interest.
    """
    built, left_out = build(methods, len(params))
    batch = next(iter(batches.values()))
    lowered, running = {}, {}
    for name, method in built.items():
        own = jax.tree.map(jnp.copy, params)
        running[name] = own, jax.tree.map(jnp.array, method.init(own))

        def step(params, state, batch, method=method):
            return method.step(
                params, state, functools.partial(scaled_grads, batch=batch)
            )

        jitted = jax.jit(step, donate_argnums=(0, 1) if donate else ())
        lowered[name] = jitted.lower(*running[name], batch)

    def compile_one(name: str) -> tuple[Callable, float]:
        start = time.perf_counter()
        return lowered[name].compile(), time.perf_counter() - start

    with concurrent.futures.ThreadPoolExecutor(2 if compile_together else 1) as pool:
        compiled = dict(zip(built, pool.map(compile_one, built), strict=True))
    results = {}
    for label, batch in batches.items():
        seconds: dict[str, list[float]] = {name: [] for name in built}
        faults: dict[str, list[int]] = {name: [] for name in built}
        for number in range(rounds + 1):
            for name, (run, _) in compiled.items():
                faults_before, start = page_faults(), time.perf_counter()
                new = jax.block_until_ready(run(*running[name], batch))
                if number:  # the first warms up
                    seconds[name].append(time.perf_counter() - start)
                    faults[name].append(page_faults() - faults_before)
                if donate:
                    running[name] = new
        times = {name: compile_time for name, (_, compile_time) in compiled.items()}
        results[label] = Measured(seconds, faults, times, left_out)
    return results


def page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def compare(quick: bool) -> dict[str, Measured]:
    """Every method at every case: the update alone, and whole steps."""
    methods = dict(peers.METHODS)
    if jax.default_backend() != "cpu":
        methods["optax_dls with where"] = peers.ours_with_where
    sizes = {"1 leaf": (1, 10**7), "200 leaves": (200, 50_000)}
    sizes |= {"2000 leaves": (2000, 500)}
    if quick:
        sizes = {"1 leaf": (1, 200_000)}
    rounds = 5 if quick else 21
    columns = {}
    for name, (number, size) in sizes.items():
        params, batches = models.leaves_of(number, size)
        for donate in (True, False) if number == 1 else (True,):
            results = measure(
                methods, params, models.given, batches, donate=donate, rounds=rounds
            )
            for label, measured in results.items():
                columns[name + label + ("" if donate else ", not donated")] = measured
    for name, (params, batch), loss_fn in (
        ("MLP step", models.mlp(64 if quick else 512), models.mlp_loss),
        (
            "transformer step",
            models.transformer(32 if quick else 128),
            models.transformer_loss,
        ),
    ):
        grads = models.grads_of(loss_fn)
        columns[name] = measure(methods, params, grads, {"": batch}, rounds=3 * rounds)[
            ""
        ]
    return columns


def comparison_table(columns: dict[str, Measured]) -> str:
    rows = [[PLAIN, *(f"{m.milliseconds(PLAIN):.1f} ms" for m in columns.values())]]
    for name in [*peers.METHODS, "optax_dls with where"][1:]:
        cells = [
            m.ratio(name) if name in m.seconds else m.left_out.get(name, "")
            for m in columns.values()
        ]
        rows += [[name, *cells]] if any(cells) else []
    return table(["", *columns], rows)


def growth(quick: bool) -> dict[str, dict[int, Measured]]:
    """Plain and ours, over leaves of 1000 entries and over the size of one leaf."""
    methods = {name: peers.METHODS[name] for name in (PLAIN, OURS)}
    leaves = (1, 30) if quick else (1, 10, 100, 1000, 5000)
    parameters = (10**5, 10**6) if quick else (10**5, 10**6, 10**7, 10**8)
    results: dict[str, dict[int, Measured]] = {kind: {} for kind in GROWTH}
    for kind, number, shape in (
        *(("leaves", n, (n, 1000)) for n in leaves),
        *(("parameters", n, (1, n)) for n in parameters),
    ):
        params, batches = models.leaves_of(*shape)
        good = {"": batches[""]}
        results[kind][number] = measure(
            methods, params, models.given, good, rounds=11, compile_together=False
        )[""]
    return results


def growth_table(results: dict[str, dict[int, Measured]]) -> str:
    """With the exponents of growth, of what is above each row."""
    rows = []
    for kind, points in results.items():
        before: tuple[int, list[float]] | None = None
        for number, m in points.items():
            times = [m.milliseconds(PLAIN), m.milliseconds(OURS)]
            times += [m.compile_seconds[PLAIN], m.compile_seconds[OURS]]
            exponents = ["", "", "", ""]
            if before:
                grown = np.log(np.divide(times, before[1])) / np.log(number / before[0])
                exponents = [f" (n^{x:.1f})" for x in grown]
            before = number, times
            cells = [f"{t:.2f}{x}" for t, x in zip(times, exponents, strict=True)]
            cells.insert(2, m.ratio(OURS))
            cells.insert(3, f"{np.median(m.page_faults[OURS]):.0f}")
            rows.append([f"{kind}: {number:,}", *cells, f"{times[3] / times[2]:.2f}"])
    header = ["", "plain ms", "ours ms", "ratio", "its page faults"]
    header += ["plain compiles in s", "ours", "ratio"]
    return table(header, rows)


def fastest(function: Callable[[], object], times: int = 3) -> float:
    """Milliseconds, after a first call."""
    function()
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        jax.block_until_ready(function())
        taken.append(time.perf_counter() - start)
    return min(taken) * 1e3


def overhead(number: int = 100) -> str:
    """What Python costs: un-jitted, while tracing, and to import, in milliseconds."""
    params, _ = models.leaves_of(number, 8)
    grads = params

    def loss_fn(params: Params) -> jax.Array:
        return sum((jnp.sum(p) for p in params.values()), jnp.float32(0))

    wrappers = {
        "optax.adamw": lambda tx: tx,
        "optax.apply_if_finite": lambda tx: optax.apply_if_finite(tx, 10),
        "optax_dls": dls.dynamic_loss_scaling,
    }
    rows = []
    for name, wrap in wrappers.items():
        tx = wrap(optax.adamw(1e-3))
        state = tx.init(params)

        def trace(wrap=wrap, state=state) -> None:
            new = wrap(optax.adamw(1e-3))  # an old one remembers
            jax.jit(new.update).trace(grads, state, params)

        def update(tx=tx, state=state) -> object:
            return tx.update(grads, state, params)

        cells = f"{fastest(update):.1f}", f"{fastest(trace):.0f}"
        rows.append([f"{name}, update of {number} leaves", *cells])

    state = dls.dynamic_loss_scaling(optax.adamw(1e-3)).init(params)
    plain = jax.value_and_grad(loss_fn)
    scaled = functools.partial(dls.value_and_scaled_grad(loss_fn), state=state)
    for name, function in (
        ("jax.value_and_grad", plain),
        ("value_and_scaled_grad", scaled),
    ):

        def trace_gradient(function=function) -> None:
            jax.jit(lambda p: function(p)).trace(params)  # a new one remembers nothing

        run = functools.partial(function, params)
        cells = f"{fastest(run):.1f}", f"{fastest(trace_gradient):.0f}"
        rows.append([f"{name} of {number} leaves", *cells])
    imports = min(import_milliseconds() for _ in range(3))
    rows.append(["import optax_dls, after jax and optax", f"{imports:.0f}", ""])
    return table(["", "un-jitted, ms", "traced, ms"], rows)


def import_milliseconds() -> float:
    """Without garbage collection: of what jax made, which may fall here or elsewhere."""
    code = (
        "import gc, time, jax, optax; gc.disable(); start = time.perf_counter(); "
        "import optax_dls; print(time.perf_counter() - start)"
    )
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    for name in ("GLIBC_TUNABLES", "PYTHONDONTWRITEBYTECODE"):
        environment.pop(name, None)
    return 1e3 * float(
        subprocess.check_output([sys.executable, "-c", code], env=environment)
    )


def draw(
    columns: dict[str, Measured],
    results: dict[str, dict[int, Measured]],
    path: pathlib.Path,
) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplot_mosaic(
        [["methods", "methods"], ["leaves", "parameters"]],
        figsize=(10, 7.5),
        height_ratios=[3, 2],
        layout="constrained",
    )
    shown = [name for name in columns if "donated" not in name]
    names = [name for name in peers.METHODS if name != PLAIN]
    axis = axes["methods"]
    for i, name in enumerate(names):
        places = [j for j, c in enumerate(shown) if name in columns[c].seconds]
        medians = [
            np.median(np.divide(m.seconds[name], m.seconds[PLAIN]))
            for m in (columns[shown[j]] for j in places)
        ]
        offset = (i - (len(names) - 1) / 2) * 0.085
        color = "black" if name == OURS else f"C{i}"
        axis.bar(np.add(places, offset), medians, 0.08, label=name, color=color)
    axis.axhline(1, color="black", lw=1)
    axis.set_xticks(range(len(shown)), shown, rotation=10)
    axis.set(ylabel="time, no scaling = 1", title="A donated step in float16")
    axis.legend(frameon=False, fontsize=8, ncols=2)
    for kind, points in results.items():
        axis = axes[kind]
        for name, color in ((PLAIN, "0.6"), (OURS, "black")):
            times = [m.milliseconds(name) for m in points.values()]
            axis.loglog(list(points), times, "o-", color=color, label=f"{name}, ms")
            if kind == "leaves":
                times = [m.compile_seconds[name] for m in points.values()]
                label = f"{name}, compile s"
                axis.loglog(list(points), times, "s--", color=color, label=label)
        axis.set(xlabel=kind, title=f"An update over {kind}")
        axis.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=110)


def machine() -> str:
    packages = ["jax", "jaxlib", "optax", "flax", "jmp", "keras"]
    packages += ["mixed-precision-for-jax", "jaxamp"]
    versions = []
    for package in packages:
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"{package} missing")
    device = jax.devices()[0].device_kind
    return (
        f"{device}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"{', '.join(versions)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small arrays, few rounds")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("."))
    arguments = parser.parse_args()
    parts = [overhead(10 if arguments.quick else 100)]
    print(parts[0], flush=True)
    columns = compare(arguments.quick)
    parts.append(comparison_table(columns))
    print(parts[1], flush=True)
    results = growth(arguments.quick)
    parts += [growth_table(results), machine()]
    print("\n\n".join(parts[2:]))
    (arguments.out / "speed.md").write_text("\n\n".join(parts) + "\n")
    draw(columns, results, arguments.out / "speed.png")


if __name__ == "__main__":
    main()
