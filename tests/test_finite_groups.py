"""The finite check of many leaves: one fault anywhere is found, however leaves are grouped."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_dls as dls

ALIKE = 19  # leaves of one shape: two groups of eight, and three


def leaves():
    """Leaves that share a shape, and some that do not; each holds inexact numbers."""
    alike = [jnp.full((8, 2), i, jnp.float16) for i in range(ALIKE)]
    others = [
        jnp.zeros(()),
        jnp.zeros((8, 2), jnp.float32),
        jnp.zeros((8, 2), jnp.complex64),
        jnp.zeros((512, 130), jnp.bfloat16),  # too large to share a loop
        jnp.zeros((520, 128), jnp.bfloat16),
        jnp.zeros((3, 5)),
        jnp.zeros((5, 3)),
    ]
    return [*alike, *others]


def layouts():
    """Name, and the sharding of a leaf; None where nothing is said."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    rows, everywhere = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    return {
        "no mesh": lambda i, x: None,
        "explicit, replicated": lambda i, x: everywhere,
        "explicit, every second by rows": lambda i, x: (
            rows if i % 2 and x.ndim and x.shape[0] % 8 == 0 else everywhere
        ),
    }


@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("layout", sorted(layouts()))
def test_a_fault_in_any_leaf_is_found(layout, devices, monkeypatch):
    # Most people have one device, on which nothing about a layout has to be known.
    monkeypatch.setattr(jax, "device_count", lambda: devices)
    sharding = layouts()[layout]

    def placed(i, leaf):
        where = sharding(i, leaf)
        return leaf if where is None else jax.device_put(leaf, where)

    good = [placed(i, leaf) for i, leaf in enumerate(leaves())]
    check = jax.jit(lambda tree: dls.all_finite(tree))
    assert check(good)
    for i, leaf in enumerate(good):
        bad = np.array(leaf)
        bad.reshape(-1)[-1] = (np.inf, -np.inf, np.nan)[i % 3]
        tree = [*good[:i], placed(i, jnp.asarray(bad)), *good[i + 1 :]]
        assert not check(tree), f"leaf {i} of {leaf.dtype}{leaf.shape}"
