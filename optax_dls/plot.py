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
    """The loss scale, the skipped steps and the loss of a run, in one figure.

    The line is the scale after each step. A cross at a skipped step marks the scale before
    it, which is the one that overflowed. Nothing is known from before the first record, so
    a cross there marks the scale after it.

    Args:
      history: a :class:`History`, or what its ``arrays()`` gives.

    Returns:
      A matplotlib figure: ``figure.savefig("run.png")``, or in a notebook, after
      ``%matplotlib inline``, the last line of a cell.

    Raises:
      TypeError: ``history`` is something else.
      ValueError: the history is empty, or a column is missing or of another length.

    Example:
      >>> import numpy as np
      >>> from optax_dls import plot
      >>> columns = {"step": np.arange(3), "loss_scale": np.array([8.0, 4.0, 4.0]),
      ...            "consecutive_skips": np.array([0, 1, 0])}
      >>> figure = plot.run(columns)
    """
    columns = _columns(history)
    steps, log2 = columns["step"], np.log2(columns["loss_scale"])
    before = np.concatenate([log2[:1], log2[:-1]])
    skipped = columns["consecutive_skips"] > 0
    loss = columns.get("loss", np.zeros(0))
    has_loss = bool(np.isfinite(loss).any())
    figure = Figure(figsize=(8, 5 if has_loss else 3), layout="constrained")
    axes = figure.subplots(2 if has_loss else 1, sharex=True, squeeze=False)[:, 0]

    axes[0].step(steps, log2, where="post", color=BLUE, label="loss scale")
    label = f"skipped ({np.count_nonzero(skipped)} of {len(steps)} steps)"
    axes[0].plot(steps[skipped], before[skipped], "x", color=ORANGE, label=label)
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


def _columns(history: "History | Mapping[str, np.ndarray]") -> dict[str, np.ndarray]:
    """The columns that are drawn; ``loss`` may be missing."""
    if not isinstance(history, Mapping) and not hasattr(history, "arrays"):
        raise TypeError(
            f"history must be a History or its arrays(), got {type(history).__name__}. A "
            "file is read by History.load(path)."
        )
    given = history if isinstance(history, Mapping) else history.arrays()
    needed = ("step", "loss_scale", "consecutive_skips")
    missing = [name for name in needed if name not in given]
    if missing:
        raise ValueError(
            f"history has no {', '.join(missing)}, got the columns {list(given)}. Pass a "
            "History to which dls.metrics(opt_state) was appended, or its arrays()."
        )
    columns = {n: np.asarray(given[n]) for n in (*needed, "loss") if n in given}
    if not columns["step"].size:
        raise ValueError("history is empty. Append dls.metrics(opt_state) to it first.")
    shapes = {name: column.shape for name, column in columns.items()}
    if len(set(shapes.values())) > 1:
        raise ValueError(
            f"the columns of history must have one shape, (steps,), got {shapes}."
        )
    return columns


def exponents(
    grads: optax.Updates, state: object = None, dtype: DTypeLike = jnp.float16
) -> Figure:
    """The histogram of gradient exponents, with the range of ``dtype`` marked.

    Entries that are zero, inf or NaN have no exponent and are left out.

    Args:
      grads: the gradients of a scaled loss, or true gradients if ``state`` is None. Compute
        them in float32 to see what a half-precision backward pass would lose.
      state: the state whose scale multiplied the loss. With it both the true and the scaled
        gradients are drawn.
      dtype: the dtype whose range is marked.

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
    """The share of gradient entries that are lost, against the loss scale.

    The share is drawn where the gradient is finite. Scales at which it is not are shaded.

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
    finite = np.asarray(search.finite, bool)
    lost = 100 * search.lost[finite]
    if finite.any():
        axes.plot(log2[finite], lost, "o-", color=BLUE, label="entries that are zero")
    # Where each run of scales that are not finite begins, and where it ends.
    ends = np.flatnonzero(np.diff(np.concatenate([[True], finite, [True]])))
    for start, end in ends.reshape(-1, 2):
        label = None if start > ends[0] else "not finite"
        left, right = log2[start] - 0.5, log2[end - 1] + 0.5
        axes.axvspan(left, right, color="black", alpha=0.15, lw=0, label=label)
    if search.recommended is not None:
        axes.axvline(
            np.log2(search.recommended),
            color=ORANGE,
            linestyle="--",
            label=f"recommended start $2^{{{np.log2(search.recommended):.0f}}}$",
        )
    # Without a loss, or without anything finite, matplotlib would zoom in on a flat line.
    top = lost.max() if lost.any() else 100
    axes.set(xlabel="loss scale", ylabel="entries lost (%)")
    axes.set_ylim(-0.03 * top, 1.05 * top)
    axes.legend()
    _powers_of_two(axes.xaxis)
    return figure


def _powers_of_two(axis: Axis) -> None:
    """Whole exponents as 2^n, on an axis that is drawn in log2."""
    axis.set_major_locator(MaxNLocator(integer=True, nbins=9, min_n_ticks=1))
    axis.set_major_formatter(FuncFormatter(lambda x, _: f"$2^{{{x:.0f}}}$"))
