"""Runs the three trainings and shows them: progress, a table, a picture."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MultipleLocator
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

import optax_dls as dls

from ._train import Log, train

LEARNING_RATE = 1e-3
# The last steps, over which the final error is averaged.
FINAL = 20


def setups() -> dict[str, tuple[optax.GradientTransformationExtraArgs, jnp.dtype]]:
    """Name, wrapped optimizer and compute dtype of each run."""
    adam = optax.adam(LEARNING_RATE)
    # These are far from the defaults, so that a short run shows the scale at work. It
    # starts 2**9 times as high and grows fifty times as often.
    scaling = dls.dynamic_loss_scaling(
        adam, init_scale=2.0**24, growth_interval=40, max_scale=2.0**48
    )
    return {
        "float32": (dls.no_loss_scaling(adam), jnp.float32),
        "float16": (dls.no_loss_scaling(adam), jnp.float16),
        "float16 scaled": (scaling, jnp.float16),
    }


def run(steps: int, seed: int, out: Path) -> None:
    """Trains three times, prints the table and writes the picture."""
    console = Console()
    logs = {}
    with Progress(
        TextColumn("{task.description:<14}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[numbers]}"),
        console=console,
    ) as progress:
        for name, (tx, dtype) in setups().items():
            task = progress.add_task(name, total=steps, numbers="compiling")
            chunks: list[Log] = []
            for chunk in train(tx, dtype, steps, seed):
                chunks.append(chunk)
                skips = sum(int(c.skipped.sum()) for c in chunks)
                numbers = (
                    f"loss {chunk.loss[-1]:.4f}  scale {power_of_two(float(chunk.loss_scale[-1]))}"
                    f"  skipped {skips}"
                )
                progress.update(task, advance=len(chunk.loss), numbers=numbers)
            logs[name] = Log(*map(jnp.concatenate, zip(*chunks, strict=True)))
    console.print(table(logs))
    console.print(verdict(logs), highlight=False)
    draw(logs).savefig(out, dpi=150)
    console.print(f"Picture: {out}", highlight=False)


def power_of_two(x: float, _: int = 0) -> str:
    return f"2^{np.log2(x):g}"


def final_loss(log: Log) -> float:
    return float(jnp.mean(log.loss[-FINAL:]))


def table(logs: dict[str, Log]) -> Table:
    """One row per run."""
    result = Table(title="Autoencoder on 8x8 digits")
    result.add_column("run", no_wrap=True)
    for column in ("final error", "zero grads", "skipped", "scale start/top/end"):
        result.add_column(column, justify="right")
    for name, log in logs.items():
        scales = [float(log.loss_scale[t]) for t in (0, jnp.argmax(log.loss_scale), -1)]
        result.add_row(
            name,
            f"{final_loss(log):.5f}",
            f"{jnp.mean(log.zero_share):.1%}",
            f"{log.skipped.sum()} of {len(log.loss)}",
            "none" if max(scales) == 1 else " ".join(map(power_of_two, scales)),
        )
    return result


def verdict(logs: dict[str, Log]) -> str:
    """The final errors of the two float16 runs, each against that of float32."""
    full, half, scaled = map(final_loss, logs.values())
    return (
        f"The final error in float16 is {half / full:.2f} times that of float32, and with "
        f"loss scaling {scaled / full:.3f} times (means of the last "
        f"{min(FINAL, len(logs['float32'].loss))} steps)."
    )


def draw(logs: dict[str, Log]) -> Figure:
    """The losses of the runs, and below them the scale of the last, step by step."""
    # Okabe and Ito's palette, which colour-blind readers can tell apart.
    styles = {
        "float32": {"color": "#000000", "linewidth": 3.5, "alpha": 0.35},
        "float16": {"color": "#D55E00", "linewidth": 1.5},
        "float16 scaled": {"color": "#0072B2", "linewidth": 1.5},
    }
    figure = Figure(figsize=(8, 6), layout="constrained")
    above, below = figure.subplots(2, sharex=True, height_ratios=(3, 2))
    scaled = logs["float16 scaled"]
    steps = np.arange(1, len(scaled.loss) + 1)
    for name, log in logs.items():
        above.plot(steps, log.loss, label=name, **styles[name])
    above.set(yscale="log", ylabel="mean squared error")
    above.set_title(
        "One autoencoder on handwritten digits, loss weight 0.001", loc="left"
    )
    above.legend(frameon=False)

    # The scale that each step used: a skipped step is marked at the one that overflowed.
    log2_scale, skipped = np.log2(scaled.loss_scale), np.asarray(scaled.skipped)
    below.step(steps, log2_scale, where="mid", **styles["float16 scaled"])
    below.plot(
        steps[skipped], log2_scale[skipped], "kx", ms=8, mew=2, label="skipped step"
    )
    below.set(xlabel="step", ylabel="loss scale (float16 scaled)")
    below.yaxis.set_major_locator(MultipleLocator(2))
    below.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"$2^{{{y:.0f}}}$"))
    if skipped.any():
        below.legend(frameon=False, loc="lower right")
    for axes in (above, below):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    return figure
