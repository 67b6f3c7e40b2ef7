"""Counts of compiled programs on one device, as JSON: python count_worker.py.

In a process of its own, since the tests share eight fake devices.
"""

import json
import re

import jax
import jax.export
import jax.numpy as jnp
import optax

import optax_dls as dls

adamw = optax.adamw(1e-3)
ALL = ("bare", "none", "dynamic", "limit")
CASES = {  # wrappers, leaves, entries of each, dtypes of parameters and of gradients
    "one leaf": (ALL, 1, 1_000_000, jnp.float32, jnp.float16),
    "float32 gradients": (ALL[:3], 1, 1_000_000, jnp.float32, jnp.float32),
    "float16 parameters": (["dynamic"], 1, 1_000_000, jnp.float16, jnp.float16),
    "64 leaves": (ALL, 64, 15_625, jnp.float32, jnp.float16),
    "large leaves": (["dynamic"], 8, 100_000, jnp.float32, jnp.float16),
}


def count(tx, leaves, size, dtype, grad_dtype):
    params = [jnp.ones(size, dtype)] * leaves
    grads = [jnp.ones(size, grad_dtype)] * leaves

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    arguments = jax.eval_shape(lambda: (params, tx.init(params), grads))
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(*arguments).compile()
    program, memory = compiled.as_text(), compiled.memory_analysis()
    arrays = rf"= [a-z]+[0-9]+\[{size}\]\S*"
    return {
        "temporary": memory.temp_size_in_bytes,
        "aliased": memory.alias_size_in_bytes,
        "copies": len(re.findall(rf"{arrays} copy\(", program)),
        "conditionals": len(re.findall(r" conditional\(", program)),
        "reductions": len(re.findall(r" reduce\(", program)),
    }


def compilations():
    """Of five steps of which the third overflows and the fifth grows the scale."""
    tx = dls.dynamic_loss_scaling(adamw, growth_interval=2)
    params = jnp.ones(8)
    traces: list[None] = []

    @jax.jit
    def step(params, state, grads):
        traces.append(None)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for factor in (1.0, 1.0, jnp.inf, 1.0, 1.0):
        params, state = step(params, state, jnp.full(8, factor))
    return len(traces)


def exports_an_open_size():
    (size,) = jax.export.symbolic_shape("n")
    params = jax.ShapeDtypeStruct((size,), jnp.float32)
    tx = dls.dynamic_loss_scaling(adamw)
    arguments = params, jax.eval_shape(tx.init, params), params
    exported = jax.export.export(jax.jit(tx.update))(*arguments)
    return exported.in_avals[0].shape == (size,)


if __name__ == "__main__":
    wrappers = {"bare": lambda tx: tx, "dynamic": dls.dynamic_loss_scaling}
    wrappers["limit"] = lambda tx: dls.dynamic_loss_scaling(tx, gradient_limit=65504.0)
    wrappers["none"] = dls.no_loss_scaling
    counts = {
        case: {name: count(wrappers[name](adamw), *sizes) for name in names}
        for case, (names, *sizes) in CASES.items()
    }
    measured = {"counts": counts, "compilations": compilations()}
    print(json.dumps(measured | {"exports": exports_an_open_size()}))
