"""One process of several: trains with sharded parameters and prints what it saw.

python process_worker.py PORT PROCESSES INDEX DEVICES [die]
"""

import json
import os
import sys

port, processes, index, devices = map(int, sys.argv[1:5])
dies = sys.argv[5:] == ["die"]
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_dls as dls

if processes > 1:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        f"127.0.0.1:{port}", processes, index, heartbeat_timeout_seconds=10
    )

mesh = jax.make_mesh((jax.device_count(),), ("d",), axis_types=(AxisType.Auto,))
sharded, replicated = NamedSharding(mesh, P("d")), NamedSharding(mesh, P())
tx = dls.dynamic_loss_scaling(optax.adam(1e-2), init_scale=1024.0, growth_interval=5)
BAD_STEPS = (7, 8, 30)


def on_all_devices(array, sharding):
    return jax.make_array_from_callback(array.shape, sharding, lambda i: array[i])


rng = np.random.default_rng(0)
start = rng.normal(size=(16, 4)).astype(np.float32) / 4
data = on_all_devices(rng.normal(size=(32, 16)).astype(np.float32), sharded)
params = on_all_devices(start, sharded)
specs = optax.tree.map_params(
    tx,
    lambda _: sharded,
    jax.eval_shape(tx.init, params),
    transform_non_params=lambda _: replicated,
)
state = jax.jit(tx.init, out_shardings=specs)(params)


def loss_fn(params, x):
    return jnp.mean((jnp.tanh(x @ params) @ params.T - x) ** 2)


@jax.jit
def step(params, state, data, is_bad):
    _, grads = dls.value_and_scaled_grad(loss_fn)(params, data, state=state)
    # The last row of the gradient lives on the last device of the last process.
    grads = grads.at[-1, 0].set(jnp.where(is_bad, jnp.inf, grads[-1, 0]))
    grads = jax.lax.with_sharding_constraint(grads, sharded)
    updates, state = tx.update(grads, state, params)
    params = optax.apply_updates(params, updates)
    return jax.lax.with_sharding_constraint(params, sharded), state


log = []
for t in range(50):
    if dies and t == 10:
        jax.block_until_ready(state)
        print("ten steps", flush=True)
        if index == processes - 1:
            os._exit(42)
    params, state = step(params, state, data, t in BAD_STEPS)
    log.append({name: x.item() for name, x in dls.metrics(state).items()})
whole = jax.jit(lambda x: x, out_shardings=replicated)(params)
print(
    json.dumps({"log": log, "params": np.asarray(whole.addressable_data(0)).tolist()})
)
