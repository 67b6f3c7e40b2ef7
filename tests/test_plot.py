"""The pictures: what is drawn, labelled axes, and a word where matplotlib is missing."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_dls as dls
from optax_dls import plot

COLUMNS = {
    "step": np.arange(4),
    "loss_scale": np.array([8.0, 4.0, 4.0, 8.0]),
    "consecutive_skips": np.array([0, 1, 0, 0]),
    "total_skips": np.array([0, 1, 1, 1]),
    "loss": np.array([1.0, np.nan, 0.5, 0.01]),
}


def labels(axes):
    return [text.get_text() for text in axes.get_legend().get_texts()]


def test_a_run_shows_scale_skips_and_loss():
    figure = plot.run(COLUMNS)
    scale, loss = figure.axes
    assert labels(scale) == ["loss scale", "skipped (1 of 4 steps)"]
    assert scale.lines[0].get_ydata().tolist() == [3, 2, 2, 3]
    assert scale.lines[1].get_xdata().tolist() == [1]
    assert (scale.get_ylabel(), loss.get_ylabel()) == ("loss scale", "loss")
    assert (loss.get_xlabel(), loss.get_yscale()) == ("step", "log")


def test_a_run_without_a_loss_has_one_panel_and_a_history_is_taken_too():
    history = dls.History()
    history.extend(
        {k: v for k, v in COLUMNS.items() if k not in ("step", "loss")} | FLAGS
    )
    assert len(plot.run(history).axes) == 1
    with pytest.raises(ValueError, match="history is empty"):
        plot.run(dls.History())


FLAGS = {"grads_finite": np.array([True, False, True, True])}


def test_the_histogram_counts_every_entry_above_zero_once():
    grads = {"w": jnp.array([2.0**-20, 2.0**-20, 0.0, 1.0]), "i": jnp.arange(2)}
    (axes,) = plot.exponents(grads).axes
    heights = np.array([patch.get_height() for patch in axes.patches[:-3]])
    np.testing.assert_allclose(heights.sum(), 100)
    assert sorted(heights[heights > 0].round().tolist()) == [33, 67]
    assert labels(axes) == [
        "true gradient",
        "zero in float16",
        "subnormal in float16",
        "inf in float16",
    ]


def test_the_histogram_shows_the_gradient_before_and_after_scaling():
    state = dls.static_loss_scaling(optax.sgd(1.0), 2.0**10).init(jnp.zeros(()))
    (axes,) = plot.exponents(jnp.ones(5), state, "bfloat16").axes
    assert labels(axes)[:2] == ["true gradient", "times the scale $2^{10}$"]
    assert labels(axes)[-1] == "inf in bfloat16"
    plot.exponents(jax.tree.map(jnp.zeros_like, {"w": jnp.ones(2)}))  # nothing to count


def test_underflow_against_the_scale():
    search = dls.ScaleSearch(
        scales=np.array([1.0, 2.0, 4.0]),
        finite=np.array([True, True, False]),
        lost=np.array([0.5, 0.0, np.nan]),
        recommended=2.0,
        reason="",
    )
    (axes,) = plot.underflow(search).axes
    assert axes.lines[0].get_xdata().tolist() == [0, 1]
    assert axes.lines[0].get_ydata().tolist() == [50, 0]
    assert labels(axes) == [
        "entries that are zero",
        "not finite",
        "recommended start $2^{1}$",
    ]


def test_scales_are_powers_of_two_on_the_axes():
    (axes,) = plot.underflow(dls.find_scale(jnp.sum, jnp.ones(2))).axes
    axes.figure.canvas.draw()
    ticks = [text.get_text() for text in axes.get_xticklabels()]
    assert all(tick.startswith("$2^{") for tick in ticks)


def test_a_missing_matplotlib_is_named_with_the_install():
    code = (
        "import sys; sys.modules['matplotlib.axis'] = None\n"
        "import optax_dls\n"
        "import optax_dls.plot"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert 'pip install "optax-dls[plot]"' in done.stderr
