"""Public bug reports on loss scaling in other libraries, each as a test.

Every test gives the addresses of the reports whose kind of fault it rules out. S is the
scale, N the growth interval.
"""

import functools

import chex
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import optax_dls as dls


@functools.partial(jax.jit, static_argnums=0)
def step(tx, params, state, true_grads):
    scaled = jax.tree.map(lambda g: g * dls.loss_scale(state), true_grads)
    updates, state = tx.update(scaled, state, params)
    return optax.apply_updates(params, updates), updates, state


def run(tx, params, true_grads):
    """Feeds S·g for every true gradient g; yields parameters, updates and state."""
    state = tx.init(params)
    for grads in true_grads:
        params, updates, state = step(tx, params, state, grads)
        yield params, updates, state


def scales(tx, true_grads):
    steps = run(tx, jnp.zeros(()), map(jnp.float32, true_grads))
    return [float(dls.loss_scale(state)) for _, _, state in steps]


@jax.jit
def half_precision_grad(target, state):
    """A backward pass in float16 whose true gradient is ``target``."""

    def loss_fn(w):
        y = w.astype(jnp.float16) * jnp.float16(1.0)
        return y.astype(jnp.float32) * target

    return dls.value_and_scaled_grad(loss_fn)(jnp.float32(0.0), state=state)


