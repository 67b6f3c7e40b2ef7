"""The rule that follows the distribution of the largest gradients."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from optax_dls import rules

DEFAULT = rules.log_normal()


def test_gradients_of_one_size_get_the_largest_power_of_two_that_fits(follow):
    for largest in (2.0**-10, 2.0**-16, 0.7, 3.0):
        scales, _ = follow(DEFAULT, "." * 60, largest)
        fits = math.floor(math.log2(65504 / largest))
        assert scales[-1] == fits


def test_a_burst_of_nan_is_forgotten_in_as_many_steps(follow):
    sizes = 2.0 ** np.random.default_rng(0).normal(-10, 0.5, 400)
    scales, _ = follow(DEFAULT, "." * 300 + "x" * 20 + "." * 80, sizes)
    assert scales[319] == scales[299] - 20
    assert scales[345] >= scales[299] - 3
    assert scales[-1] >= scales[299] - 2


def test_more_spread_means_more_distance(follow):
    rng = np.random.default_rng(0)
    ends = [
        follow(DEFAULT, "." * 300, 2.0 ** rng.normal(-10, sd, 300))[0][-1]
        for sd in (0.1, 1.0, 3.0)
    ]
    assert ends[0] > ends[1] > ends[2]


def test_steps_without_any_gradient_are_not_counted(follow):
    scales, state = follow(DEFAULT, "....", 0.0)
    assert scales == [15.0] * 4
    assert int(state.step_count) == 0


def test_scales_are_powers_of_two(follow):
    rule = rules.log_normal(init_scale=1000.0)
    sizes = 2.0 ** np.random.default_rng(0).normal(-10, 1, 50)
    scales, _ = follow(rule, "....x....." * 5, sizes)
    assert all(scale == round(scale) for scale in scales)
    with pytest.raises(ValueError, match="at least 2, for powers of two"):
        rules.log_normal(growth_factor=1.5)


@pytest.mark.parametrize(
    "settings",
    [
        {"gradient_limit": jnp.float16(jnp.inf)},
        {"gradient_limit": jnp.float32(0)},
        {"mean_decay": jnp.float32(jnp.nan)},
        {"variance_decay": jnp.float32(2)},
        {"overflow_probability": jnp.float32(0)},
    ],
)
def test_nonsense_as_arrays_leaves_no_nan_behind(follow, settings):
    scales, state = follow(rules.log_normal(**settings), "..x..xx..")
    assert np.all(np.isfinite(scales))
    assert all(np.all(np.isfinite(leaf)) for leaf in state)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"overflow_probability": 0.5}, "above 0 and below 0.5"),
        ({"variance_decay": 1.0}, r"below 1, got 1.0. Use 0.999"),
        ({"gradient_limit": 1e300}, "finite in float32"),
        ({"power_of_two": 1}, "must be True or False"),
    ],
)
def test_a_bad_setting_is_refused(settings, error):
    with pytest.raises((TypeError, ValueError), match=error):
        rules.log_normal(**settings)
