"""Faults by the thousand: python tests/fault_campaign.py --faults 1000000.

Every run trains a small model for 64 steps while inf, -inf, NaN and float16 overflow
strike at random: in any leaf, element, device, micro-batch and step. Each step is judged
on the spot, bit for bit: after a fault nothing may have moved, on a good step everything
must have, and at all times all devices must agree.
"""

import argparse
import collections
import functools
import itertools
import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_dls as dls

DEVICES, MICRO_BATCHES, STEPS, RUNS = 8, 2, 64, 4
SHAPES = {"matrix": (8, 4), "vector": (8,)}
OPTIMIZERS = {
    "adafactor": optax.adafactor(1e-2),
    "adamw": optax.adamw(1e-2),
    "clip": optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1e-2)),
    "lion": optax.lion(1e-2),
    "momentum": optax.sgd(1e-2, momentum=0.9),
    "rmsprop": optax.rmsprop(1e-2),
}
# 1e4 is finite in float16, but not times a scale of at least 16; gradients of order one
# are finite times 2**12.
FAULTS = np.array([np.inf, -np.inf, np.nan, 1e4], np.float16)
SETTINGS: dict[str, Any] = {"init_scale": 256.0, "min_scale": 16.0, "max_scale": 4096.0}


def draw(seed):
    """Gradients of every run, step, device and micro-batch, and the faults of each step.

    A bad step has one to three faults, each anywhere.
    """
    rng = np.random.default_rng(seed)
    lead = (RUNS, STEPS, DEVICES, MICRO_BATCHES)
    grads = {
        leaf: rng.uniform(0.1, 1.0, (*lead, *shape)).astype(np.float16)
        for leaf, shape in SHAPES.items()
    }
    faults = rng.integers(1, 4, (RUNS, STEPS)) * (rng.random((RUNS, STEPS)) < 0.4)
    for run, step in np.argwhere(faults):
        for _ in range(faults[run, step]):
            leaf = grads[rng.choice(list(SHAPES))]
            where = tuple(rng.integers(n) for n in leaf.shape[2:])
            leaf[(run, step, *where)] = rng.choice(FAULTS)
    return grads, faults


def same_bits(x, y):
    return jnp.all(
        jnp.stack(
            [
                jnp.array_equal(a, b)
                for a, b in zip(*map(jax.tree.leaves, (x, y)), strict=True)
            ]
        )
    )


def train(optimizer, mean, spread, batches, *, own_scaler=False):
    """One run; counts of what happened. The hooks say how devices work together.

    mean: from gradients of one device, or of all, to those of the parameters at hand.
    spread: the smallest and the largest value of a number on all devices.
    own_scaler: whether each device in ``shard_map`` has a scaler of its own.
    """
    grads, faults = batches
    tx = dls.dynamic_loss_scaling(optimizer, growth_interval=3, **SETTINGS)

    def step(carry, batch):
        params, state = carry
        grads, faults = batch
        is_bad = faults > 0
        # The scaling is done in float16, where 1e4 overflows; then micro-batches add up.
        scale = dls.loss_scale(state).astype(jnp.float16)
        scaled = jax.tree.map(lambda g: (g * scale).astype(jnp.float32), grads)
        updates, new_state = tx.update(mean(scaled), state, params)
        new_params = optax.apply_updates(params, updates)
        kept = same_bits(
            (params, state.inner_state), (new_params, new_state.inner_state)
        )
        moved = jnp.logical_and(
            dls.all_finite((new_params, new_state.inner_state)),
            jnp.logical_not(same_bits(params, new_params)),
        )
        skipped = new_state.scaler.consecutive_skips > 0
        spreads = [spread(x.astype(jnp.float32)) for x in new_state.scaler[:4]]
        counts = {
            "faults": faults,
            "bad steps": is_bad,
            "skipped": skipped,
            "contaminated": is_bad & (spread(kept.astype(jnp.int32))[0] == 0),
            "good steps lost": ~is_bad
            & (spread((moved & ~skipped).astype(jnp.int32))[0] == 0),
            "disagreements": jnp.any(jnp.stack([low != high for low, high in spreads])),
        }
        return (new_params, new_state), counts

    first = mean(jax.tree.map(lambda g: g[0].astype(jnp.float32), grads))
    params = jax.tree.map(jnp.ones_like, first)
    scaler, inner_state = tx.init(params)
    # In shard_map some optimizers start from zeros that JAX takes for equal everywhere.
    nought = jnp.zeros_like(jnp.sum(jax.tree.leaves(first)[0]))
    state = dls.LossScalingState(scaler, inner_state)
    started = jax.tree.map(lambda x: x + nought.astype(x.dtype), state)
    if not own_scaler:
        started = started._replace(scaler=scaler)
    _, counts = lax.scan(step, (params, started), (grads, faults))
    return jax.tree.map(jnp.sum, counts)


def mean_of_all(grads):
    return jax.tree.map(lambda g: jnp.mean(g, (0, 1)), grads)


def same(x):
    return x, x


def one_by_one(run, batches):
    """All runs, one after the other: unlike vmap, this keeps the lax.cond."""
    return lax.map(run, batches)


def side_by_side(run, batches):
    return jax.vmap(run)(batches)


# Each mode below makes a function of batches that is compiled once.


def on_one_device(optimizer, *, over_runs=one_by_one):
    run = functools.partial(train, optimizer, mean_of_all, same)
    return jax.jit(functools.partial(over_runs, run))


def mesh_of(kind=AxisType.Auto, **axes):
    return jax.make_mesh(
        tuple(axes.values()), tuple(axes), axis_types=(kind,) * len(axes)
    )


