"""On GPUs all that the scaler computes comes from one array, bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_dls as dls
from optax_dls import _one_kernel

FLOATS = (0.0, -0.0, 1.5, 2.0**-149, jnp.inf, -jnp.inf, jnp.nan, 2.0**127)
INTS = (0, -1, 2**31 - 1, -(2**31))
NUMBERS = (
    *map(jnp.float32, FLOATS),
    *map(jnp.int32, INTS),
    jnp.array(True),
    jnp.array(False),
)


def test_every_bit_comes_back():
    back = jax.jit(_one_kernel._through_one_array)(*NUMBERS)
    for before, after in zip(NUMBERS, back, strict=True):
        assert before.dtype == after.dtype
        assert np.asarray(before).tobytes() == np.asarray(after).tobytes()


@pytest.mark.parametrize(("platform", "number"), [("cuda", 1), ("rocm", 1), ("cpu", 0)])
def test_the_update_holds_one_array_on_gpus_alone(platform, number):
    tx = dls.dynamic_loss_scaling(optax.sgd(1.0))
    params = jnp.ones(3)
    traced = jax.jit(tx.update).trace(params, tx.init(params), params)
    program = traced.lower(lowering_platforms=(platform,)).as_text()
    assert program.count("stablehlo.optimization_barrier") == number
    assert program.count("stablehlo.concatenate") == number


def test_a_state_of_other_kinds_stays_as_it_is():
    for state in (
        (jnp.float32(1), jnp.zeros(2)),  # shapes
        (jnp.float32(1), jnp.bfloat16(1)),  # dtypes
        (jnp.float32(1), jax.random.key(0)),
    ):
        assert _one_kernel.in_one_array(state) is state
