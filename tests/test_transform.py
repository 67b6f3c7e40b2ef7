"""The wrapper: what it applies, what it skips, and that its state keeps its types."""

import functools

import chex
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_dls as dls

SCALE = 1024.0


def make(inner=None, **rule_settings):
    return dls.dynamic_loss_scaling(
        inner or optax.sgd(1.0), **{"init_scale": SCALE, **rule_settings}
    )


def scaled(grads, state):
    return jax.tree.map(lambda g: g * dls.loss_scale(state).astype(g.dtype), grads)


def avals(tree):
    return jax.tree.map(jax.typeof, tree)


class TestStep:
    def test_applies_the_unscaled_gradient(self):
        tx = make()
        state = tx.init(jnp.zeros(2))
        updates, _ = tx.update(jnp.array([SCALE, 2 * SCALE]), state)
        np.testing.assert_array_equal(updates, [-1.0, -2.0])

    def test_unscales_by_the_scale_of_this_step_when_it_grows(self):
        tx = make(growth_interval=2)
        state = tx.init(jnp.zeros(()))
        scales = []
        for _ in range(5):
            updates, state = tx.update(dls.loss_scale(state), state)
            assert float(updates) == -1.0
            scales.append(float(dls.loss_scale(state)) / SCALE)
        assert scales == [1, 2, 2, 4, 4]

    @pytest.mark.standard_promotion
    @pytest.mark.parametrize("fault", [jnp.inf, -jnp.inf, jnp.nan])
    def test_an_overflow_skips_and_backs_off(self, fault):
        tx = make(optax.adam(0.1))
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

    def test_the_step_after_a_skip_is_a_full_step(self):
        tx = make()
        state = tx.init(jnp.zeros(()))
        _, state = tx.update(jnp.array(jnp.inf), state)
        updates, state = tx.update(dls.loss_scale(state), state)
        assert float(updates) == -1.0
        assert int(state.scaler.consecutive_skips) == 0
        assert int(state.scaler.total_skips) == 1

    def test_a_static_scale_skips_and_stays(self):
        tx = dls.static_loss_scaling(optax.sgd(1.0), 8.0)
        updates, state = tx.update(jnp.array([8.0, jnp.inf]), tx.init(jnp.zeros(2)))
        np.testing.assert_array_equal(updates, [0.0, 0.0])
        assert float(dls.loss_scale(state)) == 8.0
        updates, _ = tx.update(jnp.array([8.0, 4.0]), state)
        np.testing.assert_array_equal(updates, [-1.0, -0.5])

    def test_a_scale_that_is_no_power_of_two_is_right_to_two_roundings(self):
        tx = make(init_scale=1000.0, growth_factor=1.7, backoff_factor=0.3)
        updates, _ = tx.update(jnp.array([3000.0]), tx.init(jnp.zeros(1)))
        np.testing.assert_allclose(updates, [-3.0], rtol=2e-7)

    def test_counters_saturate(self):
        tx = make()
        state = optax.tree.set(
            tx.init(jnp.zeros(1)),
            consecutive_skips=jnp.int32(2**31 - 1),
            total_skips=jnp.int32(2**31 - 1),
        )
        _, state = tx.update(jnp.array([jnp.nan]), state)
        assert int(state.scaler.consecutive_skips) == 2**31 - 1
        assert int(state.scaler.total_skips) == 2**31 - 1


class TestWhoseFault:
    """Scaling acts after the loss, and before the inner optimizer."""

    def test_a_nonfinite_value_skips_but_leaves_scale_and_growth_count(self):
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

    def test_a_finite_value_changes_nothing(self):
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

    def test_check_updates_lets_good_steps_and_overflows_be(self):
        tx = make(check_updates=True)
        updates, state = tx.update(jnp.array([SCALE]), tx.init(jnp.zeros(1)))
        assert float(updates[0]) == -1.0
        _, state = tx.update(jnp.array([jnp.inf]), state)
        assert float(dls.loss_scale(state)) == SCALE / 2


