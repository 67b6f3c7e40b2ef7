"""What reaches the early layers of a deep float16 network, under one scale and under many.

    python benchmarks/layers.py

A plain MLP of 32 tanh layers on handwritten digits, whose gradients shrink to less than half
from layer to layer. Prints the table of the README.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import optax_dls as dls

LAYERS = 32
WIDTH = 64
STEPS = 200
GROUPS = {"1-8": slice(0, 8), "9-16": slice(8, 16), "17-24": slice(16, 24)}
GROUPS |= {"25-32": slice(24, 32)}
Params = tuple[jax.Array, jax.Array]  # weights and biases of all layers


@functools.cache
@jax.jit
def start_params() -> Params:
    weights, biases = jax.random.split(jax.random.key(0))
    return (
        0.42 / WIDTH**0.5 * jax.random.normal(weights, (LAYERS + 1, WIDTH, WIDTH)),
        0.5 * jax.random.normal(biases, (LAYERS + 1, WIDTH)),
    )


def layer(params: Params, x: jax.Array, dtype: str) -> jax.Array:
    weights, bias = params
    return jnp.tanh(x.astype(dtype) @ weights.astype(dtype) + bias.astype(dtype))


def loss_fn(
    params: Params,
    batch: tuple[jax.Array, jax.Array],
    dtype: str,
    wrap: Callable[[Callable], Callable],
) -> jax.Array:
    fn = wrap(functools.partial(layer, dtype=dtype))
    first, rest, (weights, bias) = (
        jax.tree.map(lambda p, part=part: p[part], params)
        for part in (0, slice(1, LAYERS), LAYERS)
    )
    x, _ = jax.lax.scan(lambda x, p: (fn(p, x), None), fn(first, batch[0]), rest)
    logits = x.astype(jnp.float32) @ weights[:, :10] + bias[:10]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean()


@functools.partial(jax.jit, static_argnames=("tx", "dtype", "wrap"))
def train(
    params: Params,
    batches: tuple[jax.Array, jax.Array],
    tx: optax.GradientTransformationExtraArgs,
    dtype: str,
    wrap: Callable[[Callable], Callable],
) -> tuple[Params, jax.Array, jax.Array]:
    """The trained parameters, the share of zeros among the weight gradients of each
    layer in the last step, and the skips."""

    def step(carry, batch):
        params, state = carry
        _, grads = dls.value_and_scaled_grad(loss_fn)(
            params, batch, dtype, wrap, state=state
        )
        zeros = jnp.mean(grads[0][:LAYERS] == 0, (1, 2))
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), zeros

    (params, state), zeros = jax.lax.scan(step, (params, tx.init(params)), batches)
    return params, zeros.mean(0), state.scaler.total_skips


def alignment(a: Params, b: Params, layers: slice) -> float:
    """The cosine similarity of the total change of some layers in two runs."""

    def change(params: Params) -> np.ndarray:
        return np.ravel((params[0] - start_params()[0])[:LAYERS][layers])

    x, y = change(a), change(b)
    length = np.linalg.norm(x) * np.linalg.norm(y)
    return float(x @ y / length) if length else 0.0


def digits(steps: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    data = load_digits()
    order = np.random.default_rng(seed).integers(len(data.target), size=(steps, 64))
    return (data.data[order] / 16).astype(np.float32), data.target[order]


def alone(fn: Callable) -> Callable:
    return fn


def runs() -> dict[str, tuple[Params, np.ndarray, int]]:
    start = start_params(), digits(STEPS)
    adam = optax.adam(1e-4, eps=1e-20)
    scaled = dls.dynamic_loss_scaling(adam, init_scale=2.0**16, growth_interval=20)
    return {
        "float32": train(*start, dls.no_loss_scaling(adam), "float32", alone),
        "float16, one scale": train(*start, scaled, "float16", alone),
        "float16, layer_scaling": train(*start, scaled, "float16", dls.layer_scaling),
    }


def main() -> None:
    results = runs()
    reference = results["float32"][0]
    print(
        "| layers | " + " | ".join(f"{name}: zeros, cosine" for name in results) + " |"
    )
    print("| --- |" + " --- |" * len(results))
    for name, layers in GROUPS.items():
        cells = [
            f"{np.mean(zeros[layers]):.0%}, {alignment(params, reference, layers):.2f}"
            for params, zeros, _ in results.values()
        ]
        print(f"| {name} | " + " | ".join(cells) + " |")
    print("skips:", {name: int(skips) for name, (*_, skips) in results.items()})


if __name__ == "__main__":
    main()
