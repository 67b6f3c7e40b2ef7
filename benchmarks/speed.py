"""What a step costs with loss scaling, ours and others', against none at all.

    python benchmarks/speed.py [--quick] [--out FOLDER]

Each figure is a ratio to plain AdamW in the same process, of runs that take turns: the
median, with its quartiles. Writes speed.md and speed.png. Other libraries are optional
(pip install flax jmp keras mixed-precision-for-jax jaxamp); a missing one is a line that
says so. Note that jamp installs itself under the name jmp. On a GPU the same command
measures there.
"""

import argparse
import functools
import importlib.metadata
import os
import pathlib
import platform
import sys
import time
from collections.abc import Callable
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
import numpy as np
import optax

import optax_dls as dls

SCALE = 2.0**10
Params = dict[str, jax.Array]
ScaledGrads = Callable[[Params, jax.Array], Params]  # of parameters and the scale


class Method(NamedTuple):
    """A way to train: state from parameters, and a step with scaled gradients."""

    init: Callable[[Params], object]
    step: Callable[[Params, object, ScaledGrads], tuple[Params, object]]
    max_leaves: int = 10_000  # above, it takes minutes to compile


def unscaled(grads: Params, scale: jax.Array) -> Params:
    return jax.tree.map(lambda g: g.astype(jnp.float32) * (1 / scale), grads)


def leafwise_finite(grads: Params) -> jax.Array:
    return jnp.all(
        jnp.stack([jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(grads)])
    )


def select(finite: jax.Array, new: object, old: object) -> object:
    return jax.tree.map(functools.partial(jnp.where, finite), new, old)


def without(optimizer: optax.GradientTransformation) -> Method:
    def step(params, state, scaled_grads):  # type: ignore[no-untyped-def]
        grads = unscaled(scaled_grads(params, jnp.float32(1)), jnp.float32(1))
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return Method(optimizer.init, step)


def fixed(optimizer: optax.GradientTransformation) -> Method:
    def step(params, state, scaled_grads):  # type: ignore[no-untyped-def]
        grads = unscaled(scaled_grads(params, jnp.float32(SCALE)), jnp.float32(SCALE))
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return Method(optimizer.init, step)


def apply_if_finite(optimizer: optax.GradientTransformation) -> Method:
    return fixed(optax.apply_if_finite(optimizer, 1_000_000))


def ours(optimizer: optax.GradientTransformation, **settings: float) -> Method:
    tx = dls.dynamic_loss_scaling(optimizer, init_scale=SCALE, **settings)

    def step(params, state, scaled_grads):  # type: ignore[no-untyped-def]
        grads = scaled_grads(params, dls.loss_scale(state))
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return Method(tx.init, step)


def ours_with_where(optimizer: optax.GradientTransformation) -> Method:
    """The same with a select where the library has a conditional, for GPUs."""

    def step(params, state, scaled_grads):  # type: ignore[no-untyped-def]
        scale, inner = state
        grads = unscaled(scaled_grads(params, scale), scale)
        finite = dls.all_finite(grads)
        updates, new = optimizer.update(grads, inner, params)
        updates = jax.tree.map(lambda u: jnp.where(finite, u, 0), updates)
        state = jnp.where(finite, scale, scale / 2), select(finite, new, inner)
        return optax.apply_updates(params, updates), state

    return Method(lambda p: (jnp.float32(SCALE), optimizer.init(p)), step, 200)


def flax_dynamic_scale(optimizer: optax.GradientTransformation) -> Method:
    from flax.training.dynamic_scale import DynamicScale

    def step(params, state, scaled_grads):  # type: ignore[no-untyped-def]
        scaler, inner = state
        grads = scaled_grads(params, scaler.scale)

        @jax.custom_vjp
        def loss(params):  # type: ignore[no-untyped-def]
            return jnp.float32(0)

        loss.defvjp(lambda p: (jnp.float32(0), None), lambda _, g: (grads,))
        zeros = jax.tree.map(jnp.zeros_like, grads)
        scaler, finite, _, grads = scaler.value_and_grad(loss)(zeros)
        updates, new = optimizer.update(grads, inner, params)
        new_params = optax.apply_updates(params, updates)
        inner = select(finite, new, inner)
        return select(finite, new_params, params), (scaler, inner)

    start = DynamicScale(scale=SCALE)
    return Method(lambda p: (start, optimizer.init(p)), step, 200)