class TestScaleStaysUsable:
    def test_growth_without_overflow_never_reaches_inf(self, make):
        """https://github.com/google/flax/issues/2547"""
        tx = make(
            optax.sgd(0.1), init_scale=65536.0, growth_factor=10, growth_interval=1
        )
        w, state = jnp.float32(1.0), tx.init(jnp.float32(1.0))

        @jax.jit
        def step(w, state):
            _, grads = dls.value_and_scaled_grad(lambda w: w**2)(w, state=state)
            updates, state = tx.update(grads, state, w)
            return optax.apply_updates(w, updates), state, grads

        for _ in range(120):
            unscaled_by = dls.loss_scale(state)
            new_w, state, grads = step(w, state)
            np.testing.assert_allclose(grads / unscaled_by, 2 * w, rtol=1e-6)
            assert np.isfinite(dls.loss_scale(state))
            w = new_w
        assert float(dls.loss_scale(state)) == 2.0**32
        assert int(state.scaler.total_skips) == 0
        assert abs(float(w)) < 1e-10

    @pytest.mark.standard_promotion
    def test_400_bad_steps_end_at_a_floor_that_still_works(self, make):
        """https://github.com/NVIDIA/apex/issues/834
        https://github.com/facebookresearch/WSL-Images/issues/9
        https://github.com/deepspeedai/DeepSpeedExamples/issues/418
        """
        tx = make(optax.adam(0.1), init_scale=2.0**15, growth_interval=1)
        params = jnp.array([1.0, 2.0])
        start = tx.init(params)
        *_, (after, _, state) = run(tx, params, [jnp.full(2, jnp.nan)] * 400)
        assert float(dls.loss_scale(state)) == 2.0**-14
        chex.assert_trees_all_equal(after, params)
        chex.assert_trees_all_equal(state.inner_state, start.inner_state)
        assert int(state.scaler.total_skips) == 400
        assert int(state.scaler.consecutive_skips) == 400
        dls.raise_if_stalled(state, max_consecutive_skips=400)
        with pytest.raises(dls.LossScaleStalledError):
            dls.raise_if_stalled(state, max_consecutive_skips=399)
        for true in (6.0, 1e-3):
            unscaled = dls.unscale(jnp.float32(true) * dls.loss_scale(state), state)
            np.testing.assert_allclose(unscaled, true, rtol=1e-6)
        growths, update = 0, jax.jit(tx.update)
        while float(dls.loss_scale(state)) < 1:
            _, state = update(jnp.ones(2), state, params)
            growths += 1
        assert growths == 14

    def test_an_unscaled_value_that_overflows_is_skipped(self, make):
        """https://github.com/pytorch/pytorch/issues/99640"""
        tx = make(init_scale=2.0**-100, min_scale=2.0**-100)
        params = jnp.ones(1)
        updates, state = tx.update(jnp.array([1e20]), tx.init(params), params)
        assert float(updates[0]) == 0.0
        assert float(dls.loss_scale(state)) == 2.0**-100
        assert int(state.scaler.total_skips) == 1

    def test_one_bad_batch_backs_off_once(self, make):
        """https://github.com/pytorch/pytorch/issues/157436"""
        assert scales(make(init_scale=131072.0), [np.nan]) == [65536.0]

    @pytest.mark.parametrize(
        ("target", "init_scale", "settled", "skips"),
        [(2e5, 1.0, 0.25, 2), (1e5, 2.0**15, 0.5, 16)],
        ids=["gradient", "loss"],
    )
    def test_scales_below_one_are_legal_and_found(
        self, make, target, init_scale, settled, skips
    ):
        """https://github.com/google-deepmind/jmp/issues/18
        https://github.com/tensorflow/tensorflow/issues/38357
        """
        tx = make(init_scale=init_scale, growth_interval=5)
        state = tx.init(jnp.float32(0.0))
        update = jax.jit(tx.update)
        applied = []
        for step in range(skips + 30):
            _, grads = half_precision_grad(target, state)
            grads = grads.astype(jnp.float16)
            before = state
            _, state = update(grads, state)
            if int(state.scaler.consecutive_skips) == 0:
                applied.append(step)
                np.testing.assert_allclose(
                    dls.unscale(grads, before), target, rtol=1e-3
                )
            if step == skips:
                assert float(dls.loss_scale(before)) == settled
        assert applied[0] == skips
        # From there on, one probe at most in N + 1 steps.
        assert int(state.scaler.total_skips) <= skips + 30 // 6

    def test_settings_survive_jit_and_flattening(self, make):
        """https://github.com/google-deepmind/jmp/pull/44"""
        tx = make(init_scale=2.0, min_scale=2.0**-10)
        assert scales(tx, [np.inf] * 5)[-1] == 0.0625
        assert scales(tx, [np.inf] * 20)[-1] == 2.0**-10

    def test_both_bounds_hold(self, make):
        """https://github.com/OpenBMB/BMTrain/pull/129"""
        tx = make(init_scale=16.0, min_scale=4.0, max_scale=64.0, growth_interval=1)
        assert scales(tx, [1.0] * 10)[-1] == 64.0
        assert scales(tx, [np.nan] * 10)[-1] == 4.0

    def test_a_growth_step_is_unscaled_by_its_own_scale(self, make):
        """https://github.com/deepspeedai/DeepSpeed/issues/2686"""
        tx = make(growth_interval=3)
        state, used = tx.init(jnp.float32(0)), []
        for _ in range(6):
            used.append(float(dls.loss_scale(state)))
            value, grads = dls.value_and_scaled_grad(lambda w: w + 1)(
                jnp.float32(0), state=state
            )
            updates, state = tx.update(grads, state)
            assert (float(value), float(updates)) == (1.0, -1.0)
        assert used == [1024, 1024, 1024, 2048, 2048, 2048]
        assert float(dls.loss_scale(state)) == 4096

    def test_growth_on_exactly_the_nth_finite_step(self, make):
        """https://github.com/NVIDIA/apex/issues/864"""
        tx = make(init_scale=8.0, growth_interval=3)
        assert scales(tx, [1.0] * 9) == [8, 8, 16, 16, 16, 32, 32, 32, 64]

    def test_a_static_scale_is_the_factor_itself(self):
        """https://github.com/NVIDIA/Megatron-LM/issues/776"""
        tx = dls.static_loss_scaling(optax.sgd(1.0), 16.0)
        state = tx.init(jnp.zeros(()))
        assert float(dls.scale_loss(jnp.float32(3.0), state)) == 48.0
        updates, _ = tx.update(jnp.float32(48.0), state)
        assert float(updates) == -3.0


