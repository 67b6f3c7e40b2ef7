"""Pictures of a run, of gradients and of a scale search; needs the extra ``plot``."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import DTypeLike

from ._dtypes import is_inexact
from ._lookup import loss_scale

try:
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, MaxNLocator
except ImportError as error:
    raise ImportError(
        'optax_dls.plot needs matplotlib: pip install "optax-dls[plot]".'
    ) from error

if TYPE_CHECKING:
    from .debugging import History, ScaleSearch

# Okabe and Ito's palette, which readers with any colour vision can tell apart.
BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#999999"


def run(history: "History | Mapping[str, np.ndarray]") -> Figure:
    """The loss scale, the skipped steps and the loss of a run, on one sheet.

    Args:
      history: a :class:`History`, or what its ``arrays()`` gives.

    Returns:
      A matplotlib figure: ``figure.savefig("run.png")``, or in a notebook, after
      ``%matplotlib inline``, the last line of a cell.

    Raises:
      ValueError: the history is empty.

    Example:
      >>> import numpy as np
      >>> from optax_dls import plot
      >>> columns = {"step": np.arange(3), "loss_scale": np.array([8.0, 4.0, 4.0]),
      ...            "consecutive_skips": np.array([0, 1, 0])}
      >>> figure = plot.run(columns)
    """
    columns = history if isinstance(history, Mapping) else history.arrays()
    steps, scale = columns["step"], columns["loss_scale"]
    if not len(steps):
        raise ValueError("history is empty. Append dls.metrics(opt_state) to it first.")
    loss = np.asarray(columns.get("loss", np.zeros(0)))
    has_loss = bool(np.isfinite(loss).any())
    figure = Figure(figsize=(8, 5 if has_loss else 3), layout="constrained")
    axes = figure.subplots(2 if has_loss else 1, sharex=True, squeeze=False)[:, 0]

    axes[0].step(steps, np.log2(scale), where="post", color=BLUE, label="loss scale")
    skipped = columns["consecutive_skips"] > 0
    axes[0].plot(
        steps[skipped],
        np.log2(scale[skipped]),
        "x",
        color=ORANGE,
        label=f"skipped ({np.count_nonzero(skipped)} of {len(steps)} steps)",
    )
    axes[0].set_ylabel("loss scale")
    axes[0].legend()
    _powers_of_two(axes[0].yaxis)
    if has_loss:
        axes[1].plot(steps, loss, color=BLUE, linewidth=1)
        axes[1].set_ylabel("loss")
        finite = loss[np.isfinite(loss)]
        if finite.min() > 0 and finite.max() > 20 * finite.min():
            axes[1].set_yscale("log")
    axes[-1].set_xlabel("step")
    return figure


def exponents(
    grads: optax.Updates, state: object = None, dtype: DTypeLike = jnp.float16
) -> Figure:
    """The histogram of gradient exponents, with the range of ``dtype`` marked.

    Args:
      grads: the gradients of a scaled loss, or true ones if ``state`` is None. Take them
        in float32 to see what a half-precision backward pass would lose.
      state: the state whose scale multiplied the loss. Then both the true and the scaled
        gradient are drawn.
      dtype: whose range is marked.

    Returns:
      A matplotlib figure.

    Example:
      >>> import jax
      >>> from optax_dls import plot
      >>> figure = plot.exponents(jax.random.normal(jax.random.key(0), (100,)))

    References:
      Micikevicius et al., `Mixed Precision Training
      <https://arxiv.org/abs/1710.03740>`_, 2018, figure 3
    """
    scale = 1.0 if state is None else float(loss_scale(state))
    entries = np.concatenate(
        [np.zeros(0)]
        + [
            np.abs(np.asarray(leaf)).ravel().astype(np.float64)
            for leaf in jax.tree.leaves(grads)
            if is_inexact(leaf)
        ]
    )
    nonzero = entries[np.isfinite(entries) & (entries > 0)]
    scaled = np.log2(nonzero)
    true = scaled - np.log2(scale)

    info = jnp.finfo(dtype)
    zero = np.log2(float(info.smallest_subnormal)) - 1
    tiny, top = np.log2(float(info.tiny)), np.log2(float(info.max))
    both = np.concatenate([true, scaled])
    low = np.floor(np.min(both, initial=zero - 4))
    high = np.ceil(np.max(both, initial=top + 2))
    bins = np.arange(low, high + 1).tolist()

    figure = Figure(figsize=(8, 3.5), layout="constrained")
    axes = figure.subplots()
    share = np.full(nonzero.size, 100 / max(nonzero.size, 1))
    axes.hist(true, bins, weights=share, color=GREY, label="true gradient")
    if state is not None:
        label = f"times the scale $2^{{{np.log2(scale):.0f}}}$"
        axes.hist(scaled, bins, weights=share, color=BLUE, alpha=0.75, label=label)
    name = jnp.dtype(dtype).name
    axes.axvspan(low, zero, color=ORANGE, alpha=0.2, label=f"zero in {name}", lw=0)
    axes.axvspan(
        zero, tiny, color=ORANGE, alpha=0.08, label=f"subnormal in {name}", lw=0
    )
    axes.axvspan(top, high, color="black", alpha=0.15, label=f"inf in {name}", lw=0)
    axes.set(xlim=(low, high), xlabel="magnitude of an entry", ylabel="entries (%)")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    _powers_of_two(axes.xaxis)
    return figure


def underflow(search: "ScaleSearch") -> Figure:
    """The share of gradient entries that is lost, against the loss scale.

    Args:
      search: what ``find_scale`` gave.

    Returns:
      A matplotlib figure.

    Example:
      >>> import jax.numpy as jnp
      >>> import optax_dls as dls
      >>> from optax_dls import plot
      >>> figure = plot.underflow(dls.find_scale(lambda w: jnp.sum(w), jnp.ones(2)))
    """
    log2 = np.log2(search.scales)
    figure = Figure(figsize=(8, 3.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(
        log2[search.finite],
        100 * search.lost[search.finite],
        "o-",
        color=BLUE,
        label="entries that are zero",
    )
    bad = log2[~search.finite]
    if bad.size:
        axes.axvspan(
            bad[0] - 0.5,
            bad[-1] + 0.5,
            color="black",
            alpha=0.15,
            lw=0,
            label="not finite",
        )
    if search.recommended is not None:
        axes.axvline(
            np.log2(search.recommended),
            color=ORANGE,
            linestyle="--",
            label=f"recommended start $2^{{{np.log2(search.recommended):.0f}}}$",
        )
    axes.set(xlabel="loss scale", ylabel="entries lost (%)")
    axes.legend()
    _powers_of_two(axes.xaxis)
    return figure


def _powers_of_two(axis: Axis) -> None:
    """Whole exponents as 2^n, on an axis that is drawn in log2."""
    axis.set_major_locator(MaxNLocator(integer=True, nbins=9, min_n_ticks=1))
    axis.set_major_formatter(FuncFormatter(lambda x, _: f"$2^{{{x:.0f}}}$"))