# Axes of the mesh, the spec of a gradient (device, micro-batch, rows) and of a parameter.
LAYOUTS = {
    "data parallel": ({"d": 8}, ("d",), P()),
    "fully sharded": ({"d": 8}, ("d",), P("d")),
    "tensor parallel": ({"d": 8}, (None, None, "d"), P("d")),
    "two axes": ({"d": 4, "m": 2}, ("d", None, "m"), P("m")),
}


def in_jit(optimizer, *, layout, kind, over_runs=one_by_one):
    axes, grad_spec, spec = LAYOUTS[layout]
    mesh = mesh_of(kind, **axes)
    place = jax.sharding.reshard
    if kind == AxisType.Auto:
        place = lax.with_sharding_constraint

    def mean(grads):
        return place(mean_of_all(grads), NamedSharding(mesh, spec))

    run = functools.partial(train, optimizer, mean, same)
    compiled = jax.jit(functools.partial(over_runs, run))
    placed = NamedSharding(mesh, P(None, None, *grad_spec))

    def on_the_mesh(batches):
        with jax.set_mesh(mesh):
            return compiled((jax.device_put(batches[0], placed), batches[1]))

    return on_the_mesh


def mean_over_devices(grads, *, sharded):
    mine = mean_of_all(grads)
    if sharded:  # each device keeps its rows of the sum
        scatter = functools.partial(lax.psum_scatter, axis_name="d", tiled=True)
        return jax.tree.map(lambda g: scatter(g) / lax.axis_size("d"), mine)
    return lax.pmean(mine, "d")


def on_all_devices(x):
    return lax.pmin(x, "d"), lax.pmax(x, "d")


def in_shard_map(
    optimizer, *, sharded, check_vma=True, partly=False, over_runs=one_by_one
):
    mean = functools.partial(mean_over_devices, sharded=sharded)
    run = functools.partial(train, optimizer, mean, on_all_devices)
    return jax.jit(
        jax.shard_map(
            functools.partial(over_runs, run),
            mesh=mesh_of(d=4, m=2) if partly else mesh_of(d=8),
            in_specs=((P(None, None, "d"), P()),),
            out_specs=P(),
            check_vma=check_vma,
            axis_names={"d"},
        )
    )


def a_population(optimizer):
    """Each device has one run to itself, parameters, scaler and all."""
    run = functools.partial(train, optimizer, mean_of_all, same, own_scaler=True)
    return jax.jit(
        jax.shard_map(
            functools.partial(one_by_one, run),
            mesh=mesh_of(d=RUNS),
            in_specs=P("d"),
            out_specs=P("d"),
        )
    )


def in_pmap(optimizer, *, over_runs=one_by_one):
    mean = functools.partial(mean_over_devices, sharded=True)
    run = functools.partial(train, optimizer, mean, on_all_devices)
    mapped = jax.pmap(
        lambda grads, faults: over_runs(run, (grads, faults)),
        axis_name="d",
        in_axes=(0, None),
        out_axes=None,
    )

    def by_device(batches):
        grads, faults = batches
        first = jax.tree.map(lambda g: np.moveaxis(g, 2, 0)[:, :, :, None], grads)
        return mapped(first, faults)

    return by_device


jit_auto = functools.partial(in_jit, kind=AxisType.Auto)
jit_explicit = functools.partial(in_jit, kind=AxisType.Explicit)
vmapped = {"over_runs": side_by_side}
MODES: dict[str, Callable[..., Callable]] = {
    "one device": on_one_device,
    "vmap": functools.partial(on_one_device, **vmapped),
    **{f"jit, {name}": functools.partial(jit_auto, layout=name) for name in LAYOUTS},
    "jit, fully sharded, vmap": functools.partial(
        jit_auto, layout="fully sharded", **vmapped
    ),
    **{
        f"explicit mesh, {name}": functools.partial(jit_explicit, layout=name)
        for name in LAYOUTS
    },
    "explicit mesh, data parallel, vmap": functools.partial(
        jit_explicit, layout="data parallel", **vmapped
    ),
    **{
        f"shard_map, {name}, check_vma={check_vma}": functools.partial(
            in_shard_map, sharded=name == "sharded", check_vma=check_vma
        )
        for name in ("replicated", "sharded")
        for check_vma in (True, False)
    },
    "shard_map, vmap": functools.partial(in_shard_map, sharded=True, **vmapped),
    "shard_map, one axis automatic": functools.partial(
        in_shard_map, sharded=True, partly=True
    ),
    "shard_map, a population": a_population,
    "pmap": in_pmap,
    "pmap, vmap": functools.partial(in_pmap, **vmapped),
}


def campaign(mode, optimizer, faults, seed=0):
    """Runs one mode with one optimizer until enough faults were injected."""
    total: collections.Counter[str] = collections.Counter()
    run = MODES[mode](OPTIMIZERS[optimizer])
    pair = (list(MODES).index(mode), list(OPTIMIZERS).index(optimizer))
    for draws in itertools.count():
        if total["faults"] >= faults:
            return total
        counts = run(draw([seed, *pair, draws]))
        total.update({name: int(np.sum(n)) for name, n in counts.items()})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    total: collections.Counter[str] = collections.Counter()
    each = -(-arguments.faults // (len(MODES) * len(OPTIMIZERS)))
    for mode in MODES:
        for optimizer in OPTIMIZERS:
            counts = campaign(mode, optimizer, each, arguments.seed)
            total.update(counts)
            print(f"{mode:>40} {optimizer:>10}", dict(counts), flush=True)
    print("total", dict(total))
    raise SystemExit(
        any(total[n] for n in ("contaminated", "good steps lost", "disagreements"))
    )
