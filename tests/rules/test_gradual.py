"""The rule that grows in fractions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optax_dls import rules


def test_doubles_until_the_first_overflow_and_in_fractions_from_then_on(follow):
    scales, _ = follow(rules.gradual(growth_interval=4), "...x....x....")
    expected = [1, 2, 3, 2, 2.25, 2.5, 2.75, 3, 2, 2.25, 2.5, 2.75, 3]
    np.testing.assert_allclose(scales, expected, atol=1e-5)


def test_the_longest_interval_still_grows():
    rule = rules.gradual(growth_interval=100_000)
    start = (jnp.float32(4), rules.GradualRuleState(jnp.array(True)))

    def step(_, carry):
        return rule.update(jnp.array(True), *carry)

    scale, _ = jax.lax.fori_loop(0, 100_000, step, start)
    np.testing.assert_allclose(scale, 8.0, rtol=0.01)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"growth_interval": 100_001}, "from 1 to 100000"),
        ({"growth_factor": 0.5}, "growth_factor must be at least 1"),
    ],
)
def test_a_bad_setting_is_refused(settings, error):
    with pytest.raises(ValueError, match=error):
        rules.gradual(**settings)
