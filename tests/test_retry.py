"""Retries: a batch that overflows is computed again at a lower scale, in the same step."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import optax_dls as dls

RETRIES = 20
START = 2.0**15


def make(optimizer=None, **settings):
    settings = {"init_scale": START, "growth_interval": 3, **settings}
    rule = dls.rules.retrying(dls.rules.dynamic(**settings))
    return dls.loss_scaling(optimizer or optax.sgd(1.0), rule)


def loss_fn(w, x):
    """Its gradient is x, in float16: finite up to a scale of 65504 / x."""
    return jnp.sum((w.astype(jnp.float16) * x.astype(jnp.float16)).astype(jnp.float32))


@functools.partial(jax.jit, static_argnums=(0, 1))
def step(tx, max_retries, w, state, x):
    grad_fn = dls.value_and_scaled_grad(loss_fn, max_retries=max_retries)
    loss, grads, state = grad_fn(w, x, state=state)
    updates, state = tx.update(grads, state, w)
    return optax.apply_updates(w, updates), state, loss


def one_step(x, max_retries=RETRIES, **settings):
    tx = make(**settings)
    w = jnp.zeros_like(x)
    return step(tx, max_retries, w, tx.init(w), x)


def seen(state):
    scaler = state.scaler
    return (
        float(scaler.loss_scale),
        int(scaler.total_skips),
        int(scaler.rule_state.total_retries),
    )


def test_the_batch_is_applied_and_the_scale_backs_off():
    w, state, _ = one_step(jnp.array([1.0, 8.0]))
    np.testing.assert_array_equal(w, [-1.0, -8.0])
    assert seen(state) == (2.0**12, 0, 3)
    assert int(state.scaler.rule_state.pending_retries) == 0


def test_the_scale_moves_as_if_each_attempt_had_been_a_step():
    """The same batches without retries, each one repeated until it is applied."""
    rng = np.random.default_rng(0)
    batches = [jnp.float32(2.0**e) for e in rng.integers(-8, 9, 60)]
    sgd = optax.sgd(2.0**-10)  # so slow that the loss itself stays finite
    # The classic rule, which backs off at every overflow, as the retries do.
    classic: dict[str, Any] = {"growth_interval": 3, "recovery_interval": None}
    tx, plain = make(sgd, **classic), dls.dynamic_loss_scaling(sgd, **classic)

    @jax.jit
    def attempt(w, state, x):
        _, grads = dls.value_and_scaled_grad(loss_fn)(w, x, state=state)
        updates, state = plain.update(grads, state, w)
        return optax.apply_updates(w, updates), state

    w, state = jnp.float32(0), tx.init(jnp.float32(0))
    w_plain, state_plain = jnp.float32(0), plain.init(jnp.float32(0))
    for x in batches:
        w, state, _ = step(tx, RETRIES, w, state, x)
        w_plain, state_plain = attempt(w_plain, state_plain, x)
        while state_plain.scaler.consecutive_skips > 0:
            w_plain, state_plain = attempt(w_plain, state_plain, x)
        assert w == w_plain
        assert state.scaler.rule_state.rule_state == state_plain.scaler.rule_state
        assert dls.loss_scale(state) == dls.loss_scale(state_plain)
    assert w == -(2.0**-10) * sum(batches)
    assert seen(state)[1:] == (0, int(state_plain.scaler.total_skips))
    assert seen(state)[2] > 10


@pytest.mark.parametrize(("max_retries", "applied"), [(0, 0), (2, 0), (3, 1)])
def test_at_most_k_retries_and_then_an_ordinary_skip(max_retries, applied):
    """An overflow that no retry mends backs off once: it may not be the scale's fault."""
    w, state, _ = one_step(jnp.float32(8.0), max_retries)
    assert float(w) == -8.0 * applied
    assert seen(state) == (2.0**12 if applied else START / 2, 1 - applied, max_retries)