class TestDtypes:
    def test_the_pair_of_scaling_and_unscaling_is_one(self, make):
        """https://github.com/nerfstudio-project/nerfacc/issues/307"""
        tx = make()
        state = tx.init(jnp.float32(0))
        _, grads = dls.value_and_scaled_grad(lambda w: w)(jnp.float32(0), state=state)
        assert float(tx.update(grads, state)[0]) == -1.0
        # What it looks like when the loss was not scaled: a step 1/S of the right size.
        assert float(tx.update(jnp.float32(1.0), state)[0]) == -1 / 1024

    @pytest.mark.standard_promotion
    def test_the_scaler_never_takes_the_dtype_of_the_parameters(self, make):
        """https://github.com/google-deepmind/jmp/issues/47
        https://github.com/google-deepmind/optax/issues/1414
        """
        inner = optax.inject_hyperparams(optax.adam)(1e-3)
        for dtype in (jnp.float16, jnp.bfloat16, jnp.float32):
            tx = make(inner)
            params = jnp.ones(2, dtype)
            steps = run(tx, params, [jnp.zeros(2, dtype), params * jnp.nan, params * 0])
            for new_params, _, state in steps:
                chex.assert_trees_all_equal(new_params, params)
                dtypes = [leaf.dtype for leaf in state.scaler[:4]]
                assert dtypes == [jnp.float32, bool, jnp.int32, jnp.int32]
            assert float(dls.loss_scale(state)) == 512.0

    @pytest.mark.standard_promotion
    def test_a_float64_gradient_is_no_overflow(self, make):
        """https://github.com/google-deepmind/jmp/issues/47"""
        with jax.enable_x64(True):
            params = jnp.zeros((), jnp.float64)
            ((_, updates, state),) = run(make(), params, [jnp.float64(1e100)])
            assert updates.dtype == jnp.float64
            assert float(updates) == -1e100
            assert int(state.scaler.total_skips) == 0

    @pytest.mark.filterwarnings("ignore:The loss is float16")
    def test_a_float16_loss_reports_its_true_value_and_settles(self, make):
        """https://github.com/Lightning-AI/pytorch-lightning/issues/9799"""
        tx = make(init_scale=65536.0)
        w = jnp.float16(1.0)
        state = tx.init(w)
        for _ in range(6):
            value, grads = dls.value_and_scaled_grad(lambda w: w**2)(w, state=state)
            assert float(value) == 1.0
            before = state
            _, state = tx.update(grads, state, w)
        assert int(state.scaler.total_skips) == 2
        assert float(dls.loss_scale(state)) == 16384.0
        assert float(dls.unscale(grads, before)) == 2.0

    def test_unscaling_does_not_underflow(self, make):
        """https://github.com/pytorch/pytorch/issues/74739"""
        tx = make(init_scale=2.0**16)
        params = jnp.zeros(1, jnp.float16)
        grads = jnp.array([6.55e-4], jnp.float16)
        updates, _ = tx.update(grads, tx.init(params), params)
        assert updates.dtype == jnp.float32
        np.testing.assert_allclose(updates, [-9.997e-9], rtol=1e-3)

    @pytest.mark.standard_promotion
    @pytest.mark.parametrize("optimizer", ["sgd", "adamw", "lion", "adafactor"])
    def test_both_branches_have_one_type(self, make, optimizer):
        """https://github.com/google-deepmind/optax/issues/377"""
        momentum = {"momentum": 0.9} if optimizer == "sgd" else {}
        tx = make(getattr(optax, optimizer)(0.1, **momentum))
        halves = (jnp.float16, jnp.bfloat16, jnp.float32)
        for param_dtype in halves:
            for grad_dtype in halves:
                params, grads = jnp.ones(2, param_dtype), jnp.ones(2, grad_dtype)
                state = tx.init(params)
                updates, after = jax.eval_shape(tx.update, grads, state, params)
                assert updates.dtype == jnp.float32
                chex.assert_trees_all_equal_shapes_and_dtypes(after, state)

    def test_bfloat16_gradients(self, make):
        """https://github.com/pytorch/pytorch/issues/127176"""
        tx = make(init_scale=8.0)
        state = tx.init(jnp.zeros(1))
        updates, _ = tx.update(jnp.array([12.0], jnp.bfloat16), state, jnp.zeros(1))
        assert updates.dtype == jnp.float32
        assert float(updates[0]) == -1.5
        updates, state = tx.update(
            jnp.array([jnp.inf], jnp.bfloat16), state, jnp.zeros(1)
        )
        assert float(updates[0]) == 0.0
        assert float(dls.loss_scale(state)) == 4.0

    @pytest.mark.standard_promotion
    def test_no_scaling_costs_and_changes_nothing(self):
        """https://github.com/huggingface/accelerate/issues/2358"""

        def loss_fn(w):
            return jnp.mean(jnp.sin(w) ** 2)

        @jax.jit
        def step(w, state):
            loss, grads = dls.value_and_scaled_grad(loss_fn)(w, state=state)
            updates, state = tx.update(grads, state, w)
            return optax.apply_updates(w, updates), state, loss, grads

        @jax.jit
        def bare_step(w, state):
            loss, grads = jax.value_and_grad(loss_fn)(w)
            updates, state = bare.update(grads, state, w)
            return optax.apply_updates(w, updates), state, loss, grads

        bare, tx = optax.adam(0.1), dls.no_loss_scaling(optax.adam(0.1))
        w = bare_w = jnp.linspace(-1, 1, 5)
        state, bare_state = tx.init(w), bare.init(w)
        for _ in range(5):
            w, state, *numbers = step(w, state)
            bare_w, bare_state, *bare_numbers = bare_step(bare_w, bare_state)
            chex.assert_trees_all_equal((w, numbers), (bare_w, bare_numbers))
            chex.assert_trees_all_equal(state.inner_state, bare_state)
        assert "is_finite" not in str(jax.make_jaxpr(tx.update)(w, state, w))

    def test_complex_gradients_keep_their_imaginary_part(self, make):
        """https://github.com/pytorch/pytorch/issues/58228"""
        tx = make(init_scale=8.0)
        z = jnp.complex64(1 + 2j)
        state = tx.init(z)
        _, grads = dls.value_and_scaled_grad(lambda z: jnp.abs(z) ** 2)(z, state=state)
        np.testing.assert_allclose(dls.unscale(grads, state), 2 - 4j, rtol=1e-6)
        updates, _ = tx.update(grads, state, z)
        assert updates.dtype == jnp.complex64
        np.testing.assert_allclose(updates, -2 + 4j, rtol=1e-6)

    @pytest.mark.standard_promotion
    @pytest.mark.parametrize("optimizer", ["adam", "adamw", "rmsprop"])
    def test_zero_gradients_of_float16_parameters_stay_finite(self, make, optimizer):
        """https://github.com/google-deepmind/optax/issues/1754"""
        tx = make(getattr(optax, optimizer)(1e-3, eps=1e-8))
        params = jnp.zeros(3, jnp.float16)
        for new_params, updates, state in run(tx, params, [params] * 3):
            chex.assert_trees_all_equal(new_params, params)
            np.testing.assert_array_equal(updates, np.zeros(3))
            assert int(state.scaler.total_skips) == 0

    @pytest.mark.standard_promotion
    def test_a_norm_is_taken_in_float32(self, make):
        """https://github.com/facebookresearch/fairscale/pull/263"""
        tx = make(
            optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0)), init_scale=1.0
        )
        params = [jnp.zeros((), jnp.float16)] * 4
        ((_, updates, _),) = run(tx, params, [[jnp.float16(300.0)] * 4])
        np.testing.assert_allclose(updates, [-0.5] * 4, rtol=1e-6)


