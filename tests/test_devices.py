"""One decision on every device: each way that JAX has of using several.

Every mode trains the same small network on the same batches, eight rows at a time, one
row a device. An entry of step 3 is inf, in a row that a single device holds. All modes
must skip that step on all devices and end where the run on one device ends
(https://github.com/keras-team/keras/issues/18666).
"""

import collections
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_dls as dls
from optax_dls._devices import to_varying

pytestmark = pytest.mark.standard_promotion

STEPS, BAD_STEP = 8, 3
tx = dls.dynamic_loss_scaling(optax.adam(1e-2), init_scale=1024.0, growth_interval=2)


def mesh_of(kind=AxisType.Auto, **axes):
    return jax.make_mesh(
        tuple(axes.values()), tuple(axes), axis_types=(kind,) * len(axes)
    )


def problem():
    rng = np.random.default_rng(0)
    batches = rng.normal(size=(STEPS, 8, 16)).astype(np.float32)
    batches[BAD_STEP, 5, 2] = np.inf
    params = {
        "in": rng.normal(size=(16, 8)).astype(np.float32) / 4,
        "out": rng.normal(size=(8, 16)).astype(np.float32) / 3,
    }
    return params, batches


def loss_fn(params, x):
    return jnp.mean((jnp.tanh(x @ params["in"]) @ params["out"] - x) ** 2)


def step(params, state, x):
    _, grads = dls.value_and_scaled_grad(loss_fn)(params, x, state=state)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def train(step, params, state, batches):
    scales = []
    for x in batches:
        params, state = step(params, state, x)
        scales.append(np.asarray(dls.loss_scale(state)).max().item())
    return params, state, scales


@functools.cache
def on_one_device():
    params, batches = problem()
    params = jax.tree.map(jnp.asarray, params)
    return train(jax.jit(step), params, tx.init(params), batches)


def assert_equals_one_device(params, state, scales):
    expected_params, expected_state, expected_scales = on_one_device()
    assert scales == expected_scales == [1024, 2048, 2048, 1024, 1024, 2048, 2048, 4096]
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6),
        (params, state.inner_state),
        (expected_params, expected_state.inner_state),
    )
    for value, expected in zip(
        jax.tree.leaves(state.scaler),
        jax.tree.leaves(expected_state.scaler),
        strict=True,
    ):
        for shard in value.addressable_shards:
            np.testing.assert_array_equal(shard.data, expected)


LAYOUTS = {  # axes of the mesh, and the specs of both parameters and of the batch
    "data parallel": ({"d": 8}, P(), P(), P("d")),
    "fully sharded": ({"d": 8}, P("d"), P("d"), P("d")),
    "tensor parallel": ({"d": 8}, P(None, "d"), P("d"), P()),
    "two axes": ({"d": 4, "m": 2}, P(None, "m"), P("m"), P("d")),
}


def state_specs(param_specs):
    """Specs of the optimizer state: like the parameters, the rest replicated."""
    shapes = jax.eval_shape(tx.init, jax.tree.map(jnp.asarray, problem()[0]))
    return optax.tree.map_params(
        tx,
        lambda _, spec: spec,
        shapes,
        param_specs,
        transform_non_params=lambda _: P(),
    )