INNER = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "adam": optax.adam(0.1),
    "adamw": optax.adamw(0.1),
    "lion": optax.lion(0.1),
    "adafactor": optax.adafactor(0.1),
    "rmsprop": optax.rmsprop(0.1),
    "chain": optax.chain(optax.clip_by_global_norm(1.0), optax.yogi(0.1)),
}
DTYPES = ("float16", "bfloat16", "float32", "float64")


class TestContract:
    @pytest.mark.standard_promotion
    @pytest.mark.parametrize("name", INNER)
    @pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
    def test_types_are_the_same_after_every_kind_of_step(self, name, dtype):
        tx = make(INNER[name], growth_interval=2)
        params = {"w": jnp.ones((3, 2), dtype), "b": jnp.ones((), dtype)}
        state = tx.init(params)
        traces = []

        @jax.jit
        def step(params, state, grads):
            traces.append(None)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        types = avals(state)
        assert not any(aval.weak_type for aval in jax.tree.leaves(types))
        good, bad = scaled(params, state), jax.tree.map(lambda p: p * jnp.inf, params)
        for grads in (good, good, bad, good):  # applied, growing, skipped, applied
            params, state = step(params, state, grads)
            assert avals(state) == types
        restored = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), state)
        _, state = step(params, restored, good)
        assert avals(state) == types
        assert len(traces) == 1

    @pytest.mark.standard_promotion
    def test_weak_types_that_come_in_go_out_strong(self):
        tx = make(INNER["adam"])
        params = jnp.ones(2)
        state = tx.init(params)
        weak = jax.tree.map(lambda x: x, state)
        weak = optax.tree.set(weak, loss_scale=8.0, count=3)
        weak = weak._replace(
            inner_state=jax.tree.map(
                lambda x: x * 1.0 if jnp.ndim(x) else x, weak.inner_state
            )
        )
        for update in (tx.update, jax.jit(tx.update)):
            assert avals(update(params, weak, params)[1]) == avals(state)

    @pytest.mark.standard_promotion
    def test_is_a_scan_carry(self):
        tx = make(INNER["adamw"], growth_interval=3)
        params = jnp.ones(4)

        def step(carry, bad):
            params, state = carry
            grads = scaled(params, state) + jnp.where(bad, jnp.nan, 0.0)
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), dls.metrics(state)

        bad = jnp.array([False, True, False, False, False, True])
        (_, state), log = jax.lax.scan(step, (params, tx.init(params)), bad)
        np.testing.assert_array_equal(
            log["loss_scale"] / SCALE, [1, 0.5, 0.5, 0.5, 1, 0.5]
        )
        assert int(state.scaler.total_skips) == 2

    @pytest.mark.standard_promotion
    @pytest.mark.parametrize("name", INNER)
    def test_a_fresh_state_can_be_donated_with_its_parameters(self, name):
        tx = make(INNER[name])

        @functools.partial(jax.jit, donate_argnums=(0, 1))
        def step(params, state):
            updates, state = tx.update(params, state, params)
            return optax.apply_updates(params, updates), state

        for _ in range(2):  # the second init must not share what the first gave away
            params = {"w": jnp.ones(3), "b": jnp.ones(3)}
            state = tx.init(params)
            pointers = [
                x.unsafe_buffer_pointer() for x in jax.tree.leaves((params, state))
            ]
            assert len(set(pointers)) == len(pointers)
            params, state = step(params, state)
            chex.assert_tree_all_finite(step(params, state))

    def test_vmap_decides_for_each_member(self):
        tx = make()
        state = jax.vmap(tx.init)(jnp.zeros((3, 2)))
        grads = jnp.array([[1.0, 1.0], [jnp.inf, 1.0], [2.0, 2.0]]) * SCALE
        updates, state = jax.vmap(tx.update)(grads, state)
        np.testing.assert_array_equal(updates, [[-1, -1], [0, 0], [-2, -2]])
        np.testing.assert_array_equal(dls.loss_scale(state) / SCALE, [1, 0.5, 1])
        np.testing.assert_array_equal(state.scaler.consecutive_skips, [0, 1, 0])

    @pytest.mark.parametrize("name", INNER)
    def test_init_under_eval_shape_and_on_shapes(self, name):
        tx = make(INNER[name])
        params = {"w": jnp.ones((3, 2), jnp.float16)}
        state = tx.init(params)
        shapes = jax.eval_shape(tx.init, params)
        chex.assert_trees_all_equal_shapes_and_dtypes(shapes, state)
        from_shapes = tx.init(jax.eval_shape(lambda: params))
        chex.assert_trees_all_equal_shapes_and_dtypes(from_shapes, state)

    def test_map_params_knows_scalars_from_parameters(self):
        tx = make(INNER["adamw"])
        params = {"w": jnp.ones((3, 2)), "b": jnp.ones(2)}
        marked = optax.tree.map_params(
            tx,
            lambda _, spec: spec,
            tx.init(params),
            {"w": "w", "b": "b"},
            transform_non_params=lambda _: "scalar",
        )
        assert set(jax.tree.leaves(marked.scaler)) == {"scalar"}
        assert optax.tree.get(marked, "mu") == {"w": "w", "b": "b"}

    @pytest.mark.parametrize(
        "around",
        [
            lambda tx: optax.chain(tx),
            lambda tx: optax.named_chain(("main", tx)),
            lambda tx: optax.inject_hyperparams(lambda rate: tx)(rate=0.1),
        ],
        ids=["chain", "named_chain", "inject_hyperparams"],
    )
    def test_tree_get_and_set_find_the_scale(self, around):
        tx = around(make())
        state = optax.tree.set(tx.init(jnp.zeros(1)), loss_scale=jnp.float32(4.0))
        assert float(optax.tree.get(state, "loss_scale")) == 4.0
        updates, state = tx.update(jnp.array([8.0]), state, jnp.zeros(1))
        assert float(updates[0]) == -2.0
        assert float(optax.tree.get(state, "loss_scale")) == 4.0

    def test_a_scale_set_to_nonsense_comes_back_into_bounds(self):
        for nonsense in (jnp.inf, jnp.nan, 0.0, -1.0):
            tx = make()
            state = optax.tree.set(tx.init(jnp.zeros(1)), loss_scale=nonsense)
            _, state = tx.update(jnp.array([jnp.nan]), state)
            assert 2.0**-14 <= float(dls.loss_scale(state)) <= 2.0**32

    @pytest.mark.standard_promotion
    def test_extra_arguments_reach_the_inner_optimizer(self):
        plateau = optax.contrib.reduce_on_plateau(patience=1)
        tx = make(optax.chain(optax.sgd(1.0), plateau))
        state = tx.init(jnp.zeros(()))
        for _ in range(3):
            grads = dls.loss_scale(state)
            _, state = tx.update(grads, state, value=jnp.array(1.0), unknown="ignored")
        assert float(optax.tree.get(state, "scale")) < 1.0

    @pytest.mark.standard_promotion
    def test_lookahead_inside_and_its_pairs_of_parameters(self):
        bare = optax.lookahead(optax.sgd(1.0), sync_period=2, slow_step_size=0.5)

        def train(tx, grads):
            params = optax.LookaheadParams.init_synced({"w": jnp.zeros(1)})
            state = tx.init(params)
            for grad in grads:
                updates, state = tx.update({"w": jnp.array([grad])}, state, params)
                params = optax.apply_updates(params, updates)
            return params

        good = train(make(bare, init_scale=8.0), [8.0, jnp.nan, 4.0, 8.0, jnp.inf])
        chex.assert_trees_all_equal(good, train(bare, [1.0, 1.0, 2.0]))

    @pytest.mark.standard_promotion
    def test_no_transfer_to_or_from_the_host(self):
        tx = make(INNER["adamw"])
        params = jnp.ones(3)
        state = tx.init(params)
        step = jax.jit(tx.update)
        step(params, state, params)
        with jax.transfer_guard("disallow"):
            for _ in range(10):
                _, state = step(params, state, params)
        assert "callback" not in str(jax.make_jaxpr(tx.update)(params, state, params))

    @pytest.mark.parametrize("extra", [{}, {"value": 0.5}, {"value": jnp.array(0.5)}])
    def test_unjitted_steps_are_traced_once(self, extra):
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

    def test_every_jitted_program_has_a_trace_of_its_own(self):
        """So that what the user's own static arguments change is seen."""
        rate = {}

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

    def test_unjitted_extra_arguments_that_are_no_arrays_stay_what_they_are(self):
        got = []

        def update(updates, state, params=None, **extra_args):
            got.append(extra_args)
            return updates, state

        tx = make(optax.GradientTransformationExtraArgs(optax.sgd(1.0).init, update))
        extra = {"is_last": np.True_, "value_fn": jnp.sum, "value": 0.5}
        tx.update(jnp.ones(2), tx.init(jnp.ones(2)), jnp.ones(2), **extra)
        assert got == [extra]

    def test_one_cond_holds_growth_backoff_and_the_skip(self):
        tx = make(INNER["momentum"])
        params = jnp.ones(3)
        jaxpr = jax.make_jaxpr(tx.update)(params, tx.init(params), params)
        assert [eqn.primitive.name for eqn in jaxpr.eqns].count("cond") == 1
        # The skip is the false branch, i.e. the first: XLA copies what it passes
        # through otherwise.
        (cond,) = (eqn for eqn in jaxpr.eqns if eqn.primitive.name == "cond")
        skipped, applied = cond.params["branches"]
        assert "f32[3] = mul" in str(applied)
        assert "f32[3] = mul" not in str(skipped)