class TestOneScaleForSeveralGradients:
    """They all start at the same scale, so the one with the most retries counts."""

    @staticmethod
    def window(tx, w, state, xs):
        """One update with the mean over micro-batches, accumulated by hand."""
        grad_fn = dls.value_and_scaled_grad(loss_fn, max_retries=3)

        def accumulate(carry, x):
            total, state = carry
            _, grads, state = grad_fn(w, x, state=state)
            return (total + grads / len(xs), state), None

        (grads, state), _ = lax.scan(accumulate, (jnp.zeros_like(w), state), xs)
        updates, state = tx.update(grads, state, w)
        return optax.apply_updates(w, updates), state

    def test_a_window_of_alike_micro_batches_moves_the_scale_as_one_batch(self):
        def scales(micro_batches):
            tx = make(optax.sgd(1e-3), growth_interval=5)

            @jax.jit
            def run(w, state):
                def body(carry, _):
                    w, state = carry
                    w, state = self.window(tx, w, state, jnp.full(micro_batches, 1.5))
                    return (w, state), dls.loss_scale(state)

                return lax.scan(body, (w, state), length=100)

            (_, state), scales = run(jnp.float32(0), tx.init(jnp.float32(0)))
            return scales, int(state.scaler.rule_state.total_retries)

        (one, retries_of_one), (sixteen, retries_of_sixteen) = scales(1), scales(16)
        assert set(one.tolist()) == {2.0**15, 2.0**16}  # 1.5 fits into float16 at 2**15
        np.testing.assert_array_equal(sixteen, one)
        assert retries_of_sixteen == 16 * retries_of_one > 0

    def test_micro_batches_that_differ(self):
        tx = make()
        xs = jnp.array([2.0, 8.0, 1.0, 4.0])  # 1, 3, 0 and 2 retries
        w, state = jax.jit(functools.partial(self.window, tx))(
            jnp.float32(0), tx.init(jnp.float32(0)), xs
        )
        assert float(w) == -jnp.mean(xs)
        assert seen(state) == (START / 2**3, 0, 6)

    def test_a_micro_batch_that_nothing_helps_costs_one_more_backoff(self):
        tx = make()
        w, state = jax.jit(functools.partial(self.window, tx))(
            jnp.float32(0), tx.init(jnp.float32(0)), jnp.array([4.0, 64.0])
        )
        assert float(w) == 0.0
        assert seen(state) == (START / 2**2 / 2, 1, 5)

    def test_gradients_of_single_examples_retry_together(self):
        """With the map inside: under an outer vmap each example has counts of its own."""

        def of_examples(fun, has_aux):
            return jax.vmap(jax.value_and_grad(fun, has_aux=has_aux), (None, 0))

        tx = make()
        grad_fn = dls.value_and_scaled_grad(
            loss_fn, value_and_grad=of_examples, max_retries=3
        )
        xs = jnp.array([2.0, 8.0, 1.0])
        losses, grads, state = jax.jit(lambda w, s: grad_fn(w, xs, state=s))(
            jnp.float32(1), tx.init(jnp.float32(1))
        )
        np.testing.assert_array_equal(losses, xs)
        np.testing.assert_array_equal(dls.unscale(grads, state), xs)
        _, state = tx.update(jnp.mean(grads), state)
        assert seen(state) == (START / 2**3, 0, 3)

    @pytest.mark.skipif(not hasattr(optax, "microbatch"), reason="Optax 0.2.7 has it")
    def test_optax_microbatch_goes_inside(self):
        def by_microbatch(fun, has_aux):
            return optax.microbatch(
                jax.value_and_grad(fun, has_aux=has_aux),
                argnums=1,
                microbatch_size=2,
                accumulator=optax.microbatching.AccumulationType.MEAN,
            )

        def mean_loss(w, xs):
            return jnp.mean(jax.vmap(loss_fn, (None, 0))(w, xs))

        tx = make()
        grad_fn = dls.value_and_scaled_grad(
            mean_loss, value_and_grad=by_microbatch, max_retries=5
        )
        xs = jnp.array([2.0, 1.0, 1.0, 16.0])
        loss, grads, state = jax.jit(lambda w, s: grad_fn(w, xs, state=s))(
            jnp.float32(1), tx.init(jnp.float32(1))
        )
        assert float(loss) == float(dls.unscale(grads, state)) == 5.0
        assert int(optax.tree.get(state, "pending_retries")) == 3