def place(mesh, specs, tree):
    return jax.tree.map(
        lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), tree, specs
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_jit_on_an_auto_mesh(layout):
    axes, in_spec, out_spec, batch_spec = LAYOUTS[layout]
    mesh = mesh_of(**axes)
    specs = {"in": in_spec, "out": out_spec}
    params, batches = problem()
    params = place(mesh, specs, params)
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), state_specs(specs))
    state = jax.jit(tx.init, out_shardings=shardings)(params)
    before = jax.tree.map(lambda x: x.sharding, (params, state))

    batches = [jax.device_put(x, NamedSharding(mesh, batch_spec)) for x in batches]
    donated = jax.jit(step, donate_argnums=(0, 1))
    params, state, scales = train(donated, params, state, batches)

    assert_equals_one_device(params, state, scales)
    assert jax.tree.map(lambda x: x.sharding, (params, state)) == before


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("jitted_update", [True, False])
def test_explicit_mesh(layout, jitted_update):
    axes, in_spec, out_spec, batch_spec = LAYOUTS[layout]
    mesh = mesh_of(AxisType.Explicit, **axes)
    with jax.set_mesh(mesh):
        params, batches = problem()
        params = place(mesh, {"in": in_spec, "out": out_spec}, params)

        def explicit_loss(params, x):
            if layout == "fully sharded":
                params = jax.tree.map(lambda p: jax.sharding.reshard(p, P()), params)
            hidden = jnp.tanh(jnp.dot(x, params["in"]))
            y = jnp.dot(hidden, params["out"], out_sharding=batch_spec)
            return jnp.mean((y - x) ** 2)

        @jax.jit
        def grad_step(params, state, x):
            return dls.value_and_scaled_grad(explicit_loss)(params, x, state=state)[1]

        update = jax.jit(tx.update) if jitted_update else tx.update

        def explicit_step(params, state, x):
            grads = grad_step(params, state, x)
            updates, state = update(grads, state, params)
            return optax.apply_updates(params, updates), state

        state = tx.init(params)
        types = jax.tree.map(jax.typeof, state)
        batches = [jax.device_put(x, NamedSharding(mesh, batch_spec)) for x in batches]
        params, state, scales = train(explicit_step, params, state, batches)
        assert_equals_one_device(params, state, scales)
        assert jax.tree.map(jax.typeof, state) == types


def test_a_leaf_that_is_made_with_another_sharding_keeps_its_own():
    """As in adafactor of Optax 0.2.6, whose statistics begin replicated."""
    last_gradient = optax.GradientTransformation(
        lambda params: jnp.zeros(params.shape), lambda grads, *_: (grads, grads)
    )
    tx = dls.dynamic_loss_scaling(last_gradient, init_scale=SCALE)
    with jax.set_mesh(mesh_of(AxisType.Explicit, d=2)):
        params = jax.device_put(jnp.ones(4), P("d"))
        state = tx.init(params)
        _, new_state = jax.jit(tx.update)(params * SCALE, state, params)
        assert jax.tree.map(jax.typeof, new_state) == jax.tree.map(jax.typeof, state)
        np.testing.assert_array_equal(new_state.inner_state, np.ones(4))


def mean_loss(params, x):
    """The mean over the devices, inside the differentiated function."""
    return lax.pmean(loss_fn(params, x), "d")


def mapped_step(params, state, x):
    """Each device has its rows; the mean over devices makes the gradient."""
    varying = jax.tree.map(lambda p: to_varying(p, frozenset("d")), params)
    _, grads = dls.value_and_scaled_grad(loss_fn)(varying, x, state=state)
    grads = lax.pmean(grads, "d")
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def sharded_step(params, state, x):
    """Each device owns rows of the parameters, their gradients and their moments."""

    def loss(shards, x):
        whole = jax.tree.map(lambda p: lax.all_gather(p, "d", tiled=True), shards)
        return loss_fn(whole, x) / lax.axis_size("d")

    _, grads = dls.value_and_scaled_grad(loss)(params, x, state=state)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def shard_mapped(step, mesh, param_spec, check_vma, **options):
    specs = state_specs({"in": param_spec, "out": param_spec})
    return jax.jit(
        jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(param_spec, specs, P("d")),
            out_specs=(param_spec, specs),
            check_vma=check_vma,
            **options,
        )
    )


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("sharded", [True, False])
def test_shard_map(sharded, check_vma):
    param_spec = P("d") if sharded else P()
    step = shard_mapped(
        sharded_step if sharded else mapped_step, mesh_of(d=8), param_spec, check_vma
    )
    params, batches = problem()
    state = tx.init(jax.tree.map(jnp.asarray, params))
    assert_equals_one_device(*train(step, params, state, batches))


def test_shard_map_over_one_axis_with_the_other_automatic():
    mesh = mesh_of(d=4, m=2)
    step = shard_mapped(mapped_step, mesh, P(), True, axis_names={"d"})
    params, batches = problem()
    params = place(mesh, {"in": P(None, "m"), "out": P("m")}, params)
    params, state, scales = train(step, params, jax.jit(tx.init)(params), batches)
    assert_equals_one_device(params, state, scales)


def test_updates_that_vary_in_a_partly_manual_shard_map():
    @jax.jit
    @functools.partial(
        jax.shard_map,
        mesh=mesh_of(d=4, m=2),
        in_specs=P("d"),
        out_specs=P("d"),
        axis_names={"d"},
    )
    def update(grads):
        return one_update(sgd, grads, sgd.init(grads))[1]

    assert update(jnp.ones(4) * SCALE).tolist() == [-1.0] * 4
    assert update(GRADS).tolist() == [0.0] * 4