def jmp_dynamic_loss_scale(optimizer: optax.GradientTransformation) -> Method:
    import jmp

    def step(params, state, scaled_grads):  # type: ignore[no-untyped-def]
        scale, counter, inner = state
        scaler = jmp.DynamicLossScale(scale, counter)
        grads = scaler.unscale(scaled_grads(params, scale))
        finite = jmp.all_finite(grads)
        scaler = scaler.adjust(finite)
        updates, new = optimizer.update(grads, inner, params)
        new_params = optax.apply_updates(params, updates)
        params, inner = jmp.select_tree(finite, (new_params, new), (params, inner))
        return params, (scaler.loss_scale, scaler.counter, inner)

    def init(params):  # type: ignore[no-untyped-def]
        return jnp.float32(SCALE), jnp.int32(0), optimizer.init(params)

    return Method(init, step, 200)


def mpx_dynamic_loss_scaling(optimizer: optax.GradientTransformation) -> Method:
    import mpx

    def step(params, state, scaled_grads):  # type: ignore[no-untyped-def]
        scaler, inner = state
        grads = scaled_grads(params, scaler.loss_scaling)
        finite = mpx.all_finite(grads)
        grads = scaler.unscale(grads)
        params, inner = mpx.optimizer_update(params, optimizer, inner, grads, finite)
        return params, (scaler.adjust(finite), inner)

    def init(params):  # type: ignore[no-untyped-def]
        scaler = mpx.DynamicLossScaling(jnp.float32(SCALE), jnp.float32(1))
        return scaler, optimizer.init(params)

    return Method(init, step, 200)


def jaxamp_without_skip(optimizer: optax.GradientTransformation) -> Method:
    import jaxamp
    from jaxamp._dynamic_scaler import dynamic_scale_tx

    def step(params, state, scaled_grads):  # type: ignore[no-untyped-def]
        scaler, inner = state
        grads = scaled_grads(params, scaler.scaler)
        given = dynamic_scale_tx(lambda _: lambda **_: grads)(lambda: None)
        scaler, grads = given(dynamic_scaler_state=scaler)
        updates, inner = optimizer.update(grads, inner, params)
        return optax.apply_updates(params, updates), (scaler, inner)

    def init(params):  # type: ignore[no-untyped-def]
        start = jaxamp.DynamicScalerState(scaler=jnp.float32(SCALE))
        return jax.tree.map(jnp.array, start), optimizer.init(params)

    return Method(init, step)


def keras_loss_scale_optimizer(optimizer: optax.GradientTransformation) -> Method:
    import keras

    del optimizer  # Keras has an AdamW of its own
    kinds: dict[str, object] = {}

    def init(params):  # type: ignore[no-untyped-def]
        variables = [keras.Variable(p) for p in jax.tree.leaves(params)]
        kinds["it"] = keras.optimizers.LossScaleOptimizer(
            keras.optimizers.AdamW(1e-3, weight_decay=1e-4), initial_scale=SCALE
        )
        kinds["it"].build(variables)
        return [v.value for v in kinds["it"].variables]

    def step(params, state, scaled_grads):  # type: ignore[no-untyped-def]
        grads = scaled_grads(params, jnp.float32(SCALE))
        leaves, treedef = jax.tree.flatten(params)
        leaves, state = kinds["it"].stateless_apply(
            state, jax.tree.leaves(grads), leaves
        )
        return jax.tree.unflatten(treedef, leaves), state

    return Method(init, step, 200)


METHODS = {
    "no scaling": without,
    "fixed scale, no check": fixed,
    "optax_dls": ours,
    "optax_dls, gradient limit": functools.partial(ours, gradient_limit=65504.0),
    "optax.apply_if_finite": apply_if_finite,
    "flax DynamicScale": flax_dynamic_scale,
    "jmp": jmp_dynamic_loss_scale,
    "mpx": mpx_dynamic_loss_scaling,
    "jaxamp (does not skip)": jaxamp_without_skip,
    "Keras on JAX": keras_loss_scale_optimizer,
}


class Measured(NamedTuple):
    """Seconds of every round for each method, seconds to compile, and what is missing."""

    seconds: dict[str, list[float]]
    compile_seconds: dict[str, float]
    left_out: dict[str, str]

    def ratio(self, name: str) -> str:
        ratios = np.divide(self.seconds[name], self.seconds["no scaling"])
        low, median, high = np.quantile(ratios, [0.25, 0.5, 0.75])
        return f"{median:.2f} [{low:.2f}, {high:.2f}]"