class TestSkipsThatAreNotTheScalesFault:
    """The retries showed overflows, which move the scale; the outcome does not."""

    def test_updates_that_are_not_finite(self):
        def refuse(updates, params):
            return jax.tree.map(lambda u: jnp.where(u < -3, jnp.nan, u), updates)

        tx = dls.loss_scaling(
            optax.stateless(refuse),
            dls.rules.retrying(dls.rules.dynamic(init_scale=START)),
            check_updates=True,
        )
        w, state = jnp.float32(0), tx.init(jnp.float32(0))
        for x, expected_skips in ((-4.0, 1), (1.0, 1), (1.0, 1)):
            w, state, _ = step(tx, RETRIES, w, state, jnp.float32(x))
            assert seen(state) == (2.0**13, expected_skips, 2)
            assert int(optax.tree.get(state, "pending_retries")) == 0
        assert float(w) == 2.0

    def test_a_loss_that_is_not_finite(self):
        """That of a second micro-batch, whose mean with the first is handed on."""
        tx = make(recovery_interval=None)
        w = jnp.float32(0)
        _, grads, state = dls.value_and_scaled_grad(loss_fn, max_retries=RETRIES)(
            w, jnp.float32(4.0), state=tx.init(w)
        )
        state = optax.tree.set(state, growth_count=jnp.int32(2))
        _, state = tx.update(grads * jnp.nan, state, w, value=jnp.nan)
        assert seen(state) == (2.0**13, 1, 2)
        assert int(optax.tree.get(state, "pending_retries")) == 0
        assert int(optax.tree.get(state, "growth_count")) == 0
        _, state = tx.update(grads * jnp.nan, state, w, value=jnp.nan)
        assert seen(state) == (2.0**13, 2, 2)


@jax.custom_vjp
def overflowing_with_state(w, count):
    """The gradient of w is 8; that of ``count`` is its next value, whatever the loss is."""
    return 8.0 * jnp.sum(w)


overflowing_with_state.defvjp(
    lambda w, count: (overflowing_with_state(w, count), (w, count)),
    lambda residuals, g: (
        (8 * g.astype(jnp.float16) + 0 * residuals[0].astype(jnp.float16)).astype(
            jnp.float32
        ),
        residuals[1] + jnp.array([1.0, jnp.inf]),
    ),
)


class TestLeavesThatAreNotLinearInTheLoss:
    @pytest.mark.parametrize(
        ("name", "mask"),
        [
            ("_overwrite_with_gradient", None),
            ("count", {"w": True, "count": False}),
            ("count", lambda grads: {"w": True, "count": {"inner": False}}),
            ("count", {"w": True, "count": {"inner": np.False_}}),
        ],
    )
    def test_they_pass_as_they_are(self, name, mask):
        params = {"w": jnp.zeros(2), name: {"inner": jnp.array([3.0, 0.0])}}
        grad_fn = dls.value_and_scaled_grad(
            lambda params: overflowing_with_state(params["w"], params[name]["inner"]),
            max_retries=RETRIES,
            mask=mask,
        )
        state = make().init(params["w"])
        _, grads, state = jax.jit(lambda p, s: grad_fn(p, state=s))(params, state)
        assert int(optax.tree.get(state, "pending_retries")) == 3
        assert grads["w"].tolist() == [8 * START, 8 * START]
        assert grads[name]["inner"].tolist() == [4.0, np.inf]
        unscaled = dls.unscale(grads, state, mask=mask)
        assert unscaled["w"].tolist() == [8.0, 8.0]
        assert unscaled[name]["inner"].tolist() == [4.0, np.inf]

    @pytest.mark.parametrize(
        ("mask", "error", "message"),
        [
            ({"w": "no"}, TypeError, r"mask\['w'\] must be True or False, got 'no'"),
            ({"v": True}, ValueError, "mask must be a tree like the gradients"),
            (lambda grads: 1.0, TypeError, "mask must be True or False, got 1.0"),
        ],
    )
    def test_a_mask_of_another_kind_is_refused(self, mask, error, message):
        with pytest.raises(error, match=message):
            dls.unscale({"w": W}, make().init(W), mask=mask)


def test_total_retries_saturate():
    tx = make()
    w = jnp.float32(0)
    largest = jnp.iinfo(jnp.int32).max
    state = optax.tree.set(tx.init(w), total_retries=jnp.int32(largest - 2))
    for _ in range(2):
        w, state, _ = step(tx, RETRIES, w, state, jnp.float32(64.0))
        assert int(optax.tree.get(state, "total_retries")) == largest


