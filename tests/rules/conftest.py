"""What the rules' tests share: runs that are compiled once for every length."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_dls as dls

LONGEST = 400
FLOATS = ("init_scale", "growth_factor", "backoff_factor", "min_scale", "max_scale")
STEPS = ("growth_interval", "recovery_interval", "hysteresis")


@functools.partial(jax.jit, static_argnames="rule")
def scan_rule(rule, finite, sizes):
    """The rule on its own: its state after every step, and the scales."""

    def step(carry, seen):
        (scale, state), last_finite = carry
        is_finite, size = seen
        info = {"last_finite": last_finite, "largest_gradient": size}
        after = rule.update(
            is_finite, scale, state, **{name: info[name] for name in rule.needs}
        )
        return (after, is_finite), after

    start = (rule.init(), jnp.array(True))
    _, (scales, states) = jax.lax.scan(step, start, (finite, sizes))
    return scales, states


@pytest.fixture(scope="session")
def follow():
    """log2 of the scale after each flag, . for finite and x for overflow; the last state.

    The third argument is the largest gradient of each step, or of all.
    """

    def follow(rule, flags, largest=1e-3):
        finite, sizes = np.ones(LONGEST, bool), np.ones(LONGEST, np.float32)
        finite[: len(flags)] = [flag == "." for flag in flags]
        sizes[: len(flags)] = largest
        scales, states = scan_rule(rule, finite, sizes)
        last = jax.tree.map(lambda x: x[len(flags) - 1], states)
        return np.log2(scales[: len(flags)]).tolist(), last

    return follow


@functools.partial(jax.jit, static_argnames="refill")
def scan_wrapper(settings, finite, refill):
    """The first scale, and scale, skip and count after each step of the whole wrapper."""
    tx = dls.dynamic_loss_scaling(optax.sgd(1.0), hysteresis_refill=refill, **settings)
    params = jnp.zeros(())

    def step(state, is_finite):
        grads = jnp.where(is_finite, dls.loss_scale(state), jnp.inf)
        _, state = tx.update(grads, state, params)
        return state, (
            dls.loss_scale(state),
            state.scaler.consecutive_skips > 0,
            state.scaler.rule_state.growth_count,
        )

    state = tx.init(params)
    _, per_step = jax.lax.scan(step, state, finite)
    return dls.loss_scale(state), *per_step


@pytest.fixture(scope="session")
def run_dynamic():
    """Settings and flags of finite steps -> first scale; scales, skips, counts."""
    parameters = inspect.signature(dls.rules.dynamic).parameters
    defaults = {name: parameters[name].default for name in (*FLOATS, *STEPS)}

    def run(settings, finite, refill="growth"):
        padded = np.ones(LONGEST, bool)
        padded[: len(finite)] = finite
        # As arrays, and always all of them, so that they are no part of the program.
        arrays = {
            name: value
            if value is None
            else jnp.asarray(value, jnp.float32 if name in FLOATS else jnp.int32)
            for name, value in (defaults | settings).items()
        }
        first, *per_step = scan_wrapper(arrays, padded, refill)
        return np.asarray(first), *(np.asarray(x)[: len(finite)] for x in per_step)

    return run


@pytest.fixture(scope="session")
def scales_of(run_dynamic):
    """log2 of the scale after each flag, . for finite and x for overflow; the counts."""

    def scales_of(flags, *, refill="growth", **settings):
        finite = np.array([flag == "." for flag in flags])
        _, scales, _, counts = run_dynamic(settings, finite, refill)
        return np.log2(scales).astype(int).tolist(), counts.tolist()

    return scales_of
