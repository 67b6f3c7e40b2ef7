"""Who has to agree: the devices that share a scaler skip the same steps."""

from collections.abc import Hashable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

AxisName = Hashable | Sequence[Hashable]


def agree(
    flags: Sequence[jax.Array], loss_scale: jax.Array, axis_name: AxisName | None
) -> list[jax.Array]:
    """Each flag, true only if it is true on all devices that share ``loss_scale``.

    Under ``jit`` a flag is one value for all devices already. In a manual region
    (``shard_map``, ``pmap``) it is reduced over :func:`_shared_axes`, all flags in one
    reduction.

    Args:
      flags: scalars of dtype bool.
      loss_scale: the scale whose holders have to agree, shape ().
      axis_name: axes to reduce over in addition; ``()`` reduces over none.

    Raises:
      ValueError: as :func:`_shared_axes`.
    """
    axes = _shared_axes(flags, loss_scale, axis_name)
    if not axes:
        return list(flags)
    return list(lax.pmin(jnp.stack(flags).astype(jnp.int32), axes) > 0)


def largest_on_all_devices(
    value: jax.Array, loss_scale: jax.Array, axis_name: AxisName | None
) -> jax.Array:
    """The largest ``value`` among the devices that share ``loss_scale``.

    Raises:
      ValueError: as :func:`_shared_axes`.
    """
    axes = _shared_axes([value], loss_scale, axis_name)
    return lax.pmax(value, axes) if axes else value


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


def _shared_axes(
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


def _check_in_scope(name: Hashable) -> None:
    try:
        lax.axis_index(name)
    except NameError as error:
        raise NameError(
            f"axis_name={name!r} is no mapped axis where tx.update is called. Leave it "
            "out, or name an axis of the surrounding shard_map, pmap or vmap."
        ) from error
