"""One autoencoder on handwritten digits, trained in any precision."""

from collections.abc import Iterator
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from sklearn.datasets import load_digits

import optax_dls as dls

WIDTHS = (128, 64, 16, 64, 128, 64)
BATCH_SIZE = 512
CHUNK = 20  # steps in one call, between two looks at the numbers
# This weight, as of an auxiliary loss, makes the gradients as small as they often are in a
# large network. Adam makes up for it as long as they are not zero.
LOSS_WEIGHT = 1e-3


class Autoencoder(nn.Module):
    """64-128-64-16-64-128-64 with GELU; float32 parameters, compute in ``dtype``."""

    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for width in WIDTHS[:-1]:
            x = nn.gelu(nn.Dense(width, dtype=self.dtype)(x))
        return nn.Dense(WIDTHS[-1], dtype=self.dtype)(x)


class Log(NamedTuple):
    """What a run did, step by step. Each array has shape (steps,)."""

    loss: jax.Array  # mean squared error of the batch
    loss_scale: jax.Array  # the scale that the step used
    skipped: jax.Array  # bool
    zero_share: jax.Array  # share of gradient entries that are exactly zero


def load_images() -> jax.Array:
    """1797 images of 8 x 8 pixels, shape (1797, 64), in [0, 1]."""
    return jnp.asarray(load_digits().data / 16, jnp.float32)


def train(
    tx: optax.GradientTransformationExtraArgs,
    dtype: jnp.dtype,
    steps: int,
    seed: int,
) -> Iterator[Log]:
    """Yields the log of each chunk of steps. Runs of one seed see the same batches."""
    images = load_images()
    model = Autoencoder(dtype)
    init_key, batch_key = jax.random.split(jax.random.key(seed))
    params = model.init(init_key, images[:1])

    def loss_fn(params: optax.Params, batch: jax.Array) -> tuple[jax.Array, jax.Array]:
        error = jnp.asarray(model.apply(params, batch), jnp.float32) - batch
        mse = jnp.mean(error**2)
        return LOSS_WEIGHT * mse, mse

    def step(carry: tuple, key: jax.Array) -> tuple[tuple, Log]:
        params, opt_state = carry
        batch = jax.random.choice(key, images, (BATCH_SIZE,), replace=False)
        (_, mse), grads = dls.value_and_scaled_grad(loss_fn, has_aux=True)(
            params, batch, state=opt_state
        )
        updates, new_opt_state = tx.update(grads, opt_state, params)
        leaves = jax.tree.leaves(grads)
        zeros = sum(jnp.sum(g == 0) for g in leaves) / sum(g.size for g in leaves)
        log = Log(
            loss=mse,
            loss_scale=dls.loss_scale(opt_state),
            skipped=dls.scaler_state(new_opt_state).consecutive_skips > 0,
            zero_share=zeros,
        )
        return (optax.apply_updates(params, updates), new_opt_state), log

    run_chunk = jax.jit(lambda carry, keys: jax.lax.scan(step, carry, keys))
    carry = (params, tx.init(params))
    for first in range(0, steps, CHUNK):
        indices = jnp.arange(first, min(first + CHUNK, steps))
        keys = jax.vmap(lambda t: jax.random.fold_in(batch_key, t))(indices)
        carry, log = run_chunk(carry, keys)
        yield log
