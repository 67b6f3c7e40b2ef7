"""The finite check: whether a tree holds an inf or a NaN, and its largest finite entry."""

import functools
from collections.abc import Hashable, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.typing import ArrayLike

from ._dtypes import is_inexact

LARGEST_GROUPED = 2**16  # entries


def all_finite(tree: object) -> jax.Array:
    r"""Whether no leaf of a tree holds an inf or a NaN.

    .. math:: \bigwedge_{x \in \text{leaves}} \bigwedge_i \text{isfinite}(x_i)

    Args:
      tree: any tree of arrays. Integer, bool, float0, None and empty leaves count as
        finite, and so does the empty tree; of a complex leaf both parts count.

    Returns:
      Shape (), dtype bool. Inside ``shard_map`` and ``pmap`` it speaks of the shard on
      this device alone (the transformations reduce it over devices themselves).

    Example:
      >>> import jax.numpy as jnp
      >>> import optax_dls as dls
      >>> bool(dls.all_finite({"w": jnp.ones(3), "step": jnp.array(7), "b": None}))
      True
      >>> bool(dls.all_finite([jnp.ones(3), jnp.array([0.0, jnp.nan])]))
      False
    """
    # Never as a concatenation, which would gather sharded leaves, nor by a max, which
    # drops NaN.
    leaves = [leaf for leaf in jax.tree.leaves(tree) if is_inexact(leaf)]
    flags = [
        jnp.all(functools.reduce(jnp.logical_and, map(jnp.isfinite, group)))
        for group in _groups(leaves)
    ]
    return jnp.all(jnp.stack(flags)) if flags else jnp.array(True)


def _groups(leaves: Sequence[ArrayLike]) -> list[list[ArrayLike]]:
    """Up to eight leaves each that one loop can read: of one shape, and laid out alike.

    With many leaves that is a third of the time of a loop for each, and much less to
    compile. Large leaves stay alone: of several at once XLA makes slow code on CPUs where
    they are transposes, as the gradients of matrices are. So do all leaves where a
    partitioner decides how arrays are laid out: nobody knows yet, and a wrong guess would
    move them between devices.
    """
    alike: dict[Hashable, list[ArrayLike]] = {}
    for number, leaf in enumerate(leaves):
        sharding = jax.typeof(leaf).sharding
        axis_types = sharding.mesh.axis_types
        is_known = bool(axis_types) and AxisType.Auto not in axis_types
        is_known = is_known or jax.device_count() == 1
        size = jnp.size(leaf)  # no int where an exported function leaves it open
        is_large = isinstance(size, int) and size > LARGEST_GROUPED
        can_share = is_known and not is_large
        key = (jnp.shape(leaf), sharding.spec) if can_share else number
        alike.setdefault(key, []).append(leaf)
    return [
        group[start : start + 8]
        for group in alike.values()
        for start in range(0, len(group), 8)
    ]


def largest_finite(tree: object) -> jax.Array:
    """The largest finite magnitude in a tree, float32 of shape (); 0 if there is none."""
    parts = [
        part
        for leaf in jax.tree.leaves(tree)
        if is_inexact(leaf)
        for part in ((leaf.real, leaf.imag) if jnp.iscomplexobj(leaf) else (leaf,))
    ]
    sizes = [
        jnp.max(jnp.where(jnp.isfinite(part), jnp.abs(part), 0), initial=0)
        for part in parts
    ]
    if not sizes:
        return jnp.zeros((), jnp.float32)
    largest = jnp.max(jnp.stack([size.astype(jnp.float32) for size in sizes]))
    return jnp.minimum(largest, jnp.finfo(jnp.float32).max)  # float64 may be larger
