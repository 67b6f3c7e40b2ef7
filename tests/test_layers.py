"""A loss scale for one layer: gradients of any size pass through float16."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_dls as dls

RNG = np.random.default_rng(0)  # compiles nothing
W = jnp.asarray(RNG.normal(size=(16, 16)) / 4, jnp.float32)
X = jnp.asarray(RNG.normal(size=(8, 16)), jnp.float32)


def layer(w, x, dtype=jnp.float16):
    return jnp.tanh(x.astype(dtype) @ w.astype(dtype))


def loss(w, x, wrap, weight=1.0, dtype=jnp.float16):
    y = wrap(functools.partial(layer, dtype=dtype))(w, x)
    return weight * jnp.sum(y.astype(jnp.float32) ** 2)


def as_it_is(fn):
    return fn


def assert_close(actual, expected):
    """Within a few roundings of float16."""
    actual, expected = map(np.asarray, (actual, expected))
    np.testing.assert_allclose(
        actual, expected, rtol=0.02, atol=2e-3 * np.max(np.abs(expected))
    )


def test_the_forward_pass_is_that_of_the_layer_in_float32():
    output = dls.layer_scaling(layer)(W, X)
    assert output.dtype == jnp.float32
    np.testing.assert_array_equal(output, layer(W, X).astype(jnp.float32))


@pytest.mark.parametrize("weight", [2.0**-100, 1e-20, 1e-8, 1.0, 1e8, 2.0**100])
def test_gradients_of_any_size_are_those_of_float32(weight):
    def gradients(wrap, dtype):
        grad_fn = jax.grad(loss, argnums=(0, 1))
        return jax.jit(grad_fn, static_argnums=(2, 4))(W, X, wrap, weight, dtype)

    scaled = gradients(dls.layer_scaling, jnp.float16)
    for actual, expected in zip(scaled, gradients(as_it_is, jnp.float32), strict=True):
        assert actual.dtype == jnp.float32
        assert_close(actual, expected)


def test_a_layer_that_overflows_at_the_first_scale_is_tried_at_a_lower_one():
    def amplifying(w, x):
        return x.astype(jnp.float16) @ w.astype(jnp.float16) * jnp.float16(2.0**14)

    def total(w, fn):
        return 1e-12 * jnp.sum(fn(w, 0.01 * X))

    grads = jax.jit(jax.grad(total), static_argnums=1)(W, dls.layer_scaling(amplifying))
    expected = 1e-12 * 2.0**14 * 0.01 * jnp.sum(X, 0)[:, None] * jnp.ones((1, 16))
    assert_close(grads, expected)


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
def test_what_is_not_finite_is_handed_on_and_the_step_is_skipped(bad):
    tx = dls.dynamic_loss_scaling(optax.sgd(1.0))

    @jax.jit
    def step(x, state):
        _, grads = dls.value_and_scaled_grad(loss)(W, x, dls.layer_scaling, state=state)
        return grads, *tx.update(grads, state, W)

    grads, updates, state = step(X.at[0, 0].set(bad), tx.init(W))
    assert not dls.all_finite(grads)
    assert not updates.any()
    assert int(state.scaler.total_skips) == 1


@pytest.mark.parametrize("weight", [2.0**-124, 2.0**123])
def test_gradients_at_the_ends_of_float32(weight):
    """Where the power of two that fits best, or its reciprocal, is no normal number."""
    layer = dls.layer_scaling(lambda w: jnp.float16(16) * w.astype(jnp.float16))
    grad = jax.jit(jax.grad(lambda w: weight * layer(w)))(jnp.float32(1))
    assert float(grad) == 16 * weight


def test_its_operations_are_named_in_profiles_beside_those_of_the_layer():
    grad_fn = jax.jit(jax.grad(loss), static_argnums=2)
    text = grad_fn.lower(W, X, dls.layer_scaling).as_text(debug_info=True)
    assert "body/layer_scaling/is_finite" in text
    assert "layer_scaling/dot_general" not in text


def test_zero_gradients_stay_zero():
    grads = jax.jit(jax.grad(loss), static_argnums=2)(W, X, dls.layer_scaling, 0.0)
    np.testing.assert_array_equal(grads, np.zeros_like(grads))


def test_trees_integers_and_half_precision_parameters():
    def embed(params, ids):
        table, bias = params["table"], params["bias"]
        return {"rows": table[ids] + bias, "count": ids.size}

    params = {"table": W.astype(jnp.float16), "bias": jnp.zeros((1, 16), jnp.float16)}
    ids = jnp.array([0, 3, 3])

    def total(params):
        out = dls.layer_scaling(embed)(params, ids)
        assert out["rows"].dtype == jnp.float32
        return 1e-3 * jnp.sum(out["rows"]) / out["count"]

    grads = jax.jit(jax.grad(total))(params)
    assert all(g.dtype == jnp.float16 for g in jax.tree.leaves(grads))
    assert_close(grads["table"].sum(1), 1e-3 / 3 * 16 * jnp.zeros(16).at[ids].add(1.0))


def test_early_layers_of_a_deep_network_that_one_scale_cannot_reach():
    """As benchmarks/layers.py, at the start of the training."""
    rng = np.random.default_rng(2)
    shapes = (0.1, (32, 16, 16)), (0.5, (32, 1, 16))
    params = [jnp.float32(rng.normal(0, size, shape)) for size, shape in shapes]

    def deep(layer_params, x):
        w, b = (p.astype(jnp.float16) for p in layer_params)
        return jnp.tanh(x.astype(jnp.float16) @ w + b)

    def zeros(wrap, loss_scale):
        def body(x, layer_params):
            return wrap(deep)(layer_params, x).astype(jnp.float32), None

        def loss(params):
            return loss_scale * jnp.sum(jax.lax.scan(body, X, params)[0])

        grads = jax.jit(jax.grad(loss))(params)
        return dls.all_finite(grads), jnp.mean(grads[0] == 0, (1, 2)).tolist()

    finite, shares = zeros(as_it_is, 2.0**11)
    assert finite
    assert shares[:8] == [1.0] * 8
    assert not zeros(as_it_is, 2.0**15)[0]
    finite, shares = zeros(dls.layer_scaling, 1.0)
    assert finite
    assert max(shares) < 0.05


def test_linen():
    class Scaled(nn.Module):
        layer: nn.Module

        def __call__(self, x):
            if self.is_initializing():
                return self.layer(x).astype(jnp.float32)
            module, variables = self.layer.unbind()
            return dls.layer_scaling(module.apply)(variables, x)

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            for _ in range(2):
                x = Scaled(nn.Dense(16, dtype=jnp.float16))(x)
            return x

    def loss(params):
        return 1e-12 * jnp.sum(jnp.asarray(Model().apply(params, X)) ** 2)

    params = Model().init(jax.random.key(0), X)
    grads = jax.jit(jax.grad(loss))(params)
    assert jax.tree.structure(grads) == jax.tree.structure(params)  # type: ignore[operator]
    for grad in jax.tree.leaves(grads):
        assert float(jnp.mean(grad == 0)) == 0.0


def test_nnx():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List(
                [nnx.Linear(16, 16, dtype=jnp.float16, rngs=rngs) for _ in range(2)]
            )

        def __call__(self, x):
            for layer in self.layers:
                graph, params = nnx.split(layer)
                apply = dls.layer_scaling(lambda p, x, g=graph: nnx.merge(g, p)(x))
                x = apply(params, x)
            return x

    model = Model(nnx.Rngs(0))
    grads = nnx.grad(lambda model: 1e-12 * jnp.sum(model(X) ** 2))(model)
    leaves = jax.tree.leaves(grads)
    assert len(leaves) == 4
    for grad in leaves:
        assert float(jnp.mean(grad == 0)) == 0.0


class TestDevices:
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))

    def expected(self):
        return jax.grad(loss)(W, X, as_it_is, 1e-12, jnp.float32)

    def test_jit_with_sharded_rows(self):
        x = jax.device_put(X, NamedSharding(self.mesh, P("d")))
        grads = jax.jit(jax.grad(loss), static_argnums=2)(
            W, x, dls.layer_scaling, 1e-12
        )
        assert_close(grads, self.expected())

    @pytest.mark.parametrize("check_vma", [True, False])
    def test_shard_map_sums_gradients_that_were_scaled_alike(self, check_vma):
        # One device's gradient is a million times that of the others.
        rows = X * jnp.ones((8, 1)).at[3].set(1e-6)

        def local(w, x):
            grads = jax.grad(loss)(w, x, dls.layer_scaling, 1e-12)
            return grads if check_vma else jax.lax.psum(grads, "d")

        grads = jax.jit(
            jax.shard_map(
                local,
                mesh=self.mesh,
                in_specs=(P(), P("d")),
                out_specs=P(),
                check_vma=check_vma,
            )
        )(W, rows)
        assert_close(grads, jax.grad(loss)(W, rows, as_it_is, 1e-12, jnp.float32))

    @pytest.mark.parametrize("check_vma", [True, False])
    def test_a_layer_that_gathers_its_weights(self, check_vma):
        """Its backward pass sums the gradients of devices whose losses differ in size."""

        def gathering(w, x):
            w = jax.lax.all_gather(w.astype(jnp.float16), "d", axis=0, tiled=True)
            return jnp.tanh(x.astype(jnp.float16) @ w)

        weights = 10.0 ** -jnp.arange(8.0)

        def local(w, x, weight):
            def loss(w):
                return weight[0] * jnp.sum(dls.layer_scaling(gathering)(w, x) ** 2)

            return jax.grad(loss)(w)

        sharded = jax.shard_map(
            local,
            mesh=self.mesh,
            in_specs=P("d"),
            out_specs=P("d"),
            check_vma=check_vma,
        )

        def whole(w):
            rows = jnp.sum(layer(w, X, jnp.float32) ** 2, 1)
            return jnp.sum(weights * rows)

        assert_close(jax.jit(sharded)(W, X, weights), jax.grad(whole)(W))

    @pytest.mark.parametrize("check_vma", [True, False])
    def test_a_layer_that_sums_and_overflows_on_one_device(self, check_vma):
        """All devices try again together, or they would wait for each other for ever."""
        w1, w2 = 1e-3 * jnp.abs(W), 1e-3 * jnp.abs(W)
        x = X.at[:, 0].set(2.0**14)
        w1 = w1.at[0, 0].set(1.0)  # one hidden unit of 2**14, on device 0

        def megatron(w1, w2, x):
            hidden = x.astype(jnp.float16) @ w1.astype(jnp.float16)
            return jax.lax.psum(hidden @ w2.astype(jnp.float16), "d")

        def local(w1, w2, x):
            def loss(w1, w2):
                return jnp.sum(dls.layer_scaling(megatron)(w1, w2, x))

            return jax.grad(loss, argnums=(0, 1))(w1, w2)

        sharded = jax.shard_map(
            local,
            mesh=self.mesh,
            in_specs=(P(None, "d"), P("d"), P()),
            out_specs=(P(None, "d"), P("d")),
            check_vma=check_vma,
        )
        grads = jax.jit(sharded)(w1, w2, x)
        expected = jax.grad(lambda w1, w2: jnp.sum((x @ w1) @ w2), argnums=(0, 1))(
            w1, w2
        )
        # Untracked, the gradient of a sum over devices is a sum over devices too.
        times = 1 if check_vma else 8
        for actual, right in zip(grads, expected, strict=True):
            assert dls.all_finite(actual)
            assert_close(actual, times * right)

    def test_members_under_vmap_have_scales_of_their_own(self):
        weights = jnp.array([1e-20, 1.0, 1e10])
        grad_fn = jax.grad(loss)
        members = jax.vmap(lambda weight: grad_fn(W, X, dls.layer_scaling, weight))
        grads = jax.jit(members)(weights)
        for grad, weight in zip(grads, weights, strict=True):
            assert_close(grad, grad_fn(W, X, as_it_is, weight, jnp.float32))


@pytest.mark.parametrize("bad", ["relu", True, jnp.tanh])
def test_an_argument_that_is_no_array_is_refused(bad):
    with pytest.raises(
        TypeError, match=r"args\[1\] must be an array, .*functools.partial"
    ):
        dls.layer_scaling(layer)(W, bad)


def test_something_that_is_no_layer_is_refused():
    with pytest.raises(TypeError, match="fn must be a layer"):
        dls.layer_scaling(W)  # type: ignore[arg-type]