class TestDtypes:
    @pytest.mark.standard_promotion
    @pytest.mark.parametrize("inner", INNER)
    def test_every_mix_of_parameter_and_gradient_has_one_type_of_state(self, inner):
        with jax.enable_x64(True):
            for param_dtype in DTYPES:
                tx = make(INNER[inner])
                params = {
                    "w": jnp.ones((3, 2), param_dtype),
                    "b": jnp.ones(2, param_dtype),
                }
                state = tx.init(params)
                wide = jnp.promote_types(param_dtype, jnp.float32)
                for grad_dtype in DTYPES:
                    grads = jax.tree.map(lambda p: p.astype(grad_dtype), params)  # noqa: B023
                    updates, new_state = jax.eval_shape(tx.update, grads, state, params)
                    assert jax.tree.map(jax.typeof, state) == jax.tree.map(
                        lambda s: jax.typeof(jnp.zeros(s.shape, s.dtype)), new_state
                    )
                    assert {u.dtype for u in jax.tree.leaves(updates)} == {wide}

    @pytest.mark.parametrize("grad_dtype", DTYPES)
    @pytest.mark.parametrize("param_dtype", DTYPES)
    def test_values_of_every_mix(self, param_dtype, grad_dtype):
        with jax.enable_x64(True):
            tx = make(INNER["momentum"], init_scale=8.0)
            params = jnp.ones(2, param_dtype)
            state = tx.init(params)
            update = jax.jit(tx.update)
            updates, state = update(jnp.array([8.0, 4.0], grad_dtype), state, params)
            np.testing.assert_allclose(updates, [-0.1, -0.05], rtol=1e-6)
            bad = jnp.array([8.0, jnp.inf], grad_dtype)
            updates, skipped = update(bad, state, params)
            np.testing.assert_array_equal(updates, [0.0, 0.0])
            chex.assert_trees_all_equal(skipped.inner_state, state.inner_state)
            assert float(dls.loss_scale(skipped)) == 4.0

    def test_a_gradient_too_large_for_its_view_is_an_overflow(self):
        with jax.enable_x64(True):
            tx = make(init_scale=1.0)
            params = jnp.ones(1, jnp.float32)
            updates, state = tx.update(jnp.array([1e100]), tx.init(params), params)
            assert updates.dtype == jnp.float32
            assert float(updates[0]) == 0.0
            assert float(dls.loss_scale(state)) == 0.5

    def test_complex_gradients_keep_both_parts(self):
        tx = make(init_scale=8.0)
        params = jnp.ones(2, jnp.complex64)
        state = tx.init(params)
        updates, _ = tx.update(jnp.array([8 + 16j, 4j], jnp.complex64), state, params)
        np.testing.assert_array_equal(updates, np.array([-1 - 2j, -0.5j]))
        for bad in (complex(jnp.inf, 0), complex(0, jnp.nan)):
            updates, skipped = tx.update(
                jnp.array([1, bad], jnp.complex64), state, params
            )
            np.testing.assert_array_equal(updates, np.zeros(2))
            assert float(dls.loss_scale(skipped)) == 4.0

    def test_a_complex_gradient_of_a_real_parameter_is_refused(self):
        tx = make()
        params = {"w": jnp.ones(1)}
        grads = {"w": jnp.ones(1, jnp.complex64)}
        with pytest.raises(TypeError, match=r"grads\['w'\] has dtype complex64.*real"):
            tx.update(grads, tx.init(params), params)

    @pytest.mark.standard_promotion
    def test_float0_and_integer_leaves_neither_vote_nor_break(self):
        tx = make(optax.adam(1.0))
        params = {"w": jnp.ones(2), "i": jnp.array([3, 4], jnp.int32)}
        state = tx.init(params)

        @jax.jit
        def step(params, state):
            def loss_fn(params):
                return jnp.sum(params["w"] * params["i"].astype(jnp.float32))

            grad_fn = functools.partial(jax.value_and_grad, allow_int=True)
            _, grads = dls.value_and_scaled_grad(loss_fn, value_and_grad=grad_fn)(
                params, state=state
            )
            assert grads["i"].dtype == jax.dtypes.float0
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        new_params, new_state = step(params, state)
        assert avals(new_state) == avals(state)
        np.testing.assert_allclose(new_params["w"], [0.0, 0.0], atol=1e-5)
        np.testing.assert_array_equal(new_params["i"], [3, 4])
        assert new_params["i"].dtype == jnp.int32

        big = {"w": jnp.ones(2), "i": jnp.array([2**31 - 1, 0], jnp.int32)}
        _, state = tx.update(big, state, params)
        assert bool(state.scaler.grads_finite)

    @pytest.mark.parametrize(
        ("params", "grads"),
        [
            ({}, {}),
            ({"a": None}, {"a": None}),
            ({"a": jnp.ones((0, 3))}, {"a": jnp.ones((0, 3))}),
            ({"a": optax.MaskedNode()}, {"a": optax.MaskedNode()}),
            ({"a": jnp.ones(2)}, {"a": None}),
        ],
        ids=["empty-tree", "none", "empty-leaf", "masked-node", "no-gradient"],
    )
    def test_nothing_to_do_is_a_finite_step(self, params, grads):
        tx = make(growth_interval=1)
        updates, state = jax.jit(tx.update)(grads, tx.init(params), params)
        assert jax.tree.structure(updates) == jax.tree.structure(grads)
        assert bool(state.scaler.grads_finite)
        assert float(dls.loss_scale(state)) == 2 * SCALE

    def test_a_none_gradient_reaches_the_inner_optimizer(self):
        params = {"a": jnp.ones(2), "frozen": {"b": jnp.ones(2)}}
        grads = {"a": jnp.full(2, SCALE), "frozen": {"b": None}}
        tx = make(optax.sgd(1.0))
        updates, _ = tx.update(grads, tx.init(params), params)
        assert updates["frozen"] == {"b": None}
        np.testing.assert_array_equal(updates["a"], [-1.0, -1.0])
        # Momentum loses its trace of such a leaf: its state changes structure.
        tx = make(optax.sgd(1.0, momentum=0.9))
        with pytest.raises(ValueError, match="leave it out with optax.partition"):
            tx.update(grads, tx.init(params), params)


