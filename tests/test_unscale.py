"""Which gradients are divided by the scale: of every kind, and all but those left out."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_dls as dls

SCALE = 1024.0  # of what `make` makes

DTYPES = ("float16", "bfloat16", "float32", "float64")


def test_values_of_every_mix_of_parameter_and_gradient(make):
    with jax.enable_x64(True):
        tx = make(optax.sgd(0.1, momentum=0.9), init_scale=8.0)
        params = {(p, g): jnp.ones(2, p) for p in DTYPES for g in DTYPES}
        grads = {(p, g): jnp.array([8.0, 4.0], g) for p, g in params}
        state = tx.init(params)
        update = jax.jit(tx.update)
        updates, _ = update(grads, state, params)
        for leaf in updates.values():
            np.testing.assert_allclose(leaf, [-0.1, -0.05], rtol=1e-6)
        for mix, leaf in grads.items():  # an overflow in any one of them skips all
            bad = {**grads, mix: leaf.at[1].set(jnp.inf)}
            updates, skipped = update(bad, state, params)
            assert not any(leaf.any() for leaf in updates.values())
            chex.assert_trees_all_equal(skipped.inner_state, state.inner_state)
            assert float(dls.loss_scale(skipped)) == 4.0


def test_a_gradient_too_large_for_its_view_is_an_overflow(make):
    with jax.enable_x64(True):
        tx = make(init_scale=1.0)
        params = jnp.ones(1, jnp.float32)
        updates, state = tx.update(jnp.array([1e100]), tx.init(params), params)
        assert updates.dtype == jnp.float32
        assert float(updates[0]) == 0.0
        assert float(dls.loss_scale(state)) == 0.5


def test_complex_gradients_keep_both_parts(make):
    tx = make(init_scale=8.0)
    params = jnp.ones(2, jnp.complex64)
    state = tx.init(params)
    updates, _ = tx.update(jnp.array([8 + 16j, 4j], jnp.complex64), state, params)
    np.testing.assert_array_equal(updates, np.array([-1 - 2j, -0.5j]))
    for bad in (complex(jnp.inf, 0), complex(0, jnp.nan)):
        updates, skipped = tx.update(jnp.array([1, bad], jnp.complex64), state, params)
        np.testing.assert_array_equal(updates, np.zeros(2))
        assert float(dls.loss_scale(skipped)) == 4.0


def test_a_complex_gradient_of_a_real_parameter_is_refused(make):
    tx = make()
    params = {"w": jnp.ones(1)}
    grads = {"w": jnp.ones(1, jnp.complex64)}
    with pytest.raises(TypeError, match=r"grads\['w'\] has dtype complex64.*real"):
        tx.update(grads, tx.init(params), params)


@pytest.mark.standard_promotion
def test_float0_and_integer_leaves_neither_vote_nor_break(make):
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
    assert jax.tree.map(jax.typeof, new_state) == jax.tree.map(jax.typeof, state)
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
def test_nothing_to_do_is_a_finite_step(make, params, grads):
    tx = make(growth_interval=1)
    updates, state = jax.jit(tx.update)(grads, tx.init(params), params)
    assert jax.tree.structure(updates) == jax.tree.structure(grads)  # type: ignore[operator]
    assert bool(state.scaler.grads_finite)
    assert float(dls.loss_scale(state)) == 2 * SCALE


def test_a_none_gradient_reaches_the_inner_optimizer(make):
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


def test_a_none_may_stand_for_a_whole_subtree_of_parameters(make):
    tx = make(optax.identity())
    params = {"a": jnp.ones(1), "b": {"c": jnp.ones(1)}}
    updates, _ = tx.update({"a": jnp.ones(1), "b": None}, tx.init(params), params)
    assert updates["b"] is None


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
def test_gradients_of_another_tree_are_refused_by_path(make, grads, named):
    tx = make()
    params = {"a": jnp.ones(1), "b": {"c": jnp.ones(1)}}
    with pytest.raises(ValueError, match=named):
        tx.update(grads, tx.init(params), params)


def test_other_containers_are_refused(make):
    tx = make()
    with pytest.raises(ValueError, match="but not their containers"):
        tx.update([jnp.ones(1)], tx.init([jnp.ones(1)]), (jnp.ones(1),))


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
        with pytest.raises(ValueError, match="mask must be a tree like the gradients"):
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


class TestUnscaledTwice:
    """What ``unscale`` gave is for logging; to divide it once more would stop training."""

    @pytest.mark.parametrize("jitted", [True, False])
    @pytest.mark.parametrize("name", ["grads", "grad"])
    def test_is_refused(self, name, jitted):
        tx = dls.static_loss_scaling(optax.sgd(1.0), 8.0)
        params = {"w": jnp.ones(2)}

        def step(grads, state):
            true = dls.unscale(grads, state)
            first = true if name == "grads" else grads
            return tx.update(first, state, params, grad=true)

        step = jax.jit(step) if jitted else step
        with pytest.raises(
            ValueError, match=rf"^{name}\['w'\] is what optax_dls.unscale"
        ):
            step(params, tx.init(params))

    def test_the_scaled_ones_are_fine_afterwards(self):
        tx = dls.static_loss_scaling(optax.sgd(1.0), 8.0)
        grads = {"w": jnp.ones(2), "none": None}
        state = tx.init(grads)
        dls.unscale(grads, state)
        tx.update(grads, state, grads)

    def test_without_scaling_there_is_no_difference(self):
        tx = dls.no_loss_scaling(optax.sgd(1.0))
        state = tx.init(jnp.ones(2))
        tx.update(dls.unscale(jnp.ones(2), state), state)
