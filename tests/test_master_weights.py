"""Float16 parameters with float32 values behind them."""

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_dls as dls

pytestmark = (
    pytest.mark.standard_promotion
)  # optax.apply_updates adds float32 to float16


def adam(learning_rate=1e-4):
    return dls.master_weights(dls.dynamic_loss_scaling(optax.adam(learning_rate)))


def train(tx, params, grads):
    """Steps with the given true gradients, of shape (steps, ...), in one scan."""

    def step(carry, g):
        params, state = carry
        scaled = jax.tree.map(lambda x: x * dls.loss_scale(state), g)
        updates, state = tx.update(scaled, state, params)
        return (optax.apply_updates(params, updates), state), dls.metrics(state)

    run = jax.jit(lambda carry, grads: jax.lax.scan(step, carry, grads))
    (params, state), metrics = run((params, tx.init(params)), grads)
    return params, state, metrics


def test_updates_that_round_away_add_up():
    params, grads = jnp.ones(4, jnp.float16), jnp.ones((200, 4))
    alone, *_ = train(dls.dynamic_loss_scaling(optax.adam(1e-4)), params, grads)
    assert (alone == 1).all()
    new, state, _ = train(adam(), params, grads)
    full, *_ = train(
        dls.dynamic_loss_scaling(optax.adam(1e-4)), jnp.ones(4, jnp.float32), grads
    )
    np.testing.assert_array_equal(state.master, full)
    np.testing.assert_array_equal(new, full.astype(jnp.float16))
    assert new.dtype == jnp.float16


@pytest.mark.parametrize("jitted", [True, False])
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_the_parameters_are_exactly_the_rounded_values(dtype, jitted):
    size = 100_000
    rng = np.random.default_rng(0)
    drawn = rng.normal(size=size) * 2.0 ** rng.integers(-20, 4, size)
    params = jnp.asarray(drawn, dtype)
    # Near and far, with the sign and against it, subnormal numbers and zeros among them.
    factors = rng.choice([-1, 1], size) * 2.0 ** rng.uniform(-12, 12, size)
    target = params.astype(jnp.float32) * jnp.asarray(factors, jnp.float32)
    tx = dls.master_weights(optax.sgd(1.0))

    def step(params, target):
        state = tx.init(params)
        updates, state = tx.update(state.master - target, state, params)
        return optax.apply_updates(params, updates), state.master

    new, master = (jax.jit(step) if jitted else step)(params, target)
    np.testing.assert_array_equal(new, master.astype(dtype))
    np.testing.assert_allclose(master, target, rtol=1e-3)


def test_a_skipped_step_changes_no_bit():
    params = jnp.array([-0.0, 0.0, 1.0], jnp.float16)
    good, bad = jnp.ones((1, 3)), jnp.full((1, 3), jnp.inf)
    before, old, _ = train(adam(), params, good)
    after, new, metrics = train(adam(), params, jnp.concatenate([good, bad]))
    assert metrics["total_skips"].tolist() == [0, 1]
    np.testing.assert_array_equal(after.view(jnp.int16), before.view(jnp.int16))
    np.testing.assert_array_equal(new.master, old.master)
    np.testing.assert_array_equal(
        dls.rollback_if_skipped(new, {"ema": jnp.ones(1)}, {"ema": jnp.zeros(1)})[
            "ema"
        ],
        0,
    )


def test_other_leaves_are_updated_as_they_are():
    params = {
        "half": jnp.ones(2, jnp.float16),
        "full": jnp.ones(2),
        "frozen": jnp.ones(2, jnp.float16),
        "function": jax.nn.relu,
    }
    tx = dls.master_weights(dls.static_loss_scaling(optax.sgd(1e-4), 8.0))
    state = tx.init(params)
    grads = {
        "half": jnp.full(2, 8.0, jnp.float16),
        "full": jnp.full(2, 8.0),
        "frozen": None,
        "function": None,
    }
    updates, state = tx.update(grads, state, params)
    assert updates["frozen"] is updates["function"] is None
    np.testing.assert_array_equal(updates["full"], jnp.float32(-1e-4))
    np.testing.assert_array_equal(updates["half"], 0)
    np.testing.assert_array_equal(
        state.master["half"], jnp.float32(1) - jnp.float32(1e-4)
    )
    assert state.master["full"] is state.master["function"] is None


@pytest.mark.parametrize("explicit", [True, False])
def test_values_are_laid_out_as_their_parameters(explicit):
    kind = getattr(jax.sharding.AxisType, "Explicit" if explicit else "Auto")
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    params = jax.device_put(jnp.ones(16, jnp.float16), sharding)
    tx = adam()
    with jax.set_mesh(mesh):
        state = jax.jit(tx.init)(params)
        step = jax.jit(tx.update, donate_argnums=1)
        updates, new = step(params, state, params)
    assert new.master.sharding == updates.sharding == sharding
    assert jax.tree.map(jnp.shape, new) == jax.tree.map(jnp.shape, tx.init(params))


def test_a_run_goes_on_from_a_file():
    params, grads = jnp.ones(4, jnp.float16), jnp.ones((20, 4))
    whole, *_ = train(adam(), params, grads)
    half, state, _ = train(adam(), params, grads[:10])
    data = flax.serialization.to_bytes(state)
    restored = flax.serialization.from_bytes(adam().init(half), data)
    tx = adam()
    for g in grads[10:]:
        scaled = g * dls.loss_scale(restored)
        updates, restored = tx.update(scaled, restored, half)
        half = optax.apply_updates(half, updates)
    np.testing.assert_array_equal(half, whole)


def test_members_of_a_population_decide_apart():
    tx, params = adam(), jnp.ones((2, 3), jnp.float16)
    state = jax.vmap(tx.init)(params)
    grads = jnp.array([[jnp.inf] * 3, [1.0] * 3])
    _, state = jax.vmap(tx.update)(grads, state, params)
    assert dls.metrics(state)["total_skips"].tolist() == [1, 0]
    assert (state.master[0] == 1).all() and (state.master[1] != 1).all()


class TestErrors:
    def test_no_optimizer(self):
        with pytest.raises(TypeError, match="tx must be an optax.GradientTransf"):
            dls.master_weights(optax.sgd)

    def test_no_parameters(self):
        tx = adam()
        with pytest.raises(ValueError, match="needs the parameters"):
            tx.update(jnp.ones(1), tx.init(jnp.ones(1)))