def test_pmap():
    params, batches = problem()
    state = tx.init(jax.tree.map(jnp.asarray, params))
    step = jax.pmap(mapped_step, axis_name="d", in_axes=(None, None, 0), out_axes=None)
    assert_equals_one_device(*train(step, params, state, batches[:, :, None]))


SCALE = 1024.0
sgd = dls.dynamic_loss_scaling(optax.sgd(1.0), init_scale=SCALE)
# Member 1 of 4 overflows; the others have the gradient 1.
GRADS = jnp.array([1.0, jnp.inf, 1.0, 1.0]) * SCALE
ALONE = ([SCALE, SCALE / 2, SCALE, SCALE], [-1.0, 0.0, -1.0, -1.0])
TOGETHER = ([SCALE / 2] * 4, [0.0] * 4)


def members(update, axis="d", **options):
    """Scale and update of each of four devices, one gradient each."""
    return jax.jit(
        jax.shard_map(
            update,
            mesh=mesh_of(**{axis: 4}),
            out_specs=(P(axis), P(axis)),
            **options,
        )
    )


def one_update(tx, grads, state):
    updates, state = tx.update(grads, state, jnp.zeros_like(grads))
    return jnp.reshape(dls.loss_scale(state), (-1,)), updates


class TestPopulation:
    """One model and one scaler per device: members decide alone where JAX can tell."""

    @pytest.mark.parametrize("check_vma", [True, False])
    def test_scalers_passed_in_sharded(self, check_vma):
        states = jax.vmap(sgd.init)(jnp.zeros((4, 1)))

        def update(grads, states):
            # Untracked, JAX cannot tell that the scalers differ: they have to say so.
            tx = sgd if check_vma else population
            state = jax.tree.map(lambda x: jnp.squeeze(x, 0), states)
            return one_update(tx, grads, state)

        population = dls.dynamic_loss_scaling(
            optax.sgd(1.0), init_scale=SCALE, axis_name=()
        )
        step = members(update, in_specs=(P("d"), P("d")), check_vma=check_vma)
        scales, updates = step(GRADS, states)
        assert (scales.tolist(), updates.tolist()) == ALONE

    def test_scalers_made_varying(self):
        def update(grads):
            state = jax.tree.map(
                lambda x: to_varying(x, frozenset("d")), sgd.init(grads[:0])
            )
            return one_update(sgd, grads, state)

        scales, updates = members(update, in_specs=P("d"))(GRADS)
        assert (scales.tolist(), updates.tolist()) == ALONE

    def test_scalers_made_inside_are_shared(self):
        """A scaler that starts equal on all devices is one scaler."""
        for check_vma in (True, False):
            step = members(
                lambda grads: one_update(sgd, grads, sgd.init(grads)),
                in_specs=P("d"),
                check_vma=check_vma,
            )
            scales, updates = step(GRADS)
            assert (scales.tolist(), updates.tolist()) == TOGETHER

    def test_pmap(self):
        for axis_name, expected in ((None, TOGETHER), ((), ALONE)):
            tx = dls.dynamic_loss_scaling(
                optax.sgd(1.0), init_scale=SCALE, axis_name=axis_name
            )
            step = jax.pmap(lambda g: one_update(tx, g, tx.init(g)))  # noqa: B023
            scales, updates = step(GRADS[:, None])
            assert (scales.ravel().tolist(), updates.ravel().tolist()) == expected

    @pytest.mark.parametrize("check_vma", [True, False])
    def test_vmap_inside_shard_map_decides_by_member_over_all_devices(self, check_vma):
        """Two members, each on all four devices: each has one decision of its own."""
        grads = jnp.ones((2, 4)).at[1, 2].set(jnp.inf) * SCALE
        states = jax.vmap(sgd.init)(jnp.zeros((2, 4)))

        @jax.jit
        @functools.partial(
            jax.shard_map,
            mesh=mesh_of(d=4),
            in_specs=(P(None, "d"), P()),
            out_specs=(P(), P(None, "d")),
            check_vma=check_vma,
        )
        def step(grads, states):
            updates, states = jax.vmap(sgd.update)(grads, states)
            return dls.loss_scale(states), updates

        scales, updates = step(grads, states)
        assert scales.tolist() == [SCALE, SCALE / 2]
        np.testing.assert_array_equal(updates, [[-1.0] * 4, [0.0] * 4])

    def test_vmap_inside_jit_on_a_mesh(self):
        grads = jnp.ones((2, 8)).at[1, 6].set(jnp.inf) * SCALE
        grads = jax.device_put(grads, NamedSharding(mesh_of(d=8), P(None, "d")))
        states = jax.vmap(sgd.init)(jnp.zeros((2, 8)))
        updates, states = jax.jit(jax.vmap(sgd.update))(grads, states)
        assert dls.loss_scale(states).tolist() == [SCALE, SCALE / 2]
        np.testing.assert_array_equal(updates, [[-1.0] * 8, [0.0] * 8])

    @pytest.mark.parametrize("spec", [P(), P("d")])
    def test_vmap_inside_jit_on_an_explicit_mesh(self, spec):
        """Leaves may be sharded by member, or not at all."""
        with jax.set_mesh(mesh_of(AxisType.Explicit, d=2)):
            grads = jnp.ones((2, 8)).at[1, 6].set(jnp.inf) * SCALE
            states = jax.vmap(sgd.init)(jnp.zeros((2, 8)))
            grads, states = jax.device_put((grads, states), spec)
            updates, states = jax.jit(jax.vmap(sgd.update))(grads, states)
        assert dls.loss_scale(states).tolist() == [SCALE, SCALE / 2]
        np.testing.assert_array_equal(updates, [[-1.0] * 8, [0.0] * 8])

    def test_vmap_on_an_explicit_mesh_cannot_shard_within_a_member(self):
        """A limit of JAX, in any lax.cond. When it is lifted, the README can say so."""
        with jax.set_mesh(mesh_of(AxisType.Explicit, d=2)):
            grads = jax.device_put(jnp.ones((2, 8)), P(None, "d"))
            states = jax.vmap(sgd.init)(jnp.zeros((2, 8)))
            with pytest.raises(Exception, match="select `which` must be scalar"):
                jax.jit(jax.vmap(sgd.update))(grads, states)
            which = jnp.array([True, False])
            with pytest.raises(Exception, match="select `which` must be scalar"):
                jax.vmap(lambda w, x: lax.cond(w, jnp.sin, jnp.cos, x))(which, grads)

    def test_vmap_inside_pmap(self):
        grads = jnp.ones((4, 2, 1)).at[3, 1].set(jnp.inf) * SCALE
        step = jax.pmap(
            lambda g: jax.vmap(lambda g: one_update(sgd, g, sgd.init(g)))(g)
        )
        scales, updates = step(grads)
        np.testing.assert_array_equal(scales[..., 0], [[SCALE, SCALE / 2]] * 4)
        np.testing.assert_array_equal(updates[..., 0], [[-1.0, 0.0]] * 4)


