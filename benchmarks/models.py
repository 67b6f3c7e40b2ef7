"""What is trained: gradients that come from elsewhere, an MLP, a transformer."""

import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from peers import Params


def given(params: Params, scale: jax.Array, batch: Params) -> Params:
    """Gradients that come from elsewhere, for the update alone."""
    del params, scale
    return batch


def leaves_of(number: int, size: int) -> tuple[Params, dict[str, Params]]:
    """Parameters in float32 and scaled gradients in float16, good ones and bad ones."""
    params = {f"w{i}": jnp.full(size, 0.5) for i in range(number)}
    good = {name: jnp.full(size, 0.01, jnp.float16) for name in params}
    last = f"w{number - 1}"
    bad = good | {last: good[last].at[-1].set(jnp.inf)}
    return params, {"": good, ", overflow": bad}


def normal(seed: int, shape: tuple[int, ...]) -> jax.Array:
    """Drawn by NumPy: JAX would compile a program for every shape."""
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def mlp_loss(params: Params, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
    x, labels = batch
    *hidden, last = (params[name].astype(jnp.float16) for name in sorted(params))
    x = x.astype(jnp.float16)
    for weights in hidden:
        x = jax.nn.gelu(x @ weights)
    logits = (x @ last).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def mlp(width: int = 512) -> tuple[Params, tuple[jax.Array, jax.Array]]:
    sizes = [256, width, width, width, width, 10]
    params = {
        f"w{i}": normal(i, (a, b)) / a**0.5
        for i, (a, b) in enumerate(itertools.pairwise(sizes))
    }
    return params, (normal(len(sizes), (32, 256)), jnp.arange(32) % 10)


def transformer_loss(params: Params, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Three layers of one head each, on rows of tokens."""
    tokens, labels = batch
    half = {name: p.astype(jnp.float16) for name, p in params.items()}
    x = half["embedding"][tokens]
    for i in range(3):
        q, k, v = (x @ half[f"{name}{i}"] for name in "qkv")
        scores = jnp.einsum("bid,bjd->bij", q, k) / jnp.float16(x.shape[-1] ** 0.5)
        x = x + jnp.einsum("bij,bjd->bid", jax.nn.softmax(scores), v) @ half[f"o{i}"]
        x = x + jax.nn.gelu(x @ half[f"up{i}"]) @ half[f"down{i}"]
        mean = jnp.mean(x.astype(jnp.float32) ** 2, -1, keepdims=True)
        x = (x / jnp.sqrt(mean + 1e-5).astype(jnp.float16)) * half[f"norm{i}"]
    logits = (x @ half["embedding"].T).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def transformer(width: int = 128) -> tuple[Params, tuple[jax.Array, jax.Array]]:
    shapes: dict[str, tuple[int, ...]] = {"embedding": (256, width)}
    for i in range(3):
        shapes |= {f"{name}{i}": (width, width) for name in "qkvo"}
        shapes |= {f"up{i}": (width, 4 * width), f"down{i}": (4 * width, width)}
        shapes |= {f"norm{i}": (1, 1, width)}
    params = {
        name: jnp.ones(shape) if "norm" in name else normal(i, shape) / 16
        for i, (name, shape) in enumerate(shapes.items())
    }
    tokens = jnp.arange(4 * 32).reshape(4, 32) * 7 % 256
    return params, (tokens, (tokens + 1) % 256)


def grads_of(loss_fn: Callable) -> Callable:
    """Gradients of the scaled loss, as a method's step asks for them."""

    def scaled_grads(params: Params, scale: jax.Array, batch: object) -> Params:
        return jax.grad(lambda p: loss_fn(p, batch) * scale)(params)

    return scaled_grads
