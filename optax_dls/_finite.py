"""Is every number finite, and do all devices that share a scaler say so?"""

import functools
from collections.abc import Hashable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType
from jax.typing import ArrayLike

from ._views import is_inexact

LARGEST_GROUPED = 2**16  # entries

AxisName = Hashable | Sequence[Hashable]


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


def agree(
    flags: Sequence[jax.Array], loss_scale: jax.Array, axis_name: AxisName | None
) -> list[jax.Array]:
    """Each flag, true only if it is true on all devices that share ``loss_scale``.

    Under ``jit`` a flag is one value for all devices already. In a manual region
    (``shard_map``, ``pmap``) it is reduced over :func:`shared_axes`, all flags in one
    reduction.

    Args:
      flags: scalars of dtype bool.
      loss_scale: the scale whose holders have to agree, shape ().
      axis_name: axes to reduce over in addition; ``()`` reduces over none.

    Raises:
      ValueError: as :func:`shared_axes`.
    """
    axes = shared_axes(flags, loss_scale, axis_name)
    if not axes:
        return list(flags)
    return list(lax.pmin(jnp.stack(flags).astype(jnp.int32), axes) > 0)


def shared_axes(
    values: Sequence[jax.Array], loss_scale: jax.Array, axis_name: AxisName | None
) -> tuple[Hashable, ...]:
    """The manual axes on which ``values`` vary and the scale does not.

    Where JAX does not track what varies, every manual axis.

    Raises:
      ValueError: ``axis_name=()`` where a value varies over devices that provably
        share one scale.
    """
    manual = jax.sharding.get_abstract_mesh().manual_axes
    tracked = all(axis in varying_axes(lax.axis_index(axis)) for axis in manual)
    varying = frozenset().union(*map(varying_axes, values))
    shared = varying - varying_axes(loss_scale) if tracked else frozenset(manual)

    names = axis_name if isinstance(axis_name, tuple | list) else (axis_name,)
    if axis_name is None:
        names = ()
    elif not names:
        if tracked and shared:
            raise ValueError(
                "axis_name=() turns the agreement between devices off, but the gradients "
                f"vary over the mesh axes {sorted(map(str, shared))} while the loss scale "
                "does not: devices with one scale cannot decide apart. Leave axis_name "
                "out, or give each device its own scaler (init outside shard_map and "
                "pass the state in sharded, or jax.lax.pcast it to varying, jax.lax.pvary in "
                "JAX 0.8)."
            )
        return ()

    axes = [axis for axis in manual if axis in shared]
    for name in names:
        _check_in_scope(name)
        # An axis over which the values provably do not vary needs no collective.
        if name not in axes and (name in varying or name not in manual):
            axes.append(name)
    return tuple(axes)


def varying_axes(x: jax.Array | jax.ShapeDtypeStruct) -> frozenset[Hashable]:
    """The manual mesh axes over which JAX knows that ``x`` varies."""
    aval = x if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x)
    # Until the lower bound is above jax 0.10, which renamed `vma`.
    axis_type = getattr(aval, "manual_axis_type", None)
    return axis_type.varying if axis_type else getattr(aval, "vma", None) or frozenset()


def to_varying(x: jax.Array, axes: frozenset[Hashable]) -> jax.Array:
    """``x`` as a value that varies over manual mesh axes."""
    # Until the lower bound is above jax 0.8, which says pvary.
    if hasattr(lax, "pcast"):
        return lax.pcast(x, tuple(axes), to="varying")
    return lax.pvary(x, tuple(axes))  # type: ignore[attr-defined]


def _check_in_scope(name: Hashable) -> None:
    try:
        lax.axis_index(name)
    except NameError as error:
        raise NameError(
            f"axis_name={name!r} is no mapped axis where tx.update is called. Leave it "
            "out, or name an axis of the surrounding shard_map, pmap or vmap."
        ) from error