class TestAxisName:
    def test_adds_an_axis_that_the_scaler_varies_over(self):
        tx = dls.dynamic_loss_scaling(optax.sgd(1.0), init_scale=SCALE, axis_name="d")

        def update(grads):
            state = jax.tree.map(
                lambda x: to_varying(x, frozenset("d")), tx.init(grads[:0])
            )
            return one_update(tx, grads, state)

        scales, updates = members(update, in_specs=P("d"))(GRADS)
        assert (scales.tolist(), updates.tolist()) == TOGETHER

    def test_keeps_the_types_of_a_scaler_that_varies(self):
        tx = dls.dynamic_loss_scaling(optax.sgd(1.0), init_scale=SCALE, axis_name="d")

        def update(grads):
            state = jax.tree.map(
                lambda x: to_varying(x, frozenset("d")), tx.init(grads[:0])
            )
            state, updates = lax.scan(
                lambda state, _: tx.update(grads, state)[::-1], state, length=2
            )
            return jnp.reshape(dls.loss_scale(state), (-1,)), updates[0]

        scales, updates = members(update, in_specs=P("d"))(GRADS)
        assert (scales.tolist(), updates.tolist()) == ([SCALE / 4] * 4, [0.0] * 4)

    def test_costs_nothing_where_nothing_varies(self):
        tx = dls.dynamic_loss_scaling(
            optax.sgd(1.0), init_scale=SCALE, axis_name=("d",)
        )
        step = members(
            lambda grads: one_update(tx, grads, tx.init(grads)), in_specs=P()
        )
        assert "pmin" not in str(jax.make_jaxpr(step)(GRADS))

    def test_an_axis_that_is_not_there_is_named(self):
        tx = dls.dynamic_loss_scaling(optax.sgd(1.0), axis_name="nowhere")
        message = "axis_name='nowhere' is no mapped axis where tx.update is called"
        with pytest.raises(NameError, match=message):
            tx.update(jnp.ones(1), tx.init(jnp.zeros(1)))
        for check_vma in (True, False):
            step = members(
                lambda grads: one_update(tx, grads, tx.init(grads)),
                in_specs=P("d"),
                check_vma=check_vma,
            )
            with pytest.raises(NameError, match=message):
                step(GRADS)