class TestErrors:
    @pytest.mark.parametrize(
        ("grads", "named"),
        [
            ({"a": jnp.ones(1)}, r"params\['b'\]\['c'\] has no gradient"),
            (
                {"a": jnp.ones(1), "b": {"c": jnp.ones(1)}, "d": jnp.ones(1)},
                r"grads\['d'\] has no parameter",
            ),
            ({"a": jnp.ones(1), "b": jnp.ones(1)}, r"grads\['b'\] has no parameter"),
            ((jnp.ones(1), jnp.ones(1)), r"grads\[0\] has no parameter"),
            (
                {"a": jnp.ones(1), "b": {"c": optax.MaskedNode()}},
                r"params\['b'\]\['c'\] has no gradient",
            ),
        ],
    )
    def test_gradients_of_another_tree_are_refused_by_path(self, grads, named):
        tx = make()
        params = {"a": jnp.ones(1), "b": {"c": jnp.ones(1)}}
        with pytest.raises(ValueError, match=named):
            tx.update(grads, tx.init(params), params)

    def test_other_containers_are_refused(self):
        tx = make()
        with pytest.raises(ValueError, match="but not their containers"):
            tx.update([jnp.ones(1)], tx.init([jnp.ones(1)]), (jnp.ones(1),))

    def test_a_none_may_stand_for_a_whole_subtree_of_parameters(self):
        tx = make(optax.identity())
        params = {"a": jnp.ones(1), "b": {"c": jnp.ones(1)}}
        updates, _ = tx.update({"a": jnp.ones(1), "b": None}, tx.init(params), params)
        assert updates["b"] is None

    def test_the_cure_for_a_list_is_a_chain(self):
        with pytest.raises(TypeError, match="optax.chain"):
            make([optax.clip(1.0), optax.sgd(1.0)])

    def test_a_missing_init_is_named(self):
        with pytest.raises(TypeError, match=r"Call state = tx.init\(params\) first"):
            make().update(jnp.ones(1), None)

    @pytest.mark.parametrize("inner", [optax.adam, None, 1e-3, "adam"])
    def test_an_inner_that_is_no_transformation_is_refused(self, inner):
        with pytest.raises(TypeError, match="inner must be an optax.GradientTrans"):
            dls.dynamic_loss_scaling(inner)

    def test_check_updates_must_be_bool(self):
        with pytest.raises(TypeError, match="check_updates must be True or False"):
            make(check_updates=1)

    @pytest.mark.parametrize(
        ("value", "error"),
        [
            (jnp.ones(3), ValueError),
            ((jnp.ones(()), {}), TypeError),
            ("loss", TypeError),
        ],
    )
    def test_a_value_that_is_no_loss_is_refused(self, value, error):
        tx = make()
        with pytest.raises(error, match="value must be the true loss, a scalar"):
            tx.update(jnp.ones(1), tx.init(jnp.ones(1)), value=value)

    @pytest.mark.parametrize("axis_name", [3, ("d", 0), 1.5])
    def test_an_axis_name_that_is_a_number_is_refused(self, axis_name):
        with pytest.raises(
            TypeError, match="axis_name must be the name of a mapped axis"
        ):
            make(axis_name=axis_name)

    def test_a_state_of_another_wrapper_is_refused_with_the_way_over(self):
        sgd = optax.sgd(1.0)
        wrappers = [
            dls.dynamic_loss_scaling(sgd),
            dls.static_loss_scaling(sgd, 8.0),
            dls.no_loss_scaling(sgd),
        ]
        for tx in wrappers:
            for other in wrappers:
                state = other.init(jnp.ones(1))
                if tx is other:
                    tx.update(jnp.ones(1), state)
                    continue
                with pytest.raises(
                    TypeError, match="from the init of this very transf"
                ):
                    tx.update(jnp.ones(1), state)

    @pytest.mark.standard_promotion
    @pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
    def test_half_precision_moments_are_refused_with_the_cast(self, dtype):
        adam, params = optax.adam(1e-3), {"w": jnp.ones(2, dtype)}
        tx, old_state = make(adam), adam.init(params)
        state = tx.init(params)._replace(inner_state=old_state)
        with pytest.raises(TypeError, match=rf"\['w'\] must be float32, got {dtype}"):
            tx.update(params, state, params)
        cast = jax.tree.map(
            lambda old, new: old.astype(new.dtype),
            old_state,
            tx.init(params).inner_state,
        )
        tx.update(params, state._replace(inner_state=cast), params)
        # What the user asked for in so many words is another matter, and so are scalars.
        injected = make(optax.inject_hyperparams(optax.adam)(learning_rate=0.1))
        state = injected.init(params)
        for rate in (1, 0.05, jnp.float16(0.1)):
            state.inner_state.hyperparams["learning_rate"] = rate
            injected.update(params, state, params)
        tx = make(optax.adam(1e-3, mu_dtype=dtype))
        tx.update(params, tx.init(params), params)

    @pytest.mark.standard_promotion
    def test_a_state_without_scaler_is_refused_with_the_way_in(self):
        tx = make(optax.adam(0.1))
        params = jnp.ones(1)
        old = optax.adam(0.1).init(params)
        with pytest.raises(TypeError, match=r"_replace\(inner_state=old_state\)"):
            tx.update(params, old, params)
        tx.update(params, tx.init(params)._replace(inner_state=old), params)

    def test_a_scaler_around_a_scaler_is_refused(self):
        with pytest.raises(ValueError, match="already holds a loss scaler"):
            make(optax.chain(make())).init(jnp.zeros(1))