def test_each_attempt_is_a_step_for_a_rule_that_asks_about_the_step_before():
    """One bit for each update: whether the step before was finite."""

    def update(grads_finite, loss_scale, rule_state, *, last_finite):
        return loss_scale, 2 * rule_state + last_finite.astype(jnp.int32)

    bits = dls.rules.Rule(
        lambda: (jnp.float32(START), jnp.int32(1)), update, ("last_finite",)
    )
    tx = dls.loss_scaling(optax.sgd(1.0), dls.rules.retrying(bits))
    w = jnp.float32(0)
    _, state, _ = step(tx, RETRIES, w, tx.init(w), jnp.float32(4.0))
    assert f"{int(state.scaler.rule_state.rule_state):b}" == "1100"


def test_a_rule_that_asks_whether_it_is_updated_hears_of_both():
    """Two overflows, which count, and the outcome, which does not."""

    def update(grads_finite, loss_scale, rule_state, *, updates_rule):
        return loss_scale, 2 * rule_state + updates_rule.astype(jnp.int32)

    bits = dls.rules.Rule(
        lambda: (jnp.float32(START), jnp.int32(1)), update, ("updates_rule",)
    )
    tx = dls.loss_scaling(optax.sgd(1.0), dls.rules.retrying(bits))
    w = jnp.float32(0)
    _, grads, state = dls.value_and_scaled_grad(loss_fn, max_retries=RETRIES)(
        w, jnp.float32(4.0), state=tx.init(w)
    )
    _, state = tx.update(grads, state, w, value=jnp.nan)
    assert f"{int(state.scaler.rule_state.rule_state):b}" == "1110"


def test_the_operations_are_named_in_profiles():
    tx = make()
    text = (
        jax.jit(lambda w: step(tx, RETRIES, w, tx.init(w), w))
        .lower(W)
        .as_text(debug_info=True)
    )
    loop = "retry/while/body"
    # The transposed product: newer versions of JAX drop the forward one, which nobody reads.
    for name in (
        "transpose(jvp(scale_loss))/mul",
        "rescale/mul",
        "check_finite/is_finite",
    ):
        assert f"{loop}/{name}" in text


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_stays_costs_one_backoff(bad):
    """A finite loss of which the gradient is bad at any scale."""

    @jax.custom_jvp
    def zero(w):
        return 0.0 * w

    zero.defjvp(lambda primals, tangents: (zero(*primals), bad * tangents[0]))
    tx = make()
    w = jnp.float32(1.0)
    state = tx.init(w)
    grad_fn = dls.value_and_scaled_grad(zero, max_retries=5)
    for n in range(1, 4):
        loss, grads, state = grad_fn(w, state=state)
        updates, state = tx.update(grads, state, w)
        assert (float(loss), float(updates)) == (0.0, 0.0)
        assert seen(state) == (START / 2**n, n, 5 * n)


def test_a_loss_that_is_not_finite_is_not_retried():
    """No scale helps there; with value=, as ever, the scale does not even back off."""
    tx = make()
    w = jnp.float32(1.0)
    grad_fn = dls.value_and_scaled_grad(lambda w: w * jnp.nan, max_retries=5)
    loss, grads, state = grad_fn(w, state=tx.init(w))
    _, without = tx.update(grads, state, w)
    assert seen(without) == (START / 2, 1, 0)
    _, told = tx.update(grads, state, w, value=loss)
    assert seen(told) == (START, 1, 0)


def test_the_old_state_unscales_as_well():
    """Only counters are new, so mixing the two up cannot spoil a gradient."""
    tx = make()
    w = jnp.float32(0)
    old = tx.init(w)
    grad_fn = dls.value_and_scaled_grad(loss_fn, max_retries=RETRIES)
    _, grads, new = grad_fn(w, jnp.float32(64.0), state=old)
    assert grads == 64.0 * START
    assert dls.loss_scale(new) == dls.loss_scale(old)
    assert dls.unscale(grads, new) == dls.unscale(grads, old) == 64.0
    updates, state = tx.update(grads, old, w)
    assert (float(updates), *seen(state)) == (-64.0, START, 0, 0)