def test_a_forgotten_mean_is_named():
    """The state would drift apart, which JAX sees in the types under check_vma."""
    adam = dls.dynamic_loss_scaling(optax.adam(1.0), init_scale=SCALE)
    step = jax.shard_map(
        lambda grads, state: adam.update(grads, state)[0],
        mesh=mesh_of(d=4),
        in_specs=(P("d"), P()),
        out_specs=P("d"),
    )
    message = r"inner.update made its state\[0\]\.mu vary over the mesh axes \['d'\].*"
    with pytest.raises(ValueError, match=message + r"jax.lax.pmean\(grads, \('d',\)\)"):
        step(GRADS, adam.init(GRADS[:1]))


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_refused_update_of_one_device_is_refused_on_all(check_vma):
    """check_updates: the optimizer itself makes an inf, on device 2 alone."""
    tx = dls.dynamic_loss_scaling(
        optax.stateless_with_tree_map(lambda u, _: jnp.where(u == 3.0, jnp.inf, -u)),
        init_scale=SCALE,
        check_updates=True,
    )
    step = members(
        lambda grads: one_update(tx, grads, tx.init(grads)),
        in_specs=P("d"),
        check_vma=check_vma,
    )
    scales, updates = step(jnp.array([1.0, 2.0, 3.0, 4.0]) * SCALE)
    assert (scales.tolist(), updates.tolist()) == ([SCALE] * 4, [0.0] * 4)
    scales, updates = step(jnp.array([1.0, 2.0, 5.0, 4.0]) * SCALE)
    assert (scales.tolist(), updates.tolist()) == (
        [SCALE] * 4,
        [-1.0, -2.0, -5.0, -4.0],
    )


def collectives(step, *arguments):
    """How many collective operations the compiled program has, by kind."""
    program = jax.jit(step).lower(*arguments).compile().as_text()
    kinds = "all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute"
    return collections.Counter(re.findall(rf"= \S.* ({kinds})(?:-start)?\(", program))


def added_collectives(wrap, leaves):
    """Collectives of the wrapped update less those of the bare one."""
    counts = [collectives(*wrap(tx, leaves)) for tx in (sgd, optax.sgd(1.0))]
    return dict(counts[0] - counts[1])


def jit_update(tx, params):
    state = tx.init(params)
    return lambda g, s, p: tx.update(g, s, p)[0], params, state, params


def shard_map_update(tx, params, *, check_vma, reduced):
    spec = P() if reduced else P("d")

    def update(grads, state, params):
        if reduced:
            grads = lax.pmean(grads, "d")
        return tx.update(grads, state, params)[0]

    mapped = jax.shard_map(
        update,
        mesh=mesh_of(d=8),
        in_specs=(P("d"), P(), spec),
        out_specs=spec,
        check_vma=check_vma,
    )
    return mapped, params, tx.init(params), params


