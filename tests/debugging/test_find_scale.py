"""The scale range test: what is finite, what is lost, where to start."""

import functools

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


def by_hand(exponents, weight):
    """Finite, and entries kept, at each scale: the definition."""
    # In a loop as well: XLA may keep more digits than the dtype where it fuses otherwise.
    grads = jax.jit(
        lambda scales: jax.lax.map(
            lambda s: jax.grad(lambda w: s * loss_fn(w, X, jnp.float16, weight))(W),
            scales,
        )
    )(2.0 ** jnp.array(exponents, jnp.float32))
    finite = np.isfinite(grads).all((1, 2)).tolist()
    kept = np.count_nonzero(grads, (1, 2)).tolist()
    return finite, kept


def test_tells_what_is_finite_and_what_is_lost_at_each_scale():
    exponents = range(-4, 30, 3)
    search = dls.find_scale(loss_fn, W, X, jnp.float16, 1e-5, exponents=exponents)
    finite, kept = by_hand(exponents, 1e-5)
    assert np.log2(search.scales).tolist() == list(exponents)
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


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_says_when_no_scaling_is_needed(dtype):
    search = dls.find_scale(loss_fn, W, X, dtype, 1e-5)
    assert search.recommended == 1.0
    assert search.reason.startswith("No scaling is needed")


def test_says_when_it_is_not_the_scale():
    search = dls.find_scale(lambda w: jnp.sum(w) * jnp.nan, W)
    assert search.recommended is search.largest_finite is None
    assert "the scale is not the cause" in search.reason


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


@pytest.mark.standard_promotion
def test_nnx_in_its_functional_form():
    model = nnx.Linear(16, 4, dtype=jnp.float16, rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(model)

    def loss(params):
        return jnp.mean(nnx.merge(graphdef, params)(X).astype(jnp.float32) ** 2)

    assert dls.find_scale(loss, params).recommended > 1


@pytest.mark.parametrize("exponents", [[], [-101], [1.5], range(120, 128)])
def test_exponents_that_cannot_be(exponents):
    with pytest.raises(ValueError, match="whole numbers from -100 to 126"):
        dls.find_scale(
            functools.partial(loss_fn, x=X, dtype="float16"), W, exponents=exponents
        )