class TestSkip:
    @pytest.mark.standard_promotion
    def test_it_never_gives_up_and_applies_nan(self, make):
        """https://github.com/google-deepmind/optax/pull/1746"""
        tx = make(optax.adam(1.0))
        steps = list(
            run(
                tx,
                jnp.float32(1.0),
                [jnp.float32(jnp.nan)] * 5 + [jnp.float32(1.0)] * 2,
            )
        )
        params, _, state = steps[4]
        assert float(params) == 1.0
        chex.assert_trees_all_equal(
            state.inner_state, tx.init(jnp.float32(1.0)).inner_state
        )
        assert int(state.scaler.consecutive_skips) == 5
        params, _, state = steps[-1]
        assert float(params) < 0.0
        assert int(state.scaler.consecutive_skips) == 0
        assert int(state.scaler.total_skips) == 5

    @pytest.mark.standard_promotion
    def test_moments_and_counters_stand_still(self, make):
        """https://github.com/marin-community/levanter/pull/973"""
        good, bad = run(
            make(optax.adamw(0.1)),
            jnp.ones(2),
            [jnp.ones(2), jnp.array([1.0, jnp.nan])],
        )
        chex.assert_trees_all_equal(good[0], bad[0])
        chex.assert_trees_all_equal(good[2].inner_state, bad[2].inner_state)

    def test_weight_decay_behind_the_wrapper_acts_on_skipped_steps(self, make):
        """https://github.com/marin-community/levanter/pull/973"""
        bad = jnp.float32(jnp.nan)
        outside = optax.chain(make(), optax.add_decayed_weights(-0.1))
        ((params, _, _),) = run(outside, jnp.float32(1.0), [bad])
        assert abs(float(params) - 0.9) < 1e-6  # the wrong order moves them
        inside = make(optax.chain(optax.sgd(1.0), optax.add_decayed_weights(-0.1)))
        ((params, _, _),) = run(inside, jnp.float32(1.0), [bad])
        assert float(params) == 1.0

    def test_the_state_tells_what_was_skipped(self, make):
        """https://github.com/pytorch/pytorch/issues/152279"""
        grads = [jnp.float32(g) for g in (1.0, np.inf, 1.0, np.inf, np.inf)]
        states = [state for _, _, state in run(make(), jnp.zeros(()), grads)]
        consecutive = [int(s.scaler.consecutive_skips) for s in states]
        assert consecutive == [0, 1, 0, 1, 2]
        assert [bool(s.scaler.grads_finite) for s in states] == [1, 0, 1, 0, 0]
        assert int(states[-1].scaler.total_skips) == 3

    @pytest.mark.standard_promotion
    def test_the_status_is_found_under_layers(self, make):
        """https://github.com/pytorch/pytorch/issues/67590"""
        state = TrainState.create(
            apply_fn=None,
            params={"w": jnp.ones(2)},
            tx=optax.chain(optax.identity(), optax.chain(make(optax.adam(0.1)))),
        )
        state = state.apply_gradients(grads={"w": jnp.array([1.0, jnp.inf])})
        assert dls.metrics(state)["total_skips"] == 1

    def test_the_step_after_a_skip_is_whole(self, make):
        """https://github.com/deepspeedai/DeepSpeed/pull/7645"""
        steps = run(make(), jnp.zeros(()), [jnp.float32(jnp.inf), jnp.float32(1.0)])
        assert [float(params) for params, _, _ in steps] == [0.0, -1.0]

    @pytest.mark.parametrize(
        ("before", "bad"),
        [
            (optax.zero_nans(), jnp.array([1.0, jnp.nan])),
            (optax.clip(1.0), jnp.array([1.0, jnp.inf])),
        ],
        ids=["zero_nans", "clip"],
    )
    def test_a_link_before_the_wrapper_hides_the_overflow(self, make, before, bad):
        """https://github.com/google-deepmind/optax/issues/828
        https://github.com/deepspeedai/DeepSpeed/issues/102
        """
        wrong = optax.chain(before, make())
        updates, state = wrong.update(bad, wrong.init(jnp.zeros(2)))
        assert float(updates[0]) != 0.0
        assert float(dls.loss_scale(state)) == 1024.0
        right = make(optax.chain(before, optax.sgd(1.0)))
        updates, state = right.update(bad, right.init(jnp.zeros(2)))
        np.testing.assert_array_equal(updates, [0.0, 0.0])
        assert float(dls.loss_scale(state)) == 512.0

    def test_clipping_inside_sees_true_gradients(self, make):
        """https://github.com/Lightning-AI/pytorch-lightning/issues/9330"""
        clip = optax.clip_by_global_norm(1.0)
        grads = [jnp.array([3.0, 4.0])]
        right = make(optax.chain(clip, optax.sgd(1.0)))
        ((_, updates, _),) = run(right, jnp.zeros(2), grads)
        np.testing.assert_allclose(updates, [-0.6, -0.8], rtol=1e-6)
        ((_, updates, _),) = run(optax.chain(clip, make()), jnp.zeros(2), grads)
        np.testing.assert_allclose(updates, [-0.6 / 1024, -0.8 / 1024], rtol=1e-6)

    @pytest.mark.standard_promotion
    def test_schedules_advance_on_applied_steps(self, make):
        """https://github.com/pytorch/pytorch/issues/44511"""
        tx = make(optax.sgd(lambda count: 1.0 / (count + 1)))
        grads = [jnp.float32(g) for g in (np.nan, np.nan, 1.0, 1.0)]
        updates = [float(u) for _, u, _ in run(tx, jnp.zeros(()), grads)]
        assert updates == [0.0, 0.0, -1.0, -0.5]

    @pytest.mark.standard_promotion
    def test_attempted_and_applied_steps_are_both_known(self, make):
        """https://github.com/keras-team/keras/issues/20878"""
        state = TrainState.create(
            apply_fn=None, params={"w": jnp.ones(())}, tx=make(optax.adam(0.1))
        )
        for grad in (jnp.nan, jnp.nan, 1.0):
            state = state.apply_gradients(grads={"w": jnp.float32(grad)})
        assert int(state.step) == 3
        assert int(state.step) - int(dls.scaler_state(state).total_skips) == 1
        assert int(optax.tree.get(state.opt_state, "count")) == 1

    def test_batch_statistics_of_an_overflowing_step_are_discarded(self, make):
        """https://github.com/pytorch/pytorch/issues/88474"""
        tx = make()
        old = {"mean": jnp.zeros(2), "var": jnp.ones(2)}
        new = {"mean": jnp.array([0.1, jnp.inf]), "var": jnp.array([0.9, jnp.nan])}
        _, state = tx.update(jnp.array([jnp.nan]), tx.init(jnp.zeros(1)))
        chex.assert_trees_all_equal(dls.rollback_if_skipped(state, new, old), old)

    def test_reported_values_are_true_ones(self, make):
        """https://github.com/wandb/wandb/issues/9092
        https://github.com/huggingface/trl/issues/6702
        """
        state = make().init(jnp.zeros(2))
        slope = jnp.array([3.0, 4.0])
        for offset in (3.0, jnp.nan, 1e30):
            value, grads = dls.value_and_scaled_grad(
                lambda w, b: jnp.sum(w * slope) + b
            )(jnp.zeros(2), offset, state=state)
            np.testing.assert_array_equal(value, jnp.float32(offset))
            assert float(optax.tree.norm(dls.unscale(grads, state))) == 5.0

    @pytest.mark.standard_promotion
    def test_a_veto_of_the_user_is_no_overflow(self, make):
        """https://github.com/Haian-Jin/LVSM/pull/19"""
        tx = make(
            optax.conditionally_mask(
                optax.adam(1.0),
                lambda step, veto=False, **_: jnp.logical_not(veto),
                forward_extra_args=True,
            )
        )
        state = tx.init(jnp.zeros(1))
        updates, vetoed = tx.update(jnp.array([1024.0]), state, veto=jnp.array(True))
        assert float(updates[0]) == 0.0
        assert dls.loss_scale(vetoed) == dls.loss_scale(state)
        assert int(vetoed.scaler.total_skips) == 0
        assert int(optax.tree.get(vetoed, "count")) == 0
        # For the scaler it was a finite step like any other.
        assert int(vetoed.scaler.rule_state.growth_count) == 1
        updates, _ = tx.update(jnp.array([1024.0]), vetoed, veto=jnp.array(False))
        np.testing.assert_allclose(updates, [-1.0], rtol=1e-4)