class TestCost:
    """What the wrapper adds to the bare optimizer, whatever the number of leaves."""

    def leaves(self, number, spec):
        sharding = NamedSharding(mesh_of(d=8), spec)
        return [jax.device_put(jnp.ones(8), sharding)] * number

    @pytest.mark.parametrize("number", [1, 50, 300])
    def test_none_under_jit_where_gradients_are_replicated(self, number):
        assert added_collectives(jit_update, self.leaves(number, P())) == {}

    @pytest.mark.parametrize(("number", "added"), [(1, 1), (50, 1), (300, 2)])
    def test_one_reduction_of_flags_under_jit_where_they_are_sharded(
        self, number, added
    ):
        """XLA combines the flags of up to 256 leaves into one operation."""
        leaves = self.leaves(number, P("d"))
        assert added_collectives(jit_update, leaves) == {"all-reduce": added}

    def test_one_reduction_for_300_leaves_whose_sharding_is_in_their_type(self):
        mesh = mesh_of(AxisType.Explicit, d=8)
        leaves = [jax.device_put(jnp.ones(8), NamedSharding(mesh, P("d")))] * 300
        assert added_collectives(jit_update, leaves) == {"all-reduce": 1}

    @pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
    def test_leaves_of_one_shape_that_are_laid_out_differently_stay_in_place(
        self, kind
    ):
        mesh = mesh_of(kind, d=8)
        leaves = [
            jax.device_put(jnp.ones((8, 8)), NamedSharding(mesh, spec))
            for spec in (P("d"), P(None, "d"), P()) * 4
        ]
        added = added_collectives(jit_update, leaves)
        assert set(added) == {"all-reduce"}

    @pytest.mark.parametrize(
        ("specs", "added"),
        [([P("d", "m")], 2), ([P("d"), P("m")], 2), ([P("d"), P(("d", "m"))], 2)],
    )
    def test_one_reduction_for_each_set_of_axes_under_jit(self, specs, added):
        mesh = mesh_of(d=4, m=2)
        leaves = [
            jax.device_put(jnp.ones((8, 2)), NamedSharding(mesh, spec))
            for spec in specs
        ]
        assert added_collectives(jit_update, leaves) == {"all-reduce": added}

    def test_one_scalar_in_pmap(self):
        def program(tx):
            state = tx.init(jnp.ones(1))
            return str(
                jax.make_jaxpr(jax.pmap(lambda g: tx.update(g, state)[0]))(GRADS)
            )

        assert program(sgd).count("pmin") == 1
        assert program(optax.sgd(1.0)).count("pmin") == 0

    @pytest.mark.parametrize("number", [1, 50])
    @pytest.mark.parametrize(
        ("check_vma", "reduced", "added"),
        [
            (True, True, {}),
            (True, False, {"all-reduce": 1}),
            (False, True, {"all-reduce": 1}),  # JAX does not know that it is reduced
            (False, False, {"all-reduce": 1}),
        ],
    )
    def test_one_scalar_in_shard_map(self, number, check_vma, reduced, added):
        wrap = functools.partial(shard_map_update, check_vma=check_vma, reduced=reduced)
        assert added_collectives(wrap, self.leaves(number, P())) == added

    def test_one_scalar_in_shard_map_for_300_leaves(self):
        wrap = functools.partial(shard_map_update, check_vma=True, reduced=False)
        assert added_collectives(wrap, self.leaves(300, P())) == {"all-reduce": 1}

    @pytest.mark.parametrize("check_vma", [True, False])
    def test_no_collective_sits_in_a_branch(self, check_vma):
        mapped, *arguments = shard_map_update(
            sgd, self.leaves(2, P()), check_vma=check_vma, reduced=False
        )
        program = str(jax.make_jaxpr(mapped)(*arguments))
        before_cond, cond = program.split("cond[", 1)
        assert "pmin" in before_cond
        assert "pmin" not in cond
        assert "psum" not in cond


