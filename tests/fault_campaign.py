"""Faults by the thousand: python tests/fault_campaign.py --faults 1000000.

Every run trains a small model for 64 steps while inf, -inf, NaN and float16 overflow
strike at random: in any leaf, element, device, micro-batch and step. Each step is judged
on the spot, bit for bit: after a fault nothing may have moved, on a good step everything
must have, and at all times all devices must agree.
"""

import argparse
import collections
import functools
import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_dls as dls

DEVICES, MICRO_BATCHES, STEPS, RUNS = 8, 2, 64, 8
SHAPES = {"matrix": (8, 3), "vector": (8,)}
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
SETTINGS = {"init_scale": 256.0, "min_scale": 16.0, "max_scale": 4096.0}


def draw(seed):
    """Gradients of every run, step, device and micro-batch, and which steps are bad."""
    rng = np.random.default_rng(seed)
    lead = (RUNS, STEPS, DEVICES, MICRO_BATCHES)
    grads = {
        leaf: rng.uniform(0.1, 1.0, (*lead, *shape)).astype(np.float16)
        for leaf, shape in SHAPES.items()
    }
    bad = rng.random((RUNS, STEPS)) < 0.4
    for run, step in np.argwhere(bad):
        leaf = grads[rng.choice(list(SHAPES))]
        where = tuple(rng.integers(n) for n in leaf.shape[2:])
        leaf[(run, step, *where)] = rng.choice(FAULTS)
    return grads, bad


def same_bits(x, y):
    return jnp.all(
        jnp.stack(
            [
                jnp.array_equal(a, b)
                for a, b in zip(*map(jax.tree.leaves, (x, y)), strict=True)
            ]
        )
    )


def train(optimizer, mean, everywhere, batches):
    """One run; counts of what happened. The hooks say how devices work together.

    mean: from gradients of one device, or of all, to those of the parameters at hand.
    everywhere: whether a flag holds on all devices.
    """
    grads, bad = batches
    tx = dls.dynamic_loss_scaling(optimizer, growth_interval=3, **SETTINGS)

    def step(carry, batch):
        params, state = carry
        grads, is_bad = batch
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
        counts = {
            "faults": is_bad,
            "skipped": skipped,
            "contaminated": is_bad & ~everywhere(kept),
            "good steps lost": ~is_bad & ~everywhere(moved & ~skipped),
            "disagreements": everywhere(skipped) != ~everywhere(~skipped),
        }
        return (new_params, new_state), counts

    first = mean(jax.tree.map(lambda g: g[0].astype(jnp.float32), grads))
    params = jax.tree.map(jnp.ones_like, first)
    scaler, inner_state = tx.init(params)
    # In shard_map some optimizers start from zeros that JAX takes for equal everywhere.
    nought = jnp.zeros_like(jax.tree.leaves(first)[0].ravel()[0])
    inner_state = jax.tree.map(lambda x: x + nought.astype(x.dtype), inner_state)
    start = (params, dls.LossScalingState(scaler, inner_state))
    _, counts = lax.scan(step, start, (grads, bad))
    return jax.tree.map(jnp.sum, counts)


def mesh_of(kind=AxisType.Auto):
    return jax.make_mesh((DEVICES,), ("d",), axis_types=(kind,))


def mean_of_all(grads):
    return jax.tree.map(lambda g: jnp.mean(g, (0, 1)), grads)


def on_one_device(optimizer, batches, *, over_runs):
    run = functools.partial(train, optimizer, mean_of_all, lambda flag: flag)
    return jax.jit(functools.partial(over_runs, run))(batches)


def one_by_one(run, batches):
    """All runs, one after the other: unlike vmap, this keeps the lax.cond."""
    return lax.map(run, batches)


def side_by_side(run, batches):
    return jax.vmap(run)(batches)


def jit_on_a_mesh(optimizer, batches, *, spec):
    """Gradients live on their devices, and parameters by rows where ``spec`` says so."""
    mesh = mesh_of()

    def mean(grads):
        return lax.with_sharding_constraint(
            mean_of_all(grads), NamedSharding(mesh, spec)
        )

    run = functools.partial(train, optimizer, mean, lambda flag: flag)
    grads = jax.device_put(batches[0], NamedSharding(mesh, P(None, None, "d")))
    return jax.jit(functools.partial(one_by_one, run))((grads, batches[1]))


def on_an_explicit_mesh(optimizer, batches):
    mesh = mesh_of(AxisType.Explicit)
    with jax.set_mesh(mesh):
        run = functools.partial(train, optimizer, mean_of_all, lambda flag: flag)
        grads = jax.device_put(batches[0], NamedSharding(mesh, P(None, None, "d")))
        return jax.jit(functools.partial(one_by_one, run))((grads, batches[1]))


def mean_over_devices(grads, *, sharded):
    mine = mean_of_all(grads)
    if sharded:  # each device keeps its row of the sum
        scatter = functools.partial(lax.psum_scatter, axis_name="d", tiled=True)
        return jax.tree.map(lambda g: scatter(g) / DEVICES, mine)
    return lax.pmean(mine, "d")


def on_all_devices(flag):
    return lax.pmin(flag.astype(jnp.int32), "d") > 0


def in_shard_map(optimizer, batches, *, sharded, check_vma):
    mean = functools.partial(mean_over_devices, sharded=sharded)
    run = functools.partial(train, optimizer, mean, on_all_devices)
    return jax.jit(
        jax.shard_map(
            functools.partial(one_by_one, run),
            mesh=mesh_of(),
            in_specs=((P(None, None, "d"), P()),),
            out_specs=P(),
            check_vma=check_vma,
        )
    )(batches)


def in_pmap(optimizer, batches):
    mean = functools.partial(mean_over_devices, sharded=True)
    run = functools.partial(train, optimizer, mean, on_all_devices)
    by_device = jax.tree.map(lambda g: np.moveaxis(g, 2, 0)[:, :, :, None], batches[0])
    step = jax.pmap(
        lambda grads, bad: one_by_one(run, (grads, bad)),
        axis_name="d",
        in_axes=(0, None),
        out_axes=None,
    )
    return step(by_device, batches[1])


MODES = {
    "one device": functools.partial(on_one_device, over_runs=one_by_one),
    "vmap": functools.partial(on_one_device, over_runs=side_by_side),
    "jit": functools.partial(jit_on_a_mesh, spec=P()),
    "jit, sharded": functools.partial(jit_on_a_mesh, spec=P("d")),
    "explicit mesh": on_an_explicit_mesh,
    **{
        f"shard_map, {name}, check_vma={check_vma}": functools.partial(
            in_shard_map, sharded=name == "sharded", check_vma=check_vma
        )
        for name in ("replicated", "sharded")
        for check_vma in (True, False)
    },
    "pmap": in_pmap,
}


def campaign(mode, optimizer, faults, seed=0):
    """Runs one mode with one optimizer until enough faults were injected."""
    total = collections.Counter()
    while total["faults"] < faults:
        counts = MODES[mode](OPTIMIZERS[optimizer], draw(seed))
        total.update({name: int(np.sum(n)) for name, n in counts.items()})
        seed += 1
    return total


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    total = collections.Counter()
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
