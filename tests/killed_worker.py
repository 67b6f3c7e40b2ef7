"""A training process that saves every step, and that a test kills.

It is forked from a server that has imported everything, so nothing may run on import.
"""

import os
import pathlib
from multiprocessing.connection import Connection

import flax.serialization
import jax
import jax.numpy as jnp
import optax

import optax_dls as dls

STEPS = 300
tx = dls.dynamic_loss_scaling(optax.adam(1e-2), init_scale=1024.0, growth_interval=10)


@jax.jit
def step(run):
    params, state, t = run
    grads = jnp.sin(params + t) * dls.loss_scale(state)
    grads = jnp.where(t % 25 == 24, jnp.nan, grads)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, t + 1


def train_until_killed(file: pathlib.Path, parent: Connection) -> None:
    """Goes on from the file, if there is one, to the last step.

    Sends how many steps are done, at the start and after each, and takes one whenever it
    is sent something.
    """
    params = jnp.linspace(-1, 1, 8)
    run = (params, tx.init(params), jnp.float32(0))
    if file.exists():
        run = flax.serialization.from_bytes(run, file.read_bytes())
    parent.send(int(run[2]))
    while run[2] < STEPS:
        parent.recv()
        run = step(run)
        part = file.with_suffix(".part")
        part.write_bytes(flax.serialization.to_bytes(run))
        os.replace(part, file)  # whole or not at all
        parent.send(int(run[2]))
