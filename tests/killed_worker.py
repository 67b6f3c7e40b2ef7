"""Trains to step 1500, saves every step, resumes: python killed_worker.py FILE."""

import os
import pathlib
import sys
import time

import flax.serialization
import jax
import jax.numpy as jnp
import optax

import optax_dls as dls

file = pathlib.Path(sys.argv[1])
tx = dls.dynamic_loss_scaling(optax.adam(1e-2), init_scale=1024.0, growth_interval=50)


@jax.jit
def step(run):
    params, state, t = run
    grads = jnp.sin(params + t) * dls.loss_scale(state)
    grads = jnp.where(t % 90 == 89, jnp.nan, grads)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, t + 1


start = jnp.linspace(-1, 1, 8)
run = (start, tx.init(start), jnp.float32(0))
if file.exists():
    run = flax.serialization.from_bytes(run, file.read_bytes())
jax.block_until_ready(step(run))  # compiled before the first kill can come
print(int(run[2]), flush=True)
while run[2] < 1500:
    run = step(run)
    part = file.with_suffix(".part")
    part.write_bytes(flax.serialization.to_bytes(run))
    os.replace(part, file)  # whole or not at all
    time.sleep(0.001)
