"""The scale range test: what is finite, what is lost, where to start."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import optax_dls as dls

W = jax.random.normal(jax.random.key(0), (16, 8))
X = jax.random.normal(jax.random.key(1), (32, 16))


def loss_fn(w, x, dtype, weight=1.0):
    y = jnp.tanh(x.astype(dtype) @ w.astype(dtype)).astype(jnp.float32)
    return weight * jnp.mean(y**2)


def half_sum(x, weight=1.0):
    return jnp.sum(weight * x.astype(jnp.float16).astype(jnp.float32))


def by_hand(exponents, weight):
    """Finite, and entries kept, at each scale: the definition."""
    # Compiled, with the same arguments: where XLA fuses otherwise it may keep more digits
    # than the dtype has.
    grad_fn = jax.jit(
        lambda s, w, x: jax.grad(lambda w: s * loss_fn(w, x, jnp.float16, weight))(w)
    )
    grads = np.stack([grad_fn(2.0**exponent, W, X) for exponent in exponents])
    finite = np.isfinite(grads).all((1, 2)).tolist()
    kept = np.count_nonzero(grads, (1, 2)).tolist()
    return finite, kept


def test_tells_what_is_finite_and_what_is_lost_at_each_scale():
    exponents = range(-4, 30, 3)
    search = dls.find_scale(loss_fn, W, X, jnp.float16, 1e-5, exponents=exponents)
    tried = [int(exponent) for exponent in np.log2(search.scales)]
    recommended = {int(np.log2(search.recommended))}  # tried as well
    assert set(tried) == set(exponents) | recommended
    finite, kept = by_hand(tried, 1e-5)
    assert search.finite.tolist() == finite
    most = max(k for k, f in zip(kept, finite, strict=True) if f)
    np.testing.assert_allclose(
        search.lost,
        [1 - k / most if f else np.nan for k, f in zip(kept, finite, strict=True)],
        atol=1e-6,
    )
    assert search.largest_finite == max(search.scales[search.finite])
    assert search.lost[0] > 0.5 > search.lost[6] == 0


def test_recommends_the_middle_of_the_good_range():
    search = dls.find_scale(loss_fn, W, X, jnp.float16, 1e-5, exponents=range(40))
    good = search.scales[search.finite & (search.lost < 1e-3)]
    middle = (np.log2(good[0]) + np.log2(search.largest_finite)) / 2
    assert np.log2(search.recommended) == np.floor(middle)
    assert search.recommended <= search.largest_finite / 4
    assert search.reason.startswith(f"Start at 2^{np.floor(middle):.0f}: a gradient")


def test_leaves_headroom_where_the_good_range_is_narrow():
    def steep(w):
        return jnp.sum((w.astype(jnp.float16) * jnp.float16(2.0**14)).astype("float32"))

    search = dls.find_scale(steep, jnp.ones(3))
    assert (search.largest_finite, search.recommended) == (2.0, 1.0)
    search = dls.find_scale(steep, jnp.ones(3), exponents=range(-14, 10))
    assert search.recommended == 2.0**-7

    # The small entry is kept from 2^17 on, and the large one overflows at 2^18.
    both = jnp.array([2.0**-41, 2.0**-2])
    search = dls.find_scale(lambda w: half_sum(w, both), jnp.ones(2))
    assert np.flatnonzero(search.lost < 1e-3).tolist() == [17]
    assert (search.largest_finite, search.recommended) == (2.0**17, 2.0**15)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_says_when_no_scaling_is_needed(dtype):
    search = dls.find_scale(loss_fn, W, X, dtype, 1e-5)
    assert search.recommended == 1.0
    assert search.reason.startswith("No scaling is needed")


def test_says_when_it_is_the_loss_that_is_not_finite():
    search = dls.find_scale(lambda w: jnp.sum(w) * jnp.nan, W)
    assert search.recommended is search.largest_finite is None
    assert np.isnan(search.loss)
    assert search.reason.startswith("The loss of this batch is nan before it is scaled")
    assert "the scale is not the cause" in search.reason

    search = dls.find_scale(
        lambda w, x: 1e-3 * half_sum(w) + half_sum(x), W, jnp.full(4, 1e6)
    )
    assert search.finite.any() and search.recommended is None
    assert search.loss == np.inf
    assert search.reason.startswith("The loss of this batch is inf before it is scaled")
    assert f"finite up to 2^{np.log2(search.largest_finite):.0f}" in search.reason
    assert "only if tx.update gets value=loss" in search.reason


@pytest.mark.parametrize("has_aux", [False, True])
def test_knows_the_true_loss(has_aux):
    def fn(w):
        loss = loss_fn(w, X, jnp.float16)
        return (loss, w) if has_aux else loss

    search = dls.find_scale(fn, W, has_aux=has_aux, exponents=[3, 5])
    assert search.loss == pytest.approx(float(loss_fn(W, X, jnp.float16)), rel=1e-3)


def test_says_when_the_gradient_is_finite_nowhere():
    def root(w):
        return jnp.sum(jnp.sqrt(w - w))

    search = dls.find_scale(root, W, exponents=range(-14, 33))
    assert search.loss == 0 and search.recommended is search.largest_finite is None
    assert "from 2^-14 to 2^32, so the scale is not the cause" in search.reason
    # Of fewer scales it does not say so.
    for exponents in ([3, 30], range(-14, 10, 8), [0, 32]):
        search = dls.find_scale(root, W, exponents=exponents)
        assert "It may overflow at all of them" in search.reason
        assert "try exponents=range(-14, 33)" in search.reason


def test_a_gradient_that_low_scales_alone_make_nan():
    @jax.custom_vjp
    def nan_of_zero(x):  # as g / g * g
        return x

    nan_of_zero.defvjp(
        lambda x: (x, None), lambda _, g: (jnp.where(g == 0, jnp.nan, g),)
    )

    def loss(w):
        return 1e-8 * half_sum(nan_of_zero(w.astype(jnp.float16)))

    search = dls.find_scale(loss, jnp.ones(3))
    assert search.finite.tolist() == [False] * 2 + [True] * 31
    assert search.largest_finite == 2.0**32
    assert search.recommended == 2.0**17
    assert search.reason.startswith("Start at 2^17")
    assert "against 0.0% at 2^2." in search.reason
    assert "At 2^1 and below it is not finite either" in search.reason
    # No room is left for a lower one.
    search = dls.find_scale(loss, jnp.ones(3), exponents=range(4))
    assert (search.recommended, search.largest_finite) == (4.0, 8.0)


@pytest.mark.parametrize("exponents", [[0, 8, 20], [20], [0, 30], [18, 19]])
def test_the_recommended_scale_was_tried_and_its_loss_is_its_own(exponents):
    traces = []

    def loss(w):
        traces.append(w)
        tiny = jnp.exp2(jnp.array([-22.0, -28.0, -36.0]))
        return jnp.sum(w.astype(jnp.float16).astype(jnp.float32) * tiny)

    search = dls.find_scale(loss, jnp.ones(3), exponents=exponents)
    tried = search.scales.tolist()
    assert search.recommended in tried and sorted(tried) == tried
    assert {2.0**exponent for exponent in exponents} <= set(tried)
    # Entries of 2**-25 and less are zero in float16.
    kept = np.array(
        [np.sum(s * 2.0 ** np.array([-22, -28, -36]) > 2**-25) for s in tried]
    )
    np.testing.assert_allclose(search.lost, 1 - kept / kept.max(), rtol=1e-6)
    at = search.lost[tried.index(search.recommended)]
    assert f"{at:.1%} of its entries are lost at the start" in search.reason
    assert len(traces) == 1


def test_says_where_the_next_scale_is_far_away():
    search = dls.find_scale(half_sum, jnp.ones(3), exponents=[0, 40])
    assert "finite up to 2^0 and not at 2^40, and" in search.reason
    search = dls.find_scale(half_sum, jnp.ones(3), exponents=range(20))
    assert "finite up to 2^15, and" in search.reason


@pytest.mark.parametrize("weight", [0.0, 1e-30])
def test_says_when_there_is_nothing_but_zeros(weight):
    search = dls.find_scale(loss_fn, W, X, jnp.float16, weight)
    assert search.recommended is None
    assert search.reason.startswith("The gradient is zero at every scale up to 2^32")


def test_prints_one_line_a_scale_and_the_reason():
    lines = str(dls.find_scale(loss_fn, W, X, jnp.float16, 1e6, exponents=[0, 30]))
    assert lines.splitlines()[1].split() == ["2^0", "finite", "0.0%"]
    assert lines.splitlines()[2].split() == ["2^30", "not", "finite"]
    assert "Start at" in lines.splitlines()[3]


def test_compiles_once_for_all_scales():
    traces = []

    def counted(w):
        traces.append(w)
        return loss_fn(w, X, jnp.float16)

    dls.find_scale(counted, W)
    assert len(traces) == 1


def test_an_empty_leaf_changes_nothing():
    params = {"w": W, "empty": jnp.zeros((0, 3))}
    search = dls.find_scale(lambda p: loss_fn(p["w"], X, jnp.float16, 1e-5), params)
    expected = dls.find_scale(loss_fn, W, X, jnp.float16, 1e-5)
    np.testing.assert_array_equal(search.lost, expected.lost)


def test_takes_aux_keywords_and_other_frameworks():
    def with_aux(w, *, x):
        return loss_fn(w, x, jnp.float16), {"mean": jnp.mean(x)}

    expected = dls.find_scale(loss_fn, W, X, jnp.float16)
    search = dls.find_scale(with_aux, W, x=X, has_aux=True)
    np.testing.assert_array_equal(search.finite, expected.finite)

    model = nn.Dense(4, dtype=jnp.float16)
    params = model.init(jax.random.key(0), X)
    linen = dls.find_scale(
        lambda p: jnp.mean(model.apply(p, X).astype(jnp.float32) ** 2), params
    )
    assert linen.recommended > 1


def test_arrays_are_arguments_of_the_program_and_the_rest_stays_as_it_is():
    names = np.array(["a", "b"])
    big = {"w": jnp.ones((16, 64)), "scale": 2.0}

    def loss(params, batch, mode, *, mask, names, activation):
        assert mode == "mean" and names.tolist() == ["a", "b"]
        assert batch["n"] == 3 and isinstance(params["scale"], float | jax.Array)
        y = activation(batch["x"] @ params["w"]) * mask
        return params["scale"] * jnp.mean(y.astype(jnp.float32) ** 2)

    batch = {"x": np.ones((8, 16), np.float32), "n": 3}
    keywords: dict[str, Any] = {
        "mask": jnp.ones((8, 64)),
        "names": names,
        "activation": jnp.tanh,
    }
    before = jax.config.jax_captured_constants_warn_bytes  # type: ignore[attr-defined]
    jax.config.update("jax_captured_constants_warn_bytes", 100)
    try:  # every warning is an error
        search = dls.find_scale(loss, big, batch, "mean", exponents=[0], **keywords)
        with pytest.raises(UserWarning, match="captured"):
            dls.find_scale(
                lambda s: loss({**big, "scale": s}, batch, "mean", **keywords), 2.0
            )
    finally:
        jax.config.update("jax_captured_constants_warn_bytes", before)
    assert search.recommended == 1.0


class Block(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.linear = nnx.Linear(16, 8, dtype=jnp.float16, rngs=rngs)
        self.norm = nnx.BatchNorm(8, dtype=jnp.float16, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.norm(self.linear(x)))


class NoTree(nnx.Module, pytree=False):
    def __init__(self):
        self.block = Block()

    def __call__(self, x):
        return self.block(x)


def state_of(model):
    keys, rest = nnx.state(model, nnx.RngKey, ...)
    return jax.tree.map(jax.random.key_data, keys), jax.tree.map(np.asarray, rest)


def nnx_loss(model, x):
    return 1e-5 * jnp.mean(model(x).astype(jnp.float32) ** 2)


@pytest.mark.standard_promotion
class TestModels:
    @pytest.mark.parametrize("module", [Block, lambda: Block().linear])
    def test_an_nnx_module(self, module):
        model = module()
        before = state_of(model)
        search = dls.find_scale(
            nnx_loss, model, X, value_and_grad=nnx.value_and_grad, exponents=[0, 12]
        )
        assert search.recommended > 1 and search.lost[0] > search.lost[-1]
        # Random streams and batch statistics of the model did not move.
        jax.tree.map(np.testing.assert_array_equal, before, state_of(model))

    @pytest.mark.parametrize("module", [Block, NoTree])
    def test_an_nnx_module_in_parts(self, module):
        graphdef, params, rest = nnx.split(module(), nnx.Param, ...)  # type: ignore[misc]

        def loss(params, rest, x):
            return nnx_loss(nnx.merge(graphdef, params, rest, copy=True), x)

        search = dls.find_scale(loss, params, rest, X, exponents=[0, 12])
        whole = dls.find_scale(
            nnx_loss, Block(), X, value_and_grad=nnx.value_and_grad, exponents=[0, 12]
        )
        np.testing.assert_array_equal(search.lost, whole.lost)
        assert search.loss == whole.loss

    # Equinox 0.13.0 as it is imported, on JAX 0.8.
    @pytest.mark.filterwarnings("ignore:jax.interpreters:DeprecationWarning")
    def test_an_equinox_model_with_functions_among_its_leaves(self):
        import equinox as eqx

        model = eqx.nn.MLP(16, 1, 8, 1, key=jax.random.key(0))

        def loss(model, x):
            half = jax.tree.map(
                lambda p: p.astype(jnp.float16) if eqx.is_array(p) else p, model
            )
            y = jax.vmap(half)(x.astype(jnp.float16))
            return 1e-5 * jnp.mean(y.astype(jnp.float32) ** 2)

        search = dls.find_scale(
            loss, model, X, value_and_grad=eqx.filter_value_and_grad, exponents=[0, 12]
        )
        assert search.recommended > 1 and search.lost[0] > search.lost[-1]


def test_refuses_to_run_inside_a_transformation():
    with pytest.raises(TypeError, match="call it outside jit"):
        jax.jit(lambda w: dls.find_scale(jnp.sum, w) and w)(W)


@pytest.mark.parametrize("exponents", [[], [-101], [1.5], range(120, 128)])
def test_exponents_that_cannot_be(exponents):
    with pytest.raises(ValueError, match="whole numbers from -100 to 126"):
        dls.find_scale(
            functools.partial(loss_fn, x=X, dtype="float16"), W, exponents=exponents
        )