# float16 cannot hold the default ceiling, and optax casts it; see the last test.
@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
@pytest.mark.standard_promotion
class TestInjectHyperparams:
    @pytest.mark.standard_promotion
    @pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
    def test_around_the_wrapper_under_jit(self, dtype):
        tx = optax.inject_hyperparams(dls.dynamic_loss_scaling)(
            optax.adam(0.1), init_scale=2.0**10, growth_interval=2
        )
        params = jnp.ones(2, dtype)
        state = jax.jit(tx.init)(params)
        step = jax.jit(tx.update)
        types = avals(state)
        for scale in (2.0**10, 2.0**11, 2.0**11, 2.0**12):
            _, state = step(scaled(params, state), state, params)
            assert float(dls.loss_scale(state)) == scale
        _, state = step(params * jnp.inf, state, params)
        assert float(dls.loss_scale(state)) == 2.0**11
        assert avals(state) == types

    @pytest.mark.standard_promotion
    def test_a_schedule_can_drive_a_setting(self):
        tx = optax.inject_hyperparams(
            dls.dynamic_loss_scaling, hyperparam_dtype=jnp.float32
        )(
            optax.sgd(0.1),
            init_scale=8.0,
            growth_interval=1,
            max_scale=optax.piecewise_constant_schedule(16.0, {2: 4.0}),
        )
        params = jnp.ones(1)
        state, scales = tx.init(params), []
        for _ in range(5):
            _, state = tx.update(params, state, params)
            scales.append(float(dls.loss_scale(state)))
        assert scales == [16, 16, 32, 64, 64]

    def test_float16_turns_the_start_into_inf_which_stands_for_the_default(self):
        """2**16 is inf in float16: inject_hyperparams casts to the parameters' dtype."""
        inject = optax.inject_hyperparams(dls.dynamic_loss_scaling)
        params = jnp.ones(1, jnp.float16)
        state = inject(optax.sgd(0.1), init_scale=2.0**16).init(params)
        assert float(dls.loss_scale(state)) == 2.0**15
        inject = optax.inject_hyperparams(
            dls.dynamic_loss_scaling, hyperparam_dtype=jnp.float32
        )
        state = inject(optax.sgd(0.1), init_scale=2.0**16).init(params)
        assert float(dls.loss_scale(state)) == 2.0**16