class TestAccumulation:
    @pytest.fixture
    def multi_steps(self, make):
        def multi_steps(every_k, **settings):
            steps = optax.MultiSteps(optax.sgd(1.0), every_k)
            return make(steps.gradient_transformation(), **settings)

        return multi_steps

    @pytest.mark.standard_promotion
    def test_micro_gradients_are_each_unscaled_by_their_own_scale(self, multi_steps):
        """https://github.com/pytorch/pytorch/pull/36601"""
        tx = multi_steps(2, init_scale=8.0, growth_interval=1)
        (_, first, _), (_, second, state) = run(
            tx, jnp.zeros(()), [jnp.float32(1.0)] * 2
        )
        assert (float(first), float(second)) == (0.0, -1.0)
        assert float(dls.loss_scale(state)) == 32.0

    @pytest.mark.standard_promotion
    def test_a_bad_micro_batch_is_dropped_and_nothing_else(self, multi_steps):
        """https://github.com/espnet/espnet/pull/3283"""
        grads = [jnp.float32(g) for g in (np.nan, 1, 1, 1, np.inf, 1)]
        steps = list(run(multi_steps(2), jnp.zeros(()), grads))
        assert [float(u) for _, u, _ in steps] == [0, 0, -1, 0, 0, -1]
        assert int(steps[-1][2].scaler.total_skips) == 2

    @pytest.mark.standard_promotion
    def test_the_mean_is_unscaled_once(self, multi_steps):
        """https://github.com/microsoft/Swin-Transformer/issues/311
        https://github.com/NVIDIA/apex/issues/286
        """
        for true, mean in (([1, 2, 3], -2.0), ([1, 2, 3, 6], -3.0)):
            tx = multi_steps(len(true))
            updates = [
                float(u) for _, u, _ in run(tx, jnp.zeros(()), map(jnp.float32, true))
            ]
            assert updates == [0.0] * (len(true) - 1) + [mean]