def test_retries_end_where_float32_does():
    tx = make(init_scale=2.0**-98, min_scale=2.0**-100)
    w = jnp.float32(1.0)
    grad_fn = dls.value_and_scaled_grad(lambda w: jnp.sqrt(w - 1.0), max_retries=50)
    *_, state = grad_fn(w, state=tx.init(w))  # the gradient of sqrt at 0 is inf
    assert seen(state) == (2.0**-98, 0, 2)


def test_any_rule_hears_of_the_retries():
    rule = dls.rules.retrying(dls.rules.static(START))
    tx = dls.loss_scaling(optax.sgd(1.0), rule)
    w = jnp.float32(0)
    w, state, _ = step(tx, RETRIES, w, tx.init(w), jnp.float32(64.0))
    assert (float(w), *seen(state)) == (-64.0, START, 0, 6)
    w, state, _ = one_step(jnp.float32(64.0), backoff_factor=0.25)
    assert seen(state) == (START / 4**6, 0, 6)


def test_without_loss_scaling_the_same_step_retries_nothing():
    tx = dls.no_loss_scaling(optax.sgd(1.0))
    x = jnp.float32(3.0)
    run = functools.partial(step, tx, RETRIES)
    w, _, _ = run(x, tx.init(x), x)
    assert float(w) == 0.0
    assert "while" not in str(jax.make_jaxpr(run)(x, tx.init(x), x))
    none = dls.rules.none()
    assert dls.rules.retrying(none) is none


def test_the_program_holds_one_backward_pass():
    """And no more than that: the first attempt and the retries share it."""

    def program(max_retries):
        tx = make()
        w = jnp.ones((4, 4))

        def run(state):
            def loss_fn(w):
                return jnp.sum(jnp.tanh(w @ w))

            return dls.value_and_scaled_grad(loss_fn, max_retries=max_retries)(
                w, state=state
            )

        return str(jax.make_jaxpr(run)(tx.init(w)))

    assert program(3).count("dot_general[") == program(None).count("dot_general[") == 3


def test_the_types_of_the_state_are_stable_through_scan_and_donation():
    tx = make(optax.sgd(0.1, momentum=0.9))
    w = jnp.zeros(2)
    xs = jnp.array([[1.0, 2.0], [64.0, 1.0], [1.0, 1.0]])

    traces: list[None] = []

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def run(w, state):
        traces.append(None)

        def body(carry, x):
            w, state, loss = step(tx, RETRIES, *carry, x)
            return (w, state), loss

        return lax.scan(body, (w, state), xs)

    state = tx.init(w)
    before = jax.tree.map(jax.typeof, state)
    (w, state), _ = run(w, state)
    (w, state), _ = run(w, state)
    assert len(traces) == 1
    assert jax.tree.map(jax.typeof, state) == before
    assert seen(state) == (2.0**9, 0, 7)


def test_half_precision_gradients_come_back_in_float32():
    """Times S they need not fit into float16; optax.apply_updates casts back."""
    tx = make()
    w = jnp.zeros(1, jnp.float16)
    _, grads, state = dls.value_and_scaled_grad(loss_fn, max_retries=RETRIES)(
        w, jnp.full(1, 64.0, jnp.float16), state=tx.init(w)
    )
    assert grads.dtype == jnp.float32
    updates, _ = tx.update(grads, state, w)
    assert updates.tolist() == [-64.0]


def test_aux_and_keys_come_out_of_the_loop():
    tx = make()
    w = jnp.zeros(1)

    def with_aux(w, key):
        return loss_fn(w, 64.0 + w), {"key": key, "weights": w}

    (loss, aux), grads, _ = dls.value_and_scaled_grad(
        with_aux, has_aux=True, max_retries=RETRIES
    )(w, jax.random.key(3), state=tx.init(w))
    assert jnp.array_equal(
        jax.random.key_data(aux["key"]), jax.random.key_data(jax.random.key(3))
    )
    assert (float(loss), float(grads[0])) == (0.0, 64.0 * START)