def measure(
    methods: dict[str, Callable],
    params: Params,
    scaled_grads: Callable[[Params, jax.Array, object], Params],
    batches: dict[str, object],
    *,
    donate: bool = True,
    rounds: int = 21,
    seconds: float = 40.0,
) -> dict[str, Measured]:
    """Times one step of each method in turn, for so many rounds or seconds of each batch."""
    optimizer = optax.adamw(1e-3)
    compile_seconds, left_out, running = {}, {}, {}
    batch = next(iter(batches.values()))
    for name, make in methods.items():
        try:
            method = make(optimizer)
        except ImportError as error:
            left_out[name] = f"not installed: {error.name}"
            continue
        if len(params) > method.max_leaves:
            left_out[name] = "takes minutes to compile"
            continue
        own = jax.tree.map(jnp.copy, params)
        state = jax.tree.map(jnp.array, method.init(own))

        def step(params, state, batch, method=method):  # type: ignore[no-untyped-def]
            grads_of = functools.partial(scaled_grads, batch=batch)
            return method.step(params, state, grads_of)

        start = time.perf_counter()
        compiled = (
            jax.jit(step, donate_argnums=(0, 1) if donate else ())
            .lower(own, state, batch)
            .compile()
        )
        compile_seconds[name] = time.perf_counter() - start
        running[name] = compiled, jax.block_until_ready(compiled(own, state, batch))

    results = {}
    for label, batch in batches.items():
        results[label] = Measured(
            {name: [] for name in running}, compile_seconds, left_out
        )
        end = time.perf_counter() + seconds
        for number in range(rounds):
            for name, (compiled, (own, state)) in running.items():
                start = time.perf_counter()
                new = jax.block_until_ready(compiled(own, state, batch))
                results[label].seconds[name].append(time.perf_counter() - start)
                running[name] = compiled, new if donate else (own, state)
            if number >= 4 and time.perf_counter() > end:
                break
    return results


def given(params: Params, scale: jax.Array, batch: Params) -> Params:
    """Gradients that come from elsewhere, for the update alone."""
    del params, scale
    return batch


def leaves_of(number: int, size: int) -> tuple[Params, dict[str, Params]]:
    """Parameters in float32 and scaled gradients in float16, good ones and bad ones."""
    params = {f"w{i}": jnp.full(size, 0.5) for i in range(number)}
    good = {name: jnp.full(size, 0.01, jnp.float16) for name in params}
    last = f"w{number - 1}"
    bad = good | {last: good[last].at[-1].set(jnp.inf)}
    return params, {"": good, ", overflow": bad}