class TestTrees:
    def test_empty_leaves_and_trees_are_finite(self, make):
        """https://github.com/pytorch/pytorch/issues/99174
        https://github.com/Lightning-AI/pytorch-lightning/issues/4524
        """
        norm = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))
        for params in ({}, {"a": jnp.ones(0)}, {"a": jnp.ones(0), "b": jnp.ones(2)}):
            ((new, _, state),) = run(make(norm), params, [params])
            chex.assert_tree_all_finite(new)
            assert bool(state.scaler.grads_finite)
            assert int(state.scaler.rule_state.growth_count) == 1

    def test_two_scalers_in_one_another_are_refused(self, make):
        """https://github.com/tensorflow/tensorflow/issues/48862"""
        with pytest.raises(ValueError, match="Wrap the whole optimizer once"):
            make(make()).init(jnp.zeros(1))

    def test_none_passes_through(self, make):
        """https://github.com/tensorflow/tensorflow/issues/31956"""
        grads = {"a": jnp.float32(1024.0), "n": None}
        tx = make()
        updates, _ = tx.update(grads, tx.init({"a": jnp.zeros(()), "n": None}))
        assert updates == {"a": -1.0, "n": None}

    def test_a_group_without_gradients_neither_blocks_nor_votes(self, make):
        """https://github.com/nerfstudio-project/nerfstudio/pull/1919"""
        params = {"a": jnp.zeros(()), "b": jnp.zeros(())}
        for absent in (None, optax.MaskedNode()):
            tx = make()
            grads = {"a": jnp.float32(1024.0), "b": absent}
            given = params if absent is None else {**params, "b": absent}
            updates, state = tx.update(grads, tx.init(given), given)
            assert float(updates["a"]) == -1.0
            assert int(state.scaler.rule_state.growth_count) == 1

    @pytest.mark.standard_promotion
    def test_integer_parameters_keep_value_and_dtype(self, make):
        """https://github.com/netket/netket/pull/1436"""
        params = {"w": jnp.float32(1.0), "i": jnp.int32(3)}
        tx = make()
        state = tx.init(params)
        _, grads = dls.value_and_scaled_grad(
            lambda p: p["w"] * p["i"],
            value_and_grad=functools.partial(jax.value_and_grad, allow_int=True),
        )(params, state=state)
        updates, _ = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        assert (float(params["w"]), int(params["i"])) == (-2.0, 3)
        assert params["i"].dtype == jnp.int32

    def test_one_scale_for_a_sum_of_losses(self, make):
        """https://github.com/NVIDIA/apex/issues/929"""
        state = make(init_scale=256.0).init(jnp.zeros(()))
        one = jnp.float32(1.0)

        def grad_of(loss_fn):
            _, grads = dls.value_and_scaled_grad(loss_fn)(one, state=state)
            return float(dls.unscale(grads, state))

        assert grad_of(lambda p: p + 2 * p) == 3.0
        assert grad_of(lambda p: p) + grad_of(lambda p: 2 * p) == 3.0

    @pytest.mark.standard_promotion
    def test_one_scaler_serves_several_optimizers(self, make):
        """https://github.com/OpenBMB/BMTrain/issues/39"""
        tx = make(
            optax.partition(
                {"adam": optax.adam(0.1), "sgd": optax.sgd(0.1)},
                {"a": "adam", "b": "sgd"},
            )
        )
        params = {"a": jnp.ones(2), "b": jnp.ones(2)}
        bad = {"a": jnp.ones(2), "b": jnp.array([1.0, jnp.inf])}
        ((new, _, state),) = run(tx, params, [bad])
        chex.assert_trees_all_equal(new, params)
        assert float(dls.loss_scale(state)) == 512.0


