"""Steps that leave the process: exported programs, and names that profiles show."""

import re

import jax
import jax.export
import jax.numpy as jnp
import optax
import pytest

import optax_dls as dls

RULES = {
    "dynamic": dls.rules.dynamic(),
    "hysteresis": dls.rules.dynamic(hysteresis=2),
    "gradual": dls.rules.gradual(),
    "log_normal": dls.rules.log_normal(),
    "overflow_rate": dls.rules.overflow_rate(tolerance=0.25),
    "retrying": dls.rules.retrying(dls.rules.dynamic()),
    "static": dls.rules.static(8.0),
    "none": dls.rules.none(),
}


@pytest.mark.parametrize("name", RULES)
def test_a_step_is_serialized_with_its_state(name):
    tx = dls.loss_scaling(optax.stateless(lambda updates, _: updates), RULES[name])
    params = jnp.ones(2)

    # The states of Optax are for the user to register; this one is left out.
    def step(grads, scaler):
        state = dls.LossScalingState(scaler, optax.EmptyState())
        return tx.update(grads, state)[1].scaler

    step, state = jax.jit(step), tx.init(params).scaler
    data = jax.export.export(step)(params, state).serialize()
    again = jax.export.deserialize(bytearray(data)).call(params, state)
    assert jax.tree.structure(again) == jax.tree.structure(state)  # type: ignore[operator]
    assert again.loss_scale == step(params, state).loss_scale


def test_profiles_show_which_part_an_operation_belongs_to():
    tx = dls.dynamic_loss_scaling(optax.sgd(0.1))
    params = jnp.ones(2)
    step = jax.jit(lambda g, s: tx.update(g, s)).lower(params, tx.init(params))
    names = set(re.findall(r'op_name="([^"]*)"', step.compile().as_text()))
    for part in ("check_finite/", "applied_step/unscale", "skipped_step/move_scale"):
        assert any(part in name for name in names), part
    assert any(re.search("applied_step/(?!move_scale|unscale)", name) for name in names)