class TestNoLossScaling:
    @pytest.mark.standard_promotion
    @pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
    def test_is_the_bare_optimizer_bit_for_bit(self, dtype):
        bare, tx = optax.adamw(0.1), dls.no_loss_scaling(optax.adamw(0.1))
        params = bare_params = {"w": jnp.linspace(-1, 1, 6, dtype=dtype).reshape(2, 3)}
        state, bare_state = tx.init(params), bare.init(params)
        update, bare_update = jax.jit(tx.update), jax.jit(bare.update)
        for t in range(5):
            grads = jax.tree.map(lambda p: jnp.sin(p + t).astype(dtype), params)  # noqa: B023
            updates, state = update(grads, state, params)
            expected, bare_state = bare_update(grads, bare_state, bare_params)
            chex.assert_trees_all_equal(updates, expected)
            chex.assert_trees_all_equal(state.inner_state, bare_state)
            params = optax.apply_updates(params, updates)
            bare_params = optax.apply_updates(bare_params, expected)
        assert dls.metrics(state) == {
            "loss_scale": 1.0,
            "grads_finite": True,
            "consecutive_skips": 0,
            "total_skips": 0,
        }

    def test_has_no_check_in_its_program(self):
        params = jnp.ones(3)
        for tx, has_check in (
            (make(), True),
            (dls.no_loss_scaling(optax.sgd(1.0)), False),
        ):
            program = str(jax.make_jaxpr(tx.update)(params, tx.init(params), params))
            assert ("is_finite" in program) == has_check
            assert ("cond" in program) == has_check

    @pytest.mark.standard_promotion
    def test_takes_integer_parameters_as_the_other_wrappers_do(self):
        tx = dls.no_loss_scaling(optax.sgd(1.0))
        params = {"w": jnp.ones(2), "i": jnp.array([3])}
        grads = {"w": jnp.ones(2), "i": np.zeros(1, jax.dtypes.float0)}
        updates, _ = tx.update(grads, tx.init(params), params)
        params = optax.apply_updates(params, updates)
        assert params["i"].tolist() == [3]
        assert params["w"].tolist() == [0.0, 0.0]

    def test_a_scale_in_its_state_means_nothing(self):
        """Restored from a run with a static scale, or set by hand."""
        tx = dls.no_loss_scaling(optax.sgd(1.0))
        params = jnp.zeros(2)
        set_by_hand = optax.tree.set(tx.init(params), loss_scale=jnp.float32(1024.0))
        saved = flax.serialization.to_bytes(
            dls.static_loss_scaling(optax.sgd(1.0), 1024.0).init(params)
        )
        restored = flax.serialization.from_bytes(tx.init(params), saved)
        for state in (set_by_hand, restored):
            assert float(dls.loss_scale(state)) == 1.0
            _, grads = dls.value_and_scaled_grad(jnp.sum)(params, state=state)
            updates, _ = tx.update(grads, state, params)
            np.testing.assert_array_equal(updates, [-1.0, -1.0])

    @pytest.mark.standard_promotion
    def test_a_run_moves_between_the_wrappers(self):
        params = jnp.ones(2)
        off, on = dls.no_loss_scaling(optax.adam(0.1)), make(optax.adam(0.1))
        _, old = off.update(params, off.init(params), params)
        state = on.init(params)._replace(inner_state=old.inner_state)
        _, state = on.update(scaled(params, state), state, params)
        assert int(optax.tree.get(state, "count")) == 2
        back = off.init(params)._replace(inner_state=state.inner_state)
        assert jax.tree.structure(back) == jax.tree.structure(old)


def test_trains_where_float16_alone_does_not():
    """A gradient of 2**-26 is zero in float16 and exact once it is scaled."""
    xs = jnp.full(64, 2.0**-6, jnp.float16)

    def loss_fn(w, xs):
        error = (w.astype(jnp.float16) * xs).astype(jnp.float32)
        return jnp.sum(error) * 2.0**-26

    def train(tx):
        @jax.jit
        def step(w, state):
            _, grads = dls.value_and_scaled_grad(loss_fn)(w, xs, state=state)
            updates, state = tx.update(grads, state, w)
            return optax.apply_updates(w, updates), state

        w = jnp.float32(1.0)
        state = tx.init(w)
        for _ in range(5):
            w, state = step(w, state)
        return float(w)

    sgd = optax.sgd(2.0**24)
    assert train(dls.no_loss_scaling(sgd)) == 1.0
    assert train(dls.dynamic_loss_scaling(sgd)) == 1.0 - 5 * 2.0**-2
    assert train(dls.static_loss_scaling(sgd, 2.0**10)) == 1.0 - 5 * 2.0**-2