class TestBugReports:
    """Reports of other libraries: see test_bug_reports.py."""

    @pytest.mark.parametrize("check_vma", [True, False])
    def test_one_bad_or_empty_shard_speaks_for_all(self, check_vma):
        """https://github.com/pytorch/pytorch/pull/115710
        https://github.com/pytorch/pytorch/issues/99174
        """

        def update(w):
            params = {"w": w, "empty": w[:0]}
            grads = jax.tree.map(lambda p: p * SCALE, params)
            scales, updates = one_update(sgd, grads["w"], sgd.init(w[:0]))
            _, tree_updates = one_update_of_tree(grads, params)
            return scales, updates + tree_updates["w"]

        def one_update_of_tree(grads, params):
            updates, state = sgd.update(grads, sgd.init(params), params)
            return state, updates

        step = members(update, in_specs=P("d"), check_vma=check_vma)
        scales, updates = step(jnp.ones(8).at[2].set(jnp.inf))
        assert scales.tolist() == [SCALE / 2] * 4
        np.testing.assert_array_equal(updates, np.zeros(8))

    def test_the_scale_is_one_at_all_times_while_accumulating(self):
        """https://github.com/NVIDIA/apex/issues/237"""
        inner = optax.MultiSteps(optax.sgd(0.1), 4).gradient_transformation()
        tx = dls.dynamic_loss_scaling(inner, init_scale=SCALE, growth_interval=3)
        bad = jax.random.bernoulli(jax.random.key(0), 0.1, (100, 4))

        def run(bad):
            def step(carry, bad):
                params, state = carry
                # Not averaged: the devices that see no inf have to be told of it.
                grads = jnp.where(bad[0], jnp.inf, dls.loss_scale(state))
                updates, state = tx.update(grads, state, params)
                params = optax.apply_updates(params, updates)
                return (params, state), (dls.loss_scale(state), params)

            start = jnp.zeros(())
            _, seen = lax.scan(step, (start, tx.init(start)), bad)
            return jax.tree.map(lambda x: x[:, None], seen)

        scales, params = jax.jit(
            jax.shard_map(
                run,
                mesh=mesh_of(d=4),
                in_specs=P(None, "d"),
                out_specs=P(None, "d"),
                check_vma=False,
            )
        )(bad)
        assert np.ptp(scales, axis=1).max() == np.ptp(params, axis=1).max() == 0
        assert len(set(scales[:, 0].tolist())) > 3
        assert np.all(np.isfinite(params))

    @pytest.mark.parametrize("check_vma", [True, False])
    def test_a_collective_in_the_optimizer_does_not_hang(self, check_vma):
        """https://github.com/hpcaitech/ColossalAI/pull/1175"""
        tx = dls.dynamic_loss_scaling(
            optax.chain(
                optax.stateless_with_tree_map(lambda u, _: lax.pmean(u, "d")),
                optax.sgd(1.0),
            ),
            init_scale=SCALE,
        )
        step = members(
            lambda grads: one_update(tx, grads, tx.init(grads)),
            in_specs=P("d"),
            check_vma=check_vma,
        )
        scales, updates = step(GRADS)
        assert (scales.tolist(), updates.tolist()) == TOGETHER

    def test_nor_does_a_check_of_updates_in_a_population(self):
        """https://github.com/hpcaitech/ColossalAI/pull/1175

        Two members of two devices each: one member skips and the other does not, and
        the one that does not reduces the flag of its updates inside the branch.
        """
        tx = dls.dynamic_loss_scaling(
            optax.sgd(1.0), init_scale=SCALE, check_updates=True
        )

        @jax.jit
        @functools.partial(
            jax.shard_map,
            mesh=mesh_of(member=2, d=2),
            in_specs=(P("member", "d"), P("member")),
            out_specs=(P("member"), P("member", "d")),
        )
        def step(grads, state):
            state = jax.tree.map(lambda x: jnp.squeeze(x, 0), state)
            return one_update(tx, grads, state)

        states = jax.vmap(tx.init)(jnp.zeros((2, 1)))
        scales, updates = step(jnp.array([[SCALE, SCALE], [SCALE, jnp.inf]]), states)
        assert scales.tolist() == [SCALE, SCALE / 2]
        np.testing.assert_array_equal(updates, [[-1, -1], [0, 0]])

    @pytest.mark.parametrize("check_vma", [True, False])
    def test_two_forms_of_a_right_mean_in_shard_map(self, check_vma):
        """https://github.com/jax-ml/jax/issues/36886"""

        def of_the_gradient(p, x, state):
            varying = to_varying(p, frozenset("d"))
            _, grads = dls.value_and_scaled_grad(lambda p: p * x[0])(
                varying, state=state
            )
            return lax.pmean(grads, "d")

        def of_the_loss(p, x, state):
            loss_fn = dls.value_and_scaled_grad(lambda p: lax.pmean(p * x[0], "d"))
            return loss_fn(p, state=state)[1]

        forms = [of_the_gradient] + [of_the_loss] * check_vma
        for form in forms:
            state = sgd.init(jnp.zeros(()))
            grads = jax.jit(
                jax.shard_map(
                    form,
                    mesh=mesh_of(d=4),
                    in_specs=(P(), P("d"), P()),
                    out_specs=P(),
                    check_vma=check_vma,
                )
            )(jnp.float32(1.0), jnp.arange(1.0, 5.0), state)
            updates, _ = sgd.update(grads, state)
            assert float(updates) == -2.5


