"""Which gradients are divided by the scale, and which pass through."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_dls as dls


def rosenbrock(w):
    return jnp.sum(100.0 * (w[1:] - w[:-1] ** 2) ** 2 + (1 - w[:-1]) ** 2)


@pytest.mark.standard_promotion
@pytest.mark.parametrize(
    "inner",
    [
        optax.lbfgs(),
        optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(15)),
    ],
    ids=["lbfgs", "backtracking"],
)
def test_a_line_search_as_optax_documents_it(inner):
    def minimum(tx):
        def step(carry, _):
            w, state = carry
            value, grads = dls.value_and_scaled_grad(rosenbrock)(w, state=state)
            updates, state = tx.update(
                grads, state, w, value=value, grad=grads, value_fn=rosenbrock
            )
            return (optax.apply_updates(w, updates), state), value

        start = jnp.zeros(4)
        run = jax.jit(lambda c: jax.lax.scan(step, c, length=12))
        return run((start, tx.init(start)))[1]

    scaled = minimum(dls.static_loss_scaling(inner, 2.0**12))
    bare = minimum(dls.no_loss_scaling(inner))
    np.testing.assert_allclose(scaled, bare, rtol=1e-4)


class TestMask:
    """Leaves that are left out of check and scaling."""

    def setup_method(self):
        self.params = {"frozen": jnp.ones(2), "w": jnp.ones(2)}
        self.grads = {"frozen": jnp.array([jnp.inf, 8.0]), "w": jnp.array([8.0, 16.0])}

    @pytest.mark.parametrize(
        "mask",
        [
            {"frozen": False, "w": True},
            lambda params: {name: name == "w" for name in params},
        ],
        ids=["tree", "function"],
    )
    @pytest.mark.parametrize("jitted", [True, False])
    def test_a_frozen_leaf_does_not_hold_up_the_others(self, mask, jitted):
        labels = {"frozen": "off", "w": "on"}
        inner = optax.partition(
            {"on": optax.sgd(1.0), "off": optax.set_to_zero()}, labels
        )
        tx = dls.loss_scaling(inner, dls.rules.static(8.0), mask=mask)
        update = jax.jit(tx.update) if jitted else tx.update
        updates, state = update(self.grads, tx.init(self.params), self.params)
        np.testing.assert_array_equal(updates["w"], [-1.0, -2.0])
        np.testing.assert_array_equal(updates["frozen"], [0.0, 0.0])
        assert not dls.metrics(state)["total_skips"]

    def test_without_it_every_step_is_skipped(self):
        tx = dls.static_loss_scaling(optax.sgd(1.0), 8.0)
        _, state = tx.update(self.grads, tx.init(self.params), self.params)
        assert dls.metrics(state)["total_skips"] == 1

    def test_a_part_of_the_tree_stands_for_what_is_under_it(self):
        tree = {"state": {"a": jnp.ones(1), "b": jnp.ones(1)}, "w": jnp.ones(1)}
        tx = dls.dynamic_loss_scaling(
            optax.sgd(1.0), init_scale=8.0, mask={"state": False, "w": True}
        )
        updates, _ = tx.update(tree, tx.init(tree), tree)
        assert jax.tree.leaves(updates) == [-1.0, -1.0, -0.125]

    def test_the_rule_sees_the_others_alone(self):
        seen = []

        def update(grads_finite, loss_scale, rule_state, *, largest_gradient):
            seen.append(largest_gradient)
            return largest_gradient, rule_state

        rule = dls.rules.Rule(
            lambda: (jnp.float32(8), ()), update, needs=("largest_gradient",)
        )
        tx = dls.loss_scaling(optax.sgd(1.0), rule, mask={"frozen": False, "w": True})
        grads = {"frozen": jnp.array([4e4, 8.0]), "w": jnp.array([8.0, 16.0])}
        _, state = tx.update(grads, tx.init(self.params), self.params)
        assert dls.loss_scale(state) == 2.0

    @pytest.mark.parametrize(
        "mask", [{"w": True}, [True, False], {"w": {}, "frozen": {}}]
    )
    def test_a_mask_of_another_tree_is_refused(self, mask):
        tx = dls.loss_scaling(optax.sgd(1.0), dls.rules.static(8.0), mask=mask)
        with pytest.raises(ValueError, match="mask must be a tree of bools like the"):
            tx.update(self.grads, tx.init(self.params), self.params)


def test_state_that_travels_as_a_gradient_passes_through():
    params = {"params": jnp.ones(2), "_overwrite_with_gradient": jnp.ones(3)}
    grads = {
        "params": jnp.array([8.0, 16.0]),
        "_overwrite_with_gradient": jnp.array([jnp.inf, 2.0, 3.0]),
    }
    tx = dls.static_loss_scaling(optax.identity(), 8.0)
    updates, state = tx.update(grads, tx.init(params), params)
    assert not dls.metrics(state)["total_skips"]
    assert updates["params"].tolist() == [1.0, 2.0]
    assert updates["_overwrite_with_gradient"].tolist() == [jnp.inf, 2.0, 3.0]


@pytest.mark.standard_promotion  # optax.apply_updates adds float32 to float16
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
@pytest.mark.parametrize("check_updates", [True, False])
def test_a_skipped_step_changes_no_bit_of_a_parameter(dtype, check_updates):
    params = jnp.array([-0.0, 0.0, 1.0, -jnp.inf], dtype)
    inner = optax.scale(jnp.nan) if check_updates else optax.sgd(1.0)
    tx = dls.static_loss_scaling(inner, 8.0, check_updates=check_updates)
    grads = jnp.full(4, 1.0 if check_updates else jnp.inf, dtype)
    updates, state = tx.update(grads, tx.init(params), params)
    assert dls.metrics(state)["total_skips"] == 1
    new = optax.apply_updates(params, updates)
    bits = {jnp.float32: jnp.int32, jnp.float16: jnp.int16}[dtype]
    np.testing.assert_array_equal(new.view(bits), params.view(bits))


def test_a_population_outside_of_vmap_is_refused_and_the_cure_works():
    tx = dls.dynamic_loss_scaling(optax.sgd(1.0))
    params = jnp.zeros((2, 3))
    state = jax.vmap(tx.init)(params)
    with pytest.raises(ValueError, match=r"scales of shape \(2,\).*under jax.vmap"):
        tx.update(params, state, params)
    jax.vmap(tx.update)(params, state, params)