class TestJit:
    @pytest.mark.standard_promotion
    def test_the_wrapper_adds_at_most_one_copy_of_the_parameters(self, make):
        """https://github.com/google-deepmind/optax/issues/472"""
        params = jnp.ones(2**20)

        def temporary_bytes(tx):
            def step(params, state):
                updates, state = tx.update(params, state, params)
                return optax.apply_updates(params, updates), state

            compiled = jax.jit(step, donate_argnums=(0, 1)).lower(
                params, tx.init(params)
            )
            return compiled.compile().memory_analysis().temp_size_in_bytes

        for inner in (optax.sgd(0.1), optax.adamw(0.1)):
            # A tenth more for the partial results of the finite check.
            assert temporary_bytes(make(inner)) - temporary_bytes(inner) <= 1.1 * 2**22

    @pytest.mark.standard_promotion
    def test_all_state_is_saved_and_a_bare_optimizer_can_be_loaded(self, make):
        """https://github.com/facebookresearch/metaseq/issues/3
        https://github.com/facebookresearch/fairseq2/issues/1346
        """
        tx, one = make(optax.adam(0.1), growth_interval=4), jnp.ones(())
        *_, (params, _, state) = run(tx, one, [one] * 3)
        saved = flax.serialization.to_bytes(state)
        restored = flax.serialization.from_bytes(tx.init(one), saved)
        assert float(dls.unscale(jnp.float32(1024.0), restored)) == 1.0
        _, state = tx.update(1024 * one, restored, params)
        assert float(dls.loss_scale(state)) == 2048.0

        bare = optax.adam(0.1)
        _, bare_state = bare.update(one, bare.init(one))
        state = tx.init(one)._replace(inner_state=bare_state)
        _, state = tx.update(1024 * one, state, one)
        assert int(optax.tree.get(state, "count")) == 2

    @pytest.mark.standard_promotion
    def test_five_steps_compile_once(self, make):
        """https://github.com/jax-ml/jax/issues/3163"""
        tx = make(optax.adam(0.1))
        traces: list[None] = []

        @jax.jit
        def step(state, grads):
            traces.append(None)
            return tx.update(grads, state)[1]

        state = tx.init(jnp.ones(2))
        for _ in range(5):
            state = step(state, jnp.ones(2))
        assert len(traces) == 1

    @pytest.mark.standard_promotion
    def test_two_fresh_states_can_both_be_donated(self, make):
        """https://github.com/google-deepmind/optax/pull/1059"""
        tx = make(optax.adam(0.1))

        @functools.partial(jax.jit, donate_argnums=(0, 1))
        def step(params, state):
            updates, state = tx.update(params, state, params)
            return optax.apply_updates(params, updates), state

        for _ in range(2):
            params = jnp.ones(2)
            chex.assert_tree_all_finite(step(params, tx.init(params)))

    def test_members_of_a_population_decide_alone(self, make):
        """https://github.com/PyAutoLabs/PyAutoFit/pull/1473"""
        tx = make()
        state = jax.vmap(tx.init)(jnp.zeros(3))
        grads = jnp.array([1.0, jnp.inf, 2.0]) * 1024
        updates, state = jax.jit(jax.vmap(tx.update))(grads, state)
        np.testing.assert_array_equal(updates, [-1.0, 0.0, -2.0])
        np.testing.assert_array_equal(dls.loss_scale(state), [1024, 512, 1024])
        np.testing.assert_array_equal(state.scaler.total_skips, [0, 1, 0])

    @pytest.mark.standard_promotion
    def test_no_callback_and_no_host_transfer(self, make):
        """https://github.com/huggingface/accelerate/issues/1714"""
        tx = make(optax.adam(0.1))
        params = jnp.ones(2)
        state = tx.init(params)
        program = str(jax.make_jaxpr(tx.update)(params, state, params))
        assert "callback" not in program
        step = jax.jit(tx.update)
        step(params, state, params)
        with jax.transfer_guard("disallow"):
            for _ in range(10):
                _, state = step(params, state, params)

    def test_debug_nans_stops_at_an_overflow_that_leaves_the_step(self, make):
        """https://github.com/kenziyuliu/MS-G3D/issues/40"""
        tx = make()
        state = tx.init(jnp.zeros(1))

        @functools.partial(jax.jit, static_argnames="return_grads")
        def step(state, x, return_grads):
            loss_fn = dls.value_and_scaled_grad(lambda w: jnp.sum(w / x))
            _, grads = loss_fn(jnp.ones(1), state=state)
            updates, state = tx.update(grads, state)
            return (updates, state, grads) if return_grads else (updates, state)

        with jax.debug_nans(True), jax.debug_infs(True):
            step(state, jnp.ones(1), return_grads=True)
            with pytest.raises(FloatingPointError):
                step(state, jnp.zeros(1), return_grads=True)
            # JAX looks at what a compiled function returns, and that is finite here.
            step(state, jnp.zeros(1), return_grads=False)

    def test_a_float16_network_learns_as_float32_does(self):
        """https://github.com/keras-team/keras/issues/19244"""
        rng = np.random.default_rng(0)

        def normal(rows, columns, size=1.0):
            return jnp.asarray(size * rng.normal(size=(rows, columns)), jnp.float32)

        x, labels = normal(128, 64), jnp.arange(128) % 10
        shapes = ((64, 128), (128, 128), (128, 10))
        params = [normal(*shape, shape[0] ** -0.5) for shape in shapes]

        def final_loss(tx, dtype):
            def loss_fn(params, x, labels):
                for w in params[:-1]:
                    x = jax.nn.gelu(x.astype(dtype) @ w.astype(dtype))
                logits = (x @ params[-1].astype(dtype)).astype(jnp.float32)
                loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
                return jnp.mean(loss) * 2.0**-20

            def step(carry, _):
                params, state = carry
                loss, grads = dls.value_and_scaled_grad(loss_fn)(
                    params, x, labels, state=state
                )
                updates, state = tx.update(grads, state, params)
                return (optax.apply_updates(params, updates), state), loss

            run = jax.jit(lambda carry: jax.lax.scan(step, carry, length=200))
            _, losses = run((params, tx.init(params)))
            return float(losses[-1]) * 2**20

        sgd = optax.sgd(0.5 * 2.0**20)
        full = final_loss(dls.no_loss_scaling(sgd), jnp.float32)
        scaled = final_loss(dls.dynamic_loss_scaling(sgd), jnp.float16)
        half = final_loss(dls.no_loss_scaling(sgd), jnp.float16)
        assert full < 0.01
        assert abs(scaled / full - 1) < 0.05
        assert not half < 10 * full
