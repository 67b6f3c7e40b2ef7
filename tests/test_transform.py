"""The wrapper: what it applies, what it skips, and how it is compiled."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_dls as dls

SCALE = 1024.0  # of what `make` makes


def test_applies_the_unscaled_gradient(make):
    tx = make()
    state = tx.init(jnp.zeros(2))
    updates, _ = tx.update(jnp.array([SCALE, 2 * SCALE]), state)
    np.testing.assert_array_equal(updates, [-1.0, -2.0])


def test_unscales_by_the_scale_of_this_step_when_it_grows(make):
    tx = make(growth_interval=2)
    state = tx.init(jnp.zeros(()))
    scales = []
    for _ in range(5):
        updates, state = tx.update(dls.loss_scale(state), state)
        assert float(updates) == -1.0
        scales.append(float(dls.loss_scale(state)) / SCALE)
    assert scales == [1, 2, 2, 4, 4]


adam = optax.adam(0.1)


@pytest.mark.standard_promotion
@pytest.mark.parametrize("fault", [jnp.inf, -jnp.inf, jnp.nan])
def test_an_overflow_skips_and_backs_off(make, fault):
    tx = make(adam)
    params = {"a": jnp.ones(3), "b": jnp.ones(2)}
    _, state = tx.update(params, tx.init(params), params)
    grads = {"a": jnp.ones(3), "b": jnp.array([1.0, fault])}
    updates, new_state = tx.update(grads, state, params)
    chex.assert_trees_all_equal(updates, jax.tree.map(jnp.zeros_like, params))
    chex.assert_trees_all_equal(new_state.inner_state, state.inner_state)
    assert dls.metrics(new_state) == {
        "loss_scale": SCALE / 2,
        "grads_finite": False,
        "consecutive_skips": 1,
        "total_skips": 1,
    }


def test_the_step_after_a_skip_is_a_full_step(make):
    tx = make()
    state = tx.init(jnp.zeros(()))
    _, state = tx.update(jnp.array(jnp.inf), state)
    updates, state = tx.update(dls.loss_scale(state), state)
    assert float(updates) == -1.0
    assert int(state.scaler.consecutive_skips) == 0
    assert int(state.scaler.total_skips) == 1


def test_a_scale_that_is_no_power_of_two_is_right_to_two_roundings(make):
    tx = make(init_scale=1000.0, growth_factor=1.7, backoff_factor=0.3)
    updates, _ = tx.update(jnp.array([3000.0]), tx.init(jnp.zeros(1)))
    np.testing.assert_allclose(updates, [-3.0], rtol=2e-7)


class TestWhoseFault:
    """Scaling acts after the loss, and before the inner optimizer."""

    def test_a_nonfinite_value_skips_but_leaves_scale_and_growth_count(self, make):
        tx = make(growth_interval=2)
        state = tx.init(jnp.zeros(()))
        _, state = tx.update(jnp.array(SCALE), state, value=jnp.array(1.0))
        for grad, finite in ((SCALE, True), (jnp.nan, False)):
            updates, skipped = tx.update(
                jnp.array(grad), state, value=jnp.array(jnp.inf)
            )
            assert float(updates) == 0.0
            assert bool(skipped.scaler.grads_finite) == finite
            assert int(skipped.scaler.consecutive_skips) == 1
            assert skipped.scaler.loss_scale == state.scaler.loss_scale
            assert skipped.scaler.rule_state == state.scaler.rule_state
        _, state = tx.update(jnp.array(SCALE), skipped, value=jnp.array(1.0))
        assert float(dls.loss_scale(state)) == 2 * SCALE

    def test_a_finite_value_changes_nothing(self, make):
        tx = make()
        _, state = tx.update(jnp.array(jnp.inf), tx.init(jnp.zeros(())), value=1.0)
        assert float(dls.loss_scale(state)) == SCALE / 2

    def test_check_updates_refuses_what_the_inner_optimizer_made_nonfinite(self):
        inner = optax.chain(optax.trace(0.5), optax.scale(jnp.inf))
        params = jnp.ones(2)
        for check_updates, expected in ((False, -jnp.inf), (True, 0.0)):
            tx = dls.dynamic_loss_scaling(
                optax.chain(inner, optax.scale(-1.0)),
                init_scale=SCALE,
                check_updates=check_updates,
            )
            state = tx.init(params)
            updates, new_state = tx.update(jnp.full(2, SCALE), state, params)
            np.testing.assert_array_equal(updates, [expected, expected])
            assert float(dls.loss_scale(new_state)) == SCALE
            assert bool(new_state.scaler.grads_finite)
            assert int(new_state.scaler.consecutive_skips) == check_updates
            if check_updates:
                chex.assert_trees_all_equal(new_state.inner_state, state.inner_state)
                assert new_state.scaler.rule_state == state.scaler.rule_state

    def test_check_updates_lets_good_steps_and_overflows_be(self, make):
        tx = make(check_updates=True)
        updates, state = tx.update(jnp.array([SCALE]), tx.init(jnp.zeros(1)))
        assert float(updates[0]) == -1.0
        _, state = tx.update(jnp.array([jnp.inf]), state)
        assert float(dls.loss_scale(state)) == SCALE / 2


@pytest.mark.standard_promotion
def test_is_a_scan_carry(make):
    tx = make(optax.adamw(0.1), growth_interval=3)
    params = jnp.ones(4)

    def step(carry, bad):
        params, state = carry
        grads = params * dls.loss_scale(state) + jnp.where(bad, jnp.nan, 0.0)
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), dls.metrics(state)

    bad = jnp.array([False, True, False, False, False, True])
    (_, state), log = jax.lax.scan(step, (params, tx.init(params)), bad)
    np.testing.assert_array_equal(log["loss_scale"] / SCALE, [1, 0.5, 0.5, 0.5, 1, 0.5])
    assert int(state.scaler.total_skips) == 2


def test_vmap_decides_for_each_member(make):
    tx = make()
    state = jax.vmap(tx.init)(jnp.zeros((3, 2)))
    grads = jnp.array([[1.0, 1.0], [jnp.inf, 1.0], [2.0, 2.0]]) * SCALE
    updates, state = jax.jit(jax.vmap(tx.update))(grads, state)
    np.testing.assert_array_equal(updates, [[-1, -1], [0, 0], [-2, -2]])
    np.testing.assert_array_equal(dls.loss_scale(state) / SCALE, [1, 0.5, 1])
    np.testing.assert_array_equal(state.scaler.consecutive_skips, [0, 1, 0])


@pytest.mark.standard_promotion
def test_extra_arguments_reach_the_inner_optimizer(make):
    plateau = optax.contrib.reduce_on_plateau(patience=1)
    tx = make(optax.chain(optax.sgd(1.0), plateau))
    state = tx.init(jnp.zeros(()))

    @jax.jit
    def step(state):
        grads = dls.loss_scale(state)
        return tx.update(grads, state, value=jnp.array(1.0), unknown="ignored")[1]

    for _ in range(3):
        state = step(state)
    assert float(optax.tree.get(state, "scale")) < 1.0


@pytest.mark.standard_promotion
def test_lookahead_inside_and_its_pairs_of_parameters(make):
    bare = optax.lookahead(optax.sgd(1.0), sync_period=2, slow_step_size=0.5)

    def train(tx, grads):
        params = optax.LookaheadParams.init_synced({"w": jnp.zeros(1)})
        state, update = tx.init(params), jax.jit(tx.update)
        for grad in grads:
            updates, state = update({"w": jnp.array([grad])}, state, params)
            params = optax.apply_updates(params, updates)
        return params

    good = train(make(bare, init_scale=8.0), [8.0, jnp.nan, 4.0, 8.0, jnp.inf])
    chex.assert_trees_all_equal(good, train(bare, [1.0, 1.0, 2.0]))


@pytest.mark.standard_promotion
def test_no_transfer_to_or_from_the_host(make):
    tx = make(optax.adamw(0.1))
    params = jnp.ones(3)
    state = tx.init(params)
    step = jax.jit(tx.update)
    step(params, state, params)
    with jax.transfer_guard("disallow"):
        for _ in range(10):
            _, state = step(params, state, params)
    assert "callback" not in str(jax.make_jaxpr(tx.update)(params, state, params))


@pytest.mark.parametrize("extra", [{}, {"value": 0.5}, {"value": jnp.array(0.5)}])
def test_unjitted_steps_are_traced_once(make, extra):
    traces = []

    def update(updates, state, params=None, **extra_args):
        traces.append(extra_args)
        return updates, state

    tx = make(optax.GradientTransformationExtraArgs(optax.sgd(1.0).init, update))
    state = tx.init(jnp.ones(2))
    for grad in (1.0, jnp.inf, 2.0):
        updates, state = tx.update(jnp.full(2, grad), state, jnp.ones(2), **extra)
    assert len(traces) == 1
    np.testing.assert_array_equal(updates, jnp.full(2, 2.0 / dls.loss_scale(state)))


def test_every_jitted_program_has_a_trace_of_its_own(make):
    """So that what the user's own static arguments change is seen."""
    rate: dict[str, float] = {}

    def update(updates, state, params=None):
        return jax.tree.map(lambda u: rate["now"] * u, updates), state

    tx = make(optax.GradientTransformation(optax.sgd(1.0).init, update))

    @functools.partial(jax.jit, static_argnums=0)
    def step(static_rate, grads, state):
        rate["now"] = static_rate
        return tx.update(grads, state)[0]

    state = tx.init(jnp.ones(2))
    for static_rate in (1.0, 2.0):
        updates = step(static_rate, jnp.full(2, SCALE), state)
        np.testing.assert_array_equal(updates, [static_rate, static_rate])


