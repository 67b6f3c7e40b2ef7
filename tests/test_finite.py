"""The finite check, and one decision for all devices that share a scaler."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import optax_dls as dls


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "complex64"])
@pytest.mark.parametrize("size", [1, 7, 5000])  # XLA reduces large arrays differently
@pytest.mark.parametrize("fault", [np.inf, -np.inf, np.nan])
def test_finds_one_bad_entry_wherever_it_is(dtype, size, fault):
    check = jax.jit(dls.all_finite)
    for where in {0, size // 2, size - 1}:
        leaf = jnp.ones(size, dtype)
        assert bool(check({"a": leaf, "b": leaf}))
        assert not bool(check({"a": leaf, "b": leaf.at[where].set(fault)}))


def test_the_largest_and_the_smallest_numbers_are_finite():
    for dtype in (jnp.float16, jnp.bfloat16, jnp.float32):
        info = jnp.finfo(dtype)
        assert bool(dls.all_finite(jnp.array([info.max, info.min, info.tiny], dtype)))


@pytest.mark.parametrize(
    "leaf",
    [
        None,
        (),
        jnp.ones((0, 3)),
        jnp.array([2**31 - 1]),
        jnp.array([True]),
        np.zeros(2, jax.dtypes.float0),
        optax.MaskedNode(),
        jax.random.key(0),
        1.5,
    ],
)
def test_what_cannot_be_nonfinite_counts_as_finite(leaf):
    assert bool(dls.all_finite({"a": leaf}))
    assert not bool(dls.all_finite({"a": leaf, "b": jnp.array(jnp.nan)}))


MESH = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))


def update_on_four_devices(check_vma, axis_name=None):
    """One step in shard_map: the gradients of device 1 overflow."""
    tx = dls.dynamic_loss_scaling(
        optax.sgd(1.0), init_scale=1024.0, axis_name=axis_name
    )
    params = jnp.zeros(8)

    @jax.jit
    @functools.partial(
        jax.shard_map,
        mesh=MESH,
        in_specs=(P("d"), P("d")),
        out_specs=(P("d"), P("d")),
        check_vma=check_vma,
    )
    def step(params, grads):
        updates, state = tx.update(grads, tx.init(params), params)
        return updates, dls.loss_scale(state)[None]

    return step(params, jnp.ones(8).at[2].set(jnp.inf))


@pytest.mark.parametrize("check_vma", [True, False])
def test_devices_that_share_a_scale_skip_together(check_vma):
    updates, scales = update_on_four_devices(check_vma)
    np.testing.assert_array_equal(updates, np.zeros(8))
    np.testing.assert_array_equal(scales, [512.0] * 4)


def test_an_empty_axis_name_turns_agreement_off():
    updates, scales = update_on_four_devices(check_vma=False, axis_name=())
    np.testing.assert_array_equal(scales, [1024.0, 512.0, 1024.0, 1024.0])
    np.testing.assert_array_equal(updates != 0, [1, 1, 0, 0, 1, 1, 1, 1])


def test_devices_that_provably_share_a_scale_cannot_decide_apart():
    with pytest.raises(
        ValueError, match=r"axis_name=\(\) turns the agreement.*\['d'\]"
    ):
        update_on_four_devices(check_vma=True, axis_name=())


def test_axis_name_adds_a_mapped_axis():
    grads = jnp.array([[1.0], [jnp.inf]])
    for axis_name, expected in ((None, [1024.0, 512.0]), ("m", [512.0, 512.0])):
        tx = dls.dynamic_loss_scaling(
            optax.sgd(1.0), init_scale=1024.0, axis_name=axis_name
        )
        state = jax.vmap(tx.init)(jnp.zeros((2, 1)))
        _, state = jax.vmap(tx.update, axis_name="m")(grads, state)
        np.testing.assert_array_equal(dls.loss_scale(state), expected)
