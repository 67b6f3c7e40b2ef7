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
    assert (scale.get_ylabel(), loss.get_ylabel()) == ("loss scale", "loss")
    assert (loss.get_xlabel(), loss.get_yscale()) == ("step", "log")


def test_a_run_without_a_loss_has_one_panel_and_a_history_is_taken_too():
    history = dls.History()
    history.extend(
        {k: v for k, v in COLUMNS.items() if k not in ("step", "loss")} | FLAGS
    )
    assert len(plot.run(history).axes) == 1


FLAGS = {"grads_finite": np.array([True, False, True, True])}


def test_a_skipped_step_is_marked_at_the_scale_that_overflowed():
    scales = [2.0**3, 2.0**2, 2.0**1, 2.0**1]
    columns = COLUMNS | {
        "loss_scale": np.array(scales),
        "consecutive_skips": np.array([0, 1, 2, 0]),
    }
    crosses = plot.run(columns).axes[0].lines[1]
    assert crosses.get_xdata().tolist() == [1, 2]
    assert crosses.get_ydata().tolist() == [3, 2]


def test_a_skip_at_the_first_record_is_marked_at_the_only_scale_that_is_known():
    columns = COLUMNS | {"consecutive_skips": np.array([4, 0, 0, 0])}
    crosses = plot.run(columns).axes[0].lines[1]
    assert crosses.get_xydata().tolist() == [[0, 3]]


@pytest.mark.parametrize(
    ("history", "error", "message"),
    [
        ({}, ValueError, "has no step, loss_scale, consecutive_skips.*metrics"),
        ({"step": [], "loss": []}, ValueError, "has no loss_scale, consecutive_skips"),
        (dls.History(), ValueError, "history is empty. Append"),
        (COLUMNS | {"step": np.arange(3)}, ValueError, "must have one shape"),
        (COLUMNS | {"loss": np.arange(5.0)}, ValueError, r"'loss': \(5,\)"),
        ("run.jsonl", TypeError, r"got str. A file is read by History.load\(path\)"),
    ],
)
def test_a_history_that_cannot_be_drawn_is_refused(history, error, message):
    with pytest.raises(error, match=message):
        plot.run(history)


def test_the_histogram_counts_every_entry_above_zero_once():
    grads = {"w": jnp.array([2.0**-20, 2.0**-20, 0.0, 1.0]), "i": jnp.arange(2)}
    (axes,) = plot.exponents(grads).axes
    bars = axes.patches[:-3]
    heights = np.array([bar.get_height() for bar in bars])  # type: ignore[attr-defined]
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


def underflow_axes(finite, lost, recommended=None):
    scales = 2.0 ** np.arange(len(finite))
    search = dls.ScaleSearch(
        scales, np.array(finite), np.array(lost), recommended, reason=""
    )
    (axes,) = plot.underflow(search).axes
    return axes


@pytest.mark.parametrize(
    ("finite", "lost"), [([False] * 3, [np.nan] * 3), ([True] * 3, [0.0] * 3)]
)
def test_an_axis_without_anything_lost_goes_up_to_100_percent(finite, lost):
    low, high = underflow_axes(finite, lost).get_ylim()
    assert -5 < low < 0
    assert 100 < high < 110


def test_an_axis_goes_up_to_the_largest_share_that_is_lost():
    low, high = underflow_axes([True, True, False], [0.02, 0.001, np.nan]).get_ylim()
    assert -0.1 < low < 0
    assert 2 < high < 2.2


def test_without_anything_finite_nothing_is_said_of_zeros():
    assert labels(underflow_axes([False] * 3, [np.nan] * 3)) == ["not finite"]


def test_each_run_of_scales_that_are_not_finite_is_shaded():
    finite = [False, True, True, False, False, True]
    axes = underflow_axes(finite, np.where(finite, 0.5, np.nan), 2.0)
    spans = [(p.get_x(), p.get_x() + p.get_width()) for p in axes.patches]
    assert spans == [(-0.5, 0.5), (2.5, 4.5)]
    assert labels(axes).count("not finite") == 1


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