def mlp_loss(params: Params, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
    x, labels = batch
    *hidden, last = (params[name].astype(jnp.float16) for name in sorted(params))
    x = x.astype(jnp.float16)
    for weights in hidden:
        x = jax.nn.gelu(x @ weights)
    logits = (x @ last).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def mlp(width: int = 512) -> tuple[Params, tuple[jax.Array, jax.Array]]:
    sizes = [256, width, width, width, width, 10]
    keys = jax.random.split(jax.random.key(0), len(sizes))
    params = {
        f"w{i}": jax.random.normal(key, (a, b)) / a**0.5
        for i, (key, a, b) in enumerate(zip(keys, sizes[:-1], sizes[1:], strict=False))
    }
    x = jax.random.normal(keys[-1], (32, 256))
    return params, (x, jnp.arange(32) % 10)


def transformer_loss(params: Params, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Three layers of one head each, on rows of tokens."""
    tokens, labels = batch
    half = {name: p.astype(jnp.float16) for name, p in params.items()}
    x = half["embedding"][tokens]
    for i in range(3):
        q, k, v = (x @ half[f"{name}{i}"] for name in "qkv")
        scores = jnp.einsum("bid,bjd->bij", q, k) / jnp.float16(x.shape[-1] ** 0.5)
        x = x + jnp.einsum("bij,bjd->bid", jax.nn.softmax(scores), v) @ half[f"o{i}"]
        x = x + jax.nn.gelu(x @ half[f"up{i}"]) @ half[f"down{i}"]
        mean = jnp.mean(x.astype(jnp.float32) ** 2, -1, keepdims=True)
        x = (x / jnp.sqrt(mean + 1e-5).astype(jnp.float16)) * half[f"norm{i}"]
    logits = (x @ half["embedding"].T).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def transformer(width: int = 128) -> tuple[Params, tuple[jax.Array, jax.Array]]:
    shapes = {"embedding": (256, width)}
    for i in range(3):
        shapes |= {f"{name}{i}": (width, width) for name in "qkvo"}
        shapes |= {f"up{i}": (width, 4 * width), f"down{i}": (4 * width, width)}
        shapes |= {f"norm{i}": (1, 1, width)}
    keys = jax.random.split(jax.random.key(0), len(shapes))
    params = {
        name: jnp.ones(shape) if "norm" in name else jax.random.normal(key, shape) / 16
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    tokens = jnp.arange(4 * 32).reshape(4, 32) * 7 % 256
    return params, (tokens, (tokens + 1) % 256)


def grads_of(loss_fn: Callable) -> Callable:
    def scaled_grads(params: Params, scale: jax.Array, batch: object) -> Params:
        return jax.grad(lambda p: loss_fn(p, batch) * scale)(params)

    return scaled_grads


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def compare(quick: bool) -> tuple[str, dict[str, Measured]]:
    """The tables of all methods, and the measurements behind them."""
    if quick:
        sizes = {"1 leaf": (1, 200_000), "10 leaves": (10, 5000)}
    else:
        sizes = {"1 leaf": (1, 10**7), "200 leaves": (200, 50_000)}
        sizes["2000 leaves"] = (2000, 500)
    rounds = 5 if quick else 21
    methods = METHODS
    if jax.default_backend() != "cpu":
        methods = METHODS | {"optax_dls with where": ours_with_where}
    columns = {}
    for name, (number, size) in sizes.items():
        params, batches = leaves_of(number, size)
        for donate in (True, False) if number == 1 else (True,):
            results = measure(
                methods, params, given, batches, donate=donate, rounds=rounds
            )
            for label, measured in results.items():
                columns[name + label + ("" if donate else ", not donated")] = measured
    for name, (params, batch), loss_fn in (
        ("MLP step", mlp(64 if quick else 512), mlp_loss),
        ("transformer step", transformer(32 if quick else 128), transformer_loss),
    ):
        results = measure(
            methods, params, grads_of(loss_fn), {"": batch}, rounds=3 * rounds
        )
        columns[name] = results[""]
    rows = [
        [name]
        + [
            m.ratio(name) if name in m.seconds else m.left_out[name]
            for m in columns.values()
        ]
        for name in methods
    ]
    plain = [
        f"{np.median(m.seconds['no scaling']) * 1e3:.1f} ms" for m in columns.values()
    ]
    rows[0] = ["no scaling", *(f"1 ({text})" for text in plain)]
    return table(["against no scaling", *columns], rows), columns


def growth(
    quick: bool,
) -> tuple[str, dict[str, list[tuple[int, float, float, float, float]]]]:
    """Times of plain and of ours, run and compiled, over leaves and over parameters."""
    methods = {name: METHODS[name] for name in ("no scaling", "optax_dls")}
    leaves = (1, 10, 100) if quick else (1, 10, 100, 1000, 5000)
    parameters = (10**5, 10**6) if quick else (10**5, 10**6, 10**7, 10**8)
    series = {
        "leaves": [(n, (n, 1000)) for n in leaves],
        "parameters": [(n, (1, n)) for n in parameters],
    }
    results: dict[str, list[tuple[int, float, float, float, float]]] = {}
    rows = []
    for name, points in series.items():
        results[name] = []
        for number, shape in points:
            params, batches = leaves_of(*shape)
            good = {"": batches[""]}
            m = measure(methods, params, given, good, rounds=11, seconds=20)[""]
            times = [np.median(m.seconds[method]) * 1e3 for method in methods]
            compiles = [m.compile_seconds[method] for method in methods]
            results[name].append((number, *times, *compiles))
            rows.append(
                [f"{number} {name}", *(f"{t:.2f}" for t in times)]
                + [m.ratio("optax_dls"), *(f"{c:.1f}" for c in compiles)]
                + [f"{compiles[1] / compiles[0]:.2f}"]
            )
    header = ["", "plain ms", "ours ms", "ratio", "compile plain s", "ours s", "ratio"]
    return table(header, rows), results


def draw(columns: dict[str, Measured], path: pathlib.Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = [name for name in columns if "donated" not in name]
    figure, axis = plt.subplots(figsize=(9, 4.5), layout="constrained")
    names = [name for name in METHODS if name != "no scaling"]
    for i, name in enumerate(names):
        places, medians = [], []
        for j, column in enumerate(shown):
            seconds = columns[column].seconds
            if name in seconds:
                ratios = np.divide(seconds[name], seconds["no scaling"])
                places.append(j + (i - len(names) / 2) * 0.085)
                medians.append(np.median(ratios))
        color = "#0072B2" if name == "optax_dls" else f"{0.4 + 0.5 * i / len(names)}"
        axis.bar(places, medians, 0.08, label=name, color=color)
    axis.axhline(1, color="black", lw=1)
    axis.set_xticks(range(len(shown)), shown)
    axis.set(ylabel="time, plain AdamW = 1", title="A donated step in float16")
    axis.legend(frameon=False, fontsize=8, ncols=2)
    figure.savefig(path, dpi=120)


def machine() -> str:
    packages = ("jax", "jaxlib", "optax", "flax", "jmp", "keras")
    packages = (*packages, "mixed-precision-for-jax", "jaxamp")
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
    comparison, columns = compare(arguments.quick)
    law, _ = growth(arguments.quick)
    text = f"{comparison}\n\n{law}\n\n{machine()}\n"
    print(text)
    (arguments.out / "speed.md").write_text(text)
    draw(columns, arguments.out / "speed.png")


if __name__ == "__main__":
    main()