class TestLargestGradient:
    """A rule that asks for it gets the largest of all devices that share the scale."""

    rule = dls.rules.Rule(
        lambda: (jnp.float32(2), jnp.float32(0)),
        lambda finite, scale, state, *, largest_gradient: (scale, largest_gradient),
        needs=("largest_gradient",),
    )
    tx = dls.loss_scaling(optax.sgd(1.0), rule)
    grads = np.array(
        [[1, -2], [3, 4], [5, 6], [-70, 8], [np.inf, 10], [0, 0], [0, 0], [0, 0]],
        np.float32,
    )

    def largest(self, grads, state, params=None):
        return self.tx.update(grads, state, params)[1].scaler.rule_state

    @pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
    def test_under_jit(self, kind):
        sharding = NamedSharding(mesh_of(kind, d=8), P("d"))
        grads = jax.device_put(self.grads, sharding)
        state = self.tx.init(grads)
        assert float(jax.jit(self.largest)(grads, state, grads)) == 35.0

    @pytest.mark.parametrize("check_vma", [True, False])
    def test_in_shard_map_with_a_shared_scaler(self, check_vma):
        state = self.tx.init(jnp.zeros(2))

        @jax.jit
        @functools.partial(
            jax.shard_map,
            mesh=mesh_of(d=8),
            in_specs=(P("d"), P()),
            out_specs=P(),
            check_vma=check_vma,
        )
        def step(grads, state):
            return self.largest(grads, state)

        assert float(step(self.grads, state)) == 35.0

    def test_in_shard_map_with_a_scaler_for_each_member(self):
        states = jax.vmap(self.tx.init)(jnp.zeros((8, 2)))

        @jax.jit
        @functools.partial(
            jax.shard_map, mesh=mesh_of(d=8), in_specs=P("d"), out_specs=P("d")
        )
        def step(grads, states):
            state = jax.tree.map(lambda x: x[0], states)
            return self.largest(grads[0], state)[None]

        expected = [1, 2, 3, 35, 5, 0, 0, 0]
        np.testing.assert_array_equal(step(self.grads, states), expected)

    def test_under_pmap(self):
        states = jax.vmap(self.tx.init)(jnp.zeros((8, 2)))
        step = jax.pmap(self.largest, axis_name="d")
        np.testing.assert_array_equal(step(self.grads, states), [35.0] * 8)

    def test_under_vmap(self):
        states = jax.vmap(self.tx.init)(jnp.zeros((8, 2)))
        expected = [1, 2, 3, 35, 5, 0, 0, 0]
        largest = jax.jit(jax.vmap(self.largest))(self.grads, states)
        np.testing.assert_array_equal(largest, expected)

    @pytest.mark.parametrize(
        "rule",
        [
            dls.rules.log_normal(init_scale=2.0**20),
            dls.rules.dynamic(gradient_limit=65504.0, growth_interval=2),
            dls.rules.dynamic(hysteresis=2, growth_interval=2),
            dls.rules.overflow_rate(tolerance=0.3, growth_interval=2),
            dls.rules.gradual(growth_interval=2),
        ],
        ids=["log-normal", "gradient limit", "hysteresis", "overflow rate", "gradual"],
    )
    def test_scales_move_on_eight_devices_as_on_one(self, rule):
        tx = dls.loss_scaling(optax.sgd(0.01), rule)
        params, batches = problem()

        def run(params, batches, axes=()):
            def step(carry, x):
                params, state = carry
                _, grads = dls.value_and_scaled_grad(loss_fn)(params, x, state=state)
                if axes:
                    grads = lax.pmean(grads, axes)
                updates, state = tx.update(grads, state, params)
                carry = optax.apply_updates(params, updates), state
                return carry, dls.loss_scale(state)

            return lax.scan(step, (params, tx.init(params)), batches)[1]

        sharded = jax.shard_map(
            functools.partial(run, axes=("d",)),
            mesh=mesh_of(d=8),
            in_specs=(P(), P(None, "d")),
            out_specs=P(),
            check_vma=False,
        )
        np.testing.assert_allclose(
            jax.jit(sharded)(params, batches), jax.jit(run)(params, batches), rtol=1e-5
        )