def test_unjitted_extra_arguments_that_are_no_arrays_stay_what_they_are(make):
    got = []

    def update(updates, state, params=None, **extra_args):
        got.append(extra_args)
        return updates, state

    tx = make(optax.GradientTransformationExtraArgs(optax.sgd(1.0).init, update))
    extra = {"is_last": np.True_, "value_fn": jnp.sum, "value": 0.5}
    tx.update(jnp.ones(2), tx.init(jnp.ones(2)), jnp.ones(2), **extra)
    assert got == [extra]


def test_one_cond_holds_growth_backoff_and_the_skip(make):
    tx = make(optax.sgd(0.1, momentum=0.9))
    params = jnp.ones(3)
    jaxpr = jax.make_jaxpr(tx.update)(params, tx.init(params), params)
    conds = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "cond"]
    # Others choose between platforms, and are gone once the program is compiled for one.
    (cond,) = (eqn for eqn in conds if not eqn.params.get("branches_platforms"))
    lowered = jax.jit(tx.update).lower(params, tx.init(params), params)
    assert lowered.compile().as_text().count(" conditional(") <= 1
    # The skip is the false branch, i.e. the first: XLA copies what it passes
    # through otherwise.
    skipped, applied = cond.params["branches"]
    assert "f32[3] = mul" in str(applied)
    assert "f32[3] = mul" not in str(skipped)