def test_members_of_a_population_retry_alone():
    tx = make()
    ws, xs = jnp.zeros(3), jnp.array([1.0, 8.0, 64.0])
    states = jax.vmap(tx.init)(ws)
    population_step = jax.jit(jax.vmap(functools.partial(step, tx, RETRIES)))
    ws, states, _ = population_step(ws, states, xs)
    assert ws.tolist() == [-1.0, -8.0, -64.0]
    assert dls.loss_scale(states).tolist() == [2.0**15, 2.0**12, 2.0**9]
    assert optax.tree.get(states, "total_retries").tolist() == [0, 3, 6]


@pytest.mark.parametrize("check_vma", [True, False])
def test_devices_that_share_a_scaler_retry_together(check_vma):
    tx = make()
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))

    @jax.jit
    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(P("d"), P(), P("d")),
        out_specs=(P("d"), P()),
        check_vma=check_vma,
    )
    def sharded_step(w, state, x):
        w, state, _ = step(tx, RETRIES, w, state, x)
        return w, state

    w = jnp.zeros(4)
    w, state = sharded_step(w, tx.init(w), jnp.array([1.0, 8.0, 1.0, 1.0]))
    assert w.tolist() == [-1.0, -8.0, -1.0, -1.0]
    assert seen(state) == (2.0**12, 0, 3)
    for value in jax.tree.leaves(state.scaler):
        assert len({float(shard.data) for shard in value.addressable_shards}) == 1


def test_members_that_jax_cannot_tell_apart_retry_together():
    """check_vma=False and axis_name=(): each decides alone in the update, not here."""
    rule = dls.rules.retrying(dls.rules.dynamic(init_scale=START))
    tx = dls.loss_scaling(optax.sgd(1.0), rule, axis_name=())
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))

    @jax.jit
    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=P("d"),
        out_specs=(P("d"), P("d")),
        check_vma=False,
    )
    def member_step(x):
        w, state, _ = step(tx, RETRIES, jnp.zeros_like(x), tx.init(x), x)
        return w, jnp.reshape(dls.loss_scale(state), (1,))

    w, scales = member_step(jnp.array([1.0, 8.0]))
    assert (w.tolist(), scales.tolist()) == ([-1.0, -8.0], [2.0**12, 2.0**12])


@pytest.mark.parametrize(
    "wrap",
    [
        lambda tx: optax.chain(optax.identity(), tx),
        lambda tx: optax.named_chain(("main", tx)),
    ],
)
def test_the_scaler_is_found_and_put_back_anywhere_in_a_state(wrap):
    tx = wrap(make())
    w = jnp.zeros(())
    w, state, _ = step(tx, RETRIES, w, tx.init(w), jnp.float32(8.0))
    assert float(w) == -8.0
    assert dls.loss_scale(state) == 2.0**12


class TestErrors:
    def test_a_rule_that_counts_no_retries(self):
        tx = dls.dynamic_loss_scaling(optax.sgd(1.0))
        with pytest.raises(TypeError, match="max_retries needs.*rules.retrying"):
            step(tx, 3, W, tx.init(W), W)

    @pytest.mark.parametrize("max_retries", [True, 1.5, "3"])
    def test_a_number_of_the_wrong_kind(self, max_retries):
        with pytest.raises(TypeError, match="max_retries must be a whole number"):
            dls.value_and_scaled_grad(loss_fn, max_retries=max_retries)

    @pytest.mark.parametrize(
        ("max_retries", "message"),
        [
            (-1, "at least 0, or None, got -1"),
            (227, "at most 226, got 227"),
            (2**31, "at most 226, got 2147483648"),
        ],
    )
    def test_a_number_that_is_too_small_or_too_large(self, max_retries, message):
        with pytest.raises(ValueError, match=message):
            dls.value_and_scaled_grad(loss_fn, max_retries=max_retries)


def test_as_many_retries_as_there_are_scales():
    """From the largest scale to the smallest, with a gradient that never fits."""
    tx = make(init_scale=2.0**126, max_scale=2.0**126, min_scale=2.0**-100)
    w = jnp.float32(1.0)
    grad_fn = dls.value_and_scaled_grad(lambda w: jnp.sqrt(w - 1.0), max_retries=226)
    *_, state = grad_fn(w, state=tx.init(w))  # the gradient of sqrt at 0 is inf
    assert int(optax.tree.get(state, "total_retries")) == 226


W = jnp.ones(1)
