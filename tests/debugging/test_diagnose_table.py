"""A table of runs: what is wrong is found, under its name, and nothing else is.

Most of them are trained, in one compiled scan whose faults are arguments. Where it is a
matter of the scale over many steps, a rule moves it; where it is one of the columns alone,
they are written down.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import optax_dls as dls

pytestmark = pytest.mark.standard_promotion
STEPS = 400
KEYS = jax.random.split(jax.random.key(0), 4)
X = jax.random.normal(KEYS[0], (STEPS, 32, 16))
LABELS = jnp.argmax(X @ jax.random.normal(KEYS[1], (16, 10)), axis=-1)
PARAMS = {
    "in": jax.random.normal(KEYS[2], (16, 32)) / 4,
    "out": jax.random.normal(KEYS[3], (32, 10)) / 6,
}
NONE, NAN = jnp.ones(STEPS), jnp.nan
HEALTHY: dict[str, object] = {
    "rate": 0.5,
    "adam": False,
    "weight": 1.0,  # of the loss
    "is_policy": False,  # a loss around zero
    "is_half": False,  # a float16 loss
    "tells_value": False,  # value=loss
    "forgets_scale": False,  # hands over gradients that are unscaled already
    "rounds": False,  # float16 parameters
    "decay": 0.0,  # chained behind the wrapper
    "init_scale": 2.0**15,
    "min_scale": 2.0**-14,
    "max_scale": 2.0**32,
    "growth_interval": 100,
    "recovery_interval": 10,  # None for the classic rule
    "loss_factor": NONE,  # NaN for a bad batch
    "gradient_factor": NONE,  # NaN for one whose gradient alone is bad
    "rate_factor": NONE,
}


def sgd_or_adam(rate, adam):
    def update(grads, state, params=None):
        updates, state = optax.scale_by_adam().update(grads, state, params)
        return jax.tree.map(
            lambda u, g: -rate * jnp.where(adam, u, g), updates, grads
        ), state

    return optax.GradientTransformation(optax.scale_by_adam().init, update)


def wrapped(wrapper, knobs, rate):
    optimizer = sgd_or_adam(rate, knobs["adam"])
    settings = {
        name: knobs[name] for name in HEALTHY if name.endswith(("scale", "interval"))
    }
    settings.pop("forgets_scale", None)
    if wrapper == "no scaling":
        return dls.no_loss_scaling(optimizer)
    rule = dls.rules.dynamic(**settings)
    if wrapper == "retrying":
        return dls.loss_scaling(optimizer, dls.rules.retrying(rule), check_updates=True)
    return dls.loss_scaling(optimizer, rule)


@functools.partial(jax.jit, static_argnames="wrapper")
def run(knobs, wrapper):
    dtype = jnp.float32 if wrapper == "no scaling" else jnp.float16
    retries: dict[str, Any] = {"max_retries": 3} if wrapper == "retrying" else {}

    def loss_fn(params, x, label, factor):
        half = jax.tree.map(lambda p: p.astype(dtype), params)
        logits = jax.nn.relu(x.astype(dtype) @ half["in"]) @ half["out"]
        losses = optax.softmax_cross_entropy_with_integer_labels(
            logits.astype(jnp.float32), label
        )
        reward = x[:, 0] * jnp.exp(-losses)  # an advantage times a probability
        losses = jnp.where(knobs["is_policy"], -reward, losses)
        loss = knobs["weight"] * factor * jnp.mean(losses)
        rounded = loss.astype(jnp.float16).astype(jnp.float32)
        return jnp.where(knobs["is_half"], rounded, loss)

    def step(carry, batch):
        params, state = carry
        x, label, loss_factor, gradient_factor, rate_factor = batch
        tx = wrapped(wrapper, knobs, knobs["rate"] * rate_factor)
        loss, grads, *after_retries = dls.value_and_scaled_grad(loss_fn, **retries)(
            params, x, label, loss_factor, state=state
        )
        (state,) = after_retries or (state,)
        divisor = jnp.where(knobs["forgets_scale"], dls.loss_scale(state), 1)
        grads = jax.tree.map(lambda g: gradient_factor * g / divisor, grads)
        value = jnp.where(knobs["tells_value"], loss, 0.0)
        updates, state = tx.update(grads, state, params, value=value)
        updates = jax.tree.map(lambda u, p: u - knobs["decay"] * p, updates, params)
        params = optax.apply_updates(params, updates)
        half = jax.tree.map(lambda p: p.astype(jnp.float16).astype(p.dtype), params)
        params = jax.tree.map(
            lambda p, h: jnp.where(knobs["rounds"], h, p), params, half
        )
        seen = {
            "update_norm": optax.tree.norm(updates),
            "param_norm": optax.tree.norm(params),
        }
        return (params, state), {**dls.metrics(state), "loss": loss, **seen}

    factors = (knobs["loss_factor"], knobs["gradient_factor"], knobs["rate_factor"])
    state = wrapped(wrapper, knobs, knobs["rate"]).init(PARAMS)
    return lax.scan(step, (PARAMS, state), (X, LABELS, *factors))[1]


def train(wrapper="dynamic", without=(), **faults):
    assert set(faults) <= set(HEALTHY)
    columns = run({**HEALTHY, **faults}, wrapper)
    kept = {k: np.asarray(v) for k, v in columns.items() if k not in without}
    return {"step": np.arange(STEPS), **kept}


@functools.partial(jax.jit, static_argnames="recovery_interval")
def move(bad, fits, recovery_interval):
    rule = dls.rules.dynamic(recovery_interval=recovery_interval)

    def step(carry, batch):
        loss_scale, rule_state, streak, total = carry
        is_bad, largest = batch
        finite = ~is_bad & (jnp.log2(loss_scale) <= largest)
        loss_scale, rule_state = rule.update(finite, loss_scale, rule_state)
        streak, total = (
            jnp.where(finite, 0, streak + 1),
            jnp.where(finite, total, total + 1),
        )
        seen = (loss_scale, finite, streak, total)
        return (loss_scale, rule_state, streak, total), seen

    zero = jnp.zeros((), jnp.int32)
    return lax.scan(step, (*rule.init(), zero, zero), (bad, fits))[1]


def moved(bad, fits=20.0, *, recovery_interval=None, **columns):
    """Columns of a rule, the classic one by default, without a training.

    Args:
      bad: batches that overflow at any scale; shape (steps,).
      fits: log2 of the largest scale that the others take.
      recovery_interval: of the rule.
      **columns: further ones.
    """
    fits = jnp.broadcast_to(jnp.float32(fits), bad.shape)
    seen = move(jnp.asarray(bad), fits, recovery_interval)
    names = ("loss_scale", "grads_finite", "consecutive_skips", "total_skips")
    values = map(np.asarray, seen)
    return {
        "step": np.arange(bad.size),
        **dict(zip(names, values, strict=True)),
        **columns,
    }


def now_and_then(n, every, seed=0):
    """Bad batches that come by chance."""
    return np.random.default_rng(seed).random(n) < 1 / every


def moved_formerly(bad):
    """Columns of the former default: it came back from several overflows in a row only."""
    exponent, first, goal, count, streak = 15, 15, -np.inf, 0, 0
    exponents = []
    for is_bad in bad:
        streak = streak + 1 if is_bad else 0
        first = exponent if streak == 1 else first
        if is_bad:
            goal = first - 1 if streak > 1 else -np.inf
            exponent, count = exponent - 1, 0
        elif (count := count + 1) >= (10 if exponent < goal else 2000):
            exponent, count = exponent + 1, 0
        exponents.append(exponent)
    scale = 2.0 ** np.array(exponents)
    return written(bad.size, skips=np.flatnonzero(bad), scale=scale)


def at(steps, value, base=NONE):
    return base.at[steps].set(value)


def written(n, loss=None, skips=(), scale=2.0**15, **columns):
    """Columns without a training: the scale as given, and skips at some steps."""
    skipped = np.isin(np.arange(n), skips)
    streak = np.zeros(n, np.int32)
    for i in np.flatnonzero(skipped):
        streak[i] = streak[i - 1] + 1 if i else 1
    columns |= {} if loss is None else {"loss": np.asarray(loss, np.float64)}
    return {
        "step": np.arange(n),
        "loss_scale": np.broadcast_to(np.float32(scale), (n,)),
        "consecutive_skips": streak,
        "total_skips": np.cumsum(skipped),
        **columns,
    }


def only(columns, rows):
    return {name: column[rows] for name, column in columns.items()}


def recorded(columns, every=1):
    """A History that hears of the loss at every k-th step."""
    history = dls.History()
    for i in range(len(columns["step"])):
        row = {k: v[i] for k, v in columns.items() if k != "step"}
        if i % every:
            row.pop("loss", None)
        history.append(row)
    return history


class Told:
    """What a history with settings looks like."""

    def __init__(self, columns, **settings):
        self.arrays, self.settings = lambda: columns, settings

    def __iter__(self):
        return iter([dict(self.arrays())] * len(self.arrays()["step"]))


RNG = np.random.default_rng(0)
FALL = np.exp(-np.arange(STEPS) / 80) + 0.1 * RNG.random(STEPS)
NORMAL = RNG.normal(size=1000)
WANDER = np.convolve(RNG.normal(size=STEPS), np.ones(20) / 20, "same")
EVERY_20TH = np.arange(9, STEPS, 20)
NORMS = ("update_norm", "param_norm")
PROBES = {"init_scale": 2.0**24}  # too high: a search, and probes from there on
BURST = slice(150, 170)
FEW = now_and_then(20_000, 1000)
AND_A_BURST = now_and_then(5000, 300)
AND_A_BURST[2000:2012] = True
NEVER = np.zeros(10_000, bool)
TIME = np.arange(10_000)
NOISE = 0.3 * RNG.normal(size=10_000)
HEAVY = -0.7 * RNG.exponential(size=10_000)  # tails of a power law
ONE_EACH_EPOCH = np.zeros(6000, bool)
ONE_EACH_EPOCH[np.arange(0, 6000, 500) + RNG.integers(0, 500, 12)] = True
ZIGZAG = np.where(np.arange(STEPS) % 21 == 19, 2.0**16, 2.0**15)


def climbing(n, interval=20, start=15):
    """A scale that climbs to its ceiling and never overflows."""
    return 2.0 ** np.minimum(start + np.arange(n) // interval, 32)


HEALTHY_RUNS = {
    "SGD": lambda: train(),
    "Adam": lambda: train(adam=True, rate=0.01),
    "a blow-up at first that is overcome": lambda: train(adam=True, rate=0.1),
    "a warm-up of skips": lambda: train(init_scale=2.0**31),
    "a warm-up of skips, every seventh step": lambda: only(
        train(init_scale=2.0**31), slice(6, None, 7)
    ),
    "a search, and probes": lambda: train(**PROBES),
    "many probes of a short interval": lambda: train(**PROBES, growth_interval=15),
    "many probes, every fifth step": lambda: only(
        train(**PROBES, growth_interval=15), slice(4, None, 5)
    ),
    "many probes, with the settings": lambda: Told(
        train(**PROBES, growth_interval=15), growth_interval=15.0, min_scale=2.0**-14
    ),
    "resumed": lambda: only(train(**PROBES), slice(200, None)),
    "resumed between two skips": lambda: only(train(**PROBES), slice(3, 300)),
    "three records": lambda: only(train(), slice(3)),
    "twelve records": lambda: only(train(), slice(12)),
    "one record, of a probe": lambda: only(written(300, skips=[299]), slice(299, 300)),
    "20 000 steps with nine probes": lambda: written(
        20_000, skips=range(2000, 20_000, 2000), loss=RNG.gamma(2.0, size=20_000)
    ),
    "float32 without scaling": lambda: train("no scaling"),
    "float32 without scaling, no loss": lambda: train("no scaling", without="loss"),
    "bfloat16 without scaling": lambda: written(
        STEPS, scale=1.0, loss=jnp.asarray(FALL, jnp.bfloat16)
    ),
    "bfloat16 losses": lambda: written(STEPS, loss=jnp.asarray(FALL, jnp.bfloat16)),
    "losses logged in float16, without scaling": lambda: written(
        STEPS, scale=1.0, loss=np.float16(FALL)
    ),
    "policy gradient": lambda: train(is_policy=True, rate=0.05),
    "policy gradient, a wandering loss": lambda: written(STEPS, loss=WANDER),
    "a loss around zero": lambda: written(1000, loss=NORMAL),
    "a hinge GAN's generator": lambda: written(
        STEPS, loss=np.linspace(0, -1, STEPS) + 0.5 * WANDER
    ),
    "a GAN's generator, losing": lambda: written(
        STEPS, loss=0.7 + 2.5 * np.arange(STEPS) / STEPS + 0.3 * RNG.random(STEPS)
    ),
    "a Wasserstein critic": lambda: written(
        STEPS, loss=-30 * np.tanh(np.arange(STEPS) / 50) + RNG.normal(size=STEPS)
    ),
    "a likelihood that gets above 1": lambda: written(STEPS, loss=7 * FALL - 5),
    "heavy tails": lambda: written(STEPS, loss=np.exp(2 * NORMAL[:STEPS])),
    "one outlier": lambda: written(
        STEPS, loss=np.where(np.arange(STEPS) == 99, 60, 2 + FALL)
    ),
    "whole numbers": lambda: written(500, loss=RNG.integers(0, 64, 500)),
    "large whole numbers": lambda: written(500, loss=RNG.integers(1024, 2048, 500)),
    "multiples of 1/64": lambda: written(500, loss=RNG.integers(0, 64, 500) / 64),
    "multiples of 1/64 above 16": lambda: written(
        500, loss=RNG.integers(1024, 2048, 500) / 64
    ),
    "a static scale": lambda: train(
        init_scale=1024.0, min_scale=1024.0, max_scale=1024.0
    ),
    "a static scale, five NaN batches in 20 000": lambda: written(
        20_000, skips=range(1000, 20_000, 4000), scale=1024.0
    ),
    "a static scale, forty NaN batches in 20 000": lambda: written(
        20_000, skips=range(500, 20_000, 500), scale=1024.0
    ),
    "growths that the gaps hide": lambda: only(
        written(STEPS, skips=range(20, STEPS, 21), scale=ZIGZAG), slice(20, None, 21)
    ),
    "a floor and a ceiling of one's own": lambda: train(
        init_scale=2.0**12, min_scale=2.0**10, max_scale=2.0**14, growth_interval=20
    ),
    "at its own floor, three NaN batches in 400": lambda: train(
        init_scale=4.0, min_scale=4.0, loss_factor=at(jnp.array([50, 150, 250]), NAN)
    ),
    "value=, three NaN batches": lambda: train(
        tells_value=True, loss_factor=at(jnp.array([50, 51, 250]), NAN)
    ),
    "value=, a burst of ten NaN batches in 2000": lambda: written(
        2000,
        skips=range(700, 710),
        grads_finite=~np.isin(np.arange(2000), range(700, 710)),
    ),
    "retries and check_updates": lambda: train(
        "retrying", **PROBES, growth_interval=15
    ),
    "a member of a population": lambda: only(
        jax.tree.map(lambda x: np.stack([x, x[::-1]], 1), train(**PROBES)),
        (slice(None), 0),
    ),
    "a recovery": lambda: train(gradient_factor=at(slice(150, 165), NAN)),
    "a slow recovery": lambda: train(
        gradient_factor=at(slice(150, 165), NAN),
        recovery_interval=40,
        growth_interval=2000,
    ),
    "midway through a recovery": lambda: only(
        train(gradient_factor=at(slice(150, 165), NAN)), slice(220)
    ),
    "a recovery that has hardly begun": lambda: only(
        train(gradient_factor=at(slice(150, 165), NAN)), slice(168)
    ),
    "a History without a loss": lambda: recorded(train(without=("loss", *NORMS))),
    "its arrays": lambda: recorded(train(without=("loss", *NORMS))).arrays(),
    "a History with every tenth loss": lambda: recorded(train(**PROBES), every=10),
    "a History with a loss where a step was applied": lambda: recorded(
        train(**PROBES), every=2
    ),
    "its arrays with every tenth loss": lambda: recorded(
        train(**PROBES), every=10
    ).arrays(),
    "MultiSteps inside": lambda: (
        columns := train(),
        columns | {"update_norm": np.where(np.arange(STEPS) % 8 == 7, 1.0, 0.0)},
    )[1],
    "converged to a loss of zero": lambda: written(
        STEPS,
        loss=np.maximum(1 - np.arange(STEPS) / 50, 0),
        update_norm=np.arange(STEPS) < 50,
    ),
    "a rate that ends at zero": lambda: train(rate_factor=at(slice(300, None), 0.0)),
    "float32 under dynamic scaling, at the ceiling": lambda: written(
        STEPS, loss=FALL, scale=climbing(STEPS)
    ),
    "fast convergence while the scale climbs": lambda: written(
        100,
        loss=0.5 ** np.arange(100),
        scale=climbing(100, 5),
        grad_norm=0.8 ** np.arange(100),
    ),
    "noisy gradient norms while the scale climbs": lambda: written(
        STEPS, loss=FALL, scale=climbing(STEPS), grad_norm=np.exp(NORMAL[:STEPS])
    ),
    "zeros at first, until the scale has grown": lambda: written(
        STEPS,
        loss=FALL,
        scale=climbing(STEPS, 50),
        underflow_share=np.linspace(0.5, 0.0, STEPS),
    ),
    "few bad batches, and a scale that returns": lambda: moved(
        FEW, recovery_interval=10
    ),
    "few bad batches, and a scale that returns, every tenth step": lambda: only(
        moved(FEW, recovery_interval=10), slice(9, None, 10)
    ),
    "bad gradients at every sixtieth step, and a scale that returns": lambda: Told(
        train(gradient_factor=at(slice(40, None, 60), jnp.inf)), growth_interval=100.0
    ),
    "few bad batches that do not add up": lambda: moved(now_and_then(20_000, 8000)),
    "bad batches for a while, long ago": lambda: moved(
        now_and_then(40_000, 300) & (np.arange(40_000) < 1500)
    ),
    "a start that was too high for noisy gradients": lambda: moved(NEVER, 7 + HEAVY),
    "gradients with heavy tails": lambda: moved(NEVER, 17.7 + HEAVY),
    "gradients that grew at once": lambda: moved(
        NEVER, 17.7 + NOISE - 6 * (TIME > 4000)
    ),
    "gradients that grew for a while": lambda: moved(
        NEVER, 17.7 + NOISE - 10 * np.clip((TIME - 2000) / 1500, 0, 1)
    ),
    "gradients that grew for a while, with heavy tails": lambda: moved(
        NEVER, 17.7 + HEAVY - 10 * np.clip((TIME - 2000) / 1500, 0, 1)
    ),
    "gradients that grow less and less": lambda: moved(
        NEVER, 15 + NOISE - 10 * (1 - np.exp(-TIME / 300))
    ),
    "gradients that grow all the time": lambda: moved(
        NEVER, 17.7 + NOISE - TIME / 1000
    ),
    "gradients that grow all the time, with their norm": lambda: moved(
        NEVER, 17.7 + 3 * NOISE - TIME / 1000, grad_norm=2.0 ** (TIME / 1000)
    ),
    "a learning rate too high, and its gradients, recovering": lambda: moved(
        NEVER, 17.7 + NOISE - 10 * np.exp(-(((TIME - 3000) / 500) ** 2))
    ),
    "hysteresis at the lowest scale": lambda: written(
        STEPS,
        skips=[100, 101, 300],
        grads_finite=~np.isin(np.arange(STEPS), [100, 101, 300]),
    ),
}

SCALE_FALLS = 2.0 ** np.maximum(14 - np.arange(STEPS), -14.0)
BROKEN_RUNS = {
    "a static scale too high": (
        lambda: train(init_scale=2.0**30, min_scale=2.0**30, max_scale=2.0**30),
        "overflow at a fixed scale",
    ),
    "a static scale too high for a third": (
        lambda: train(
            init_scale=2.0**10,
            min_scale=2.0**10,
            max_scale=2.0**10,
            gradient_factor=at(slice(None, None, 3), jnp.inf),
        ),
        "overflow at a fixed scale",
    ),
    "NaN from the start, value=loss": (
        lambda: train(tells_value=True, loss_factor=NAN * NONE),
        "loss not finite",
    ),
    "NaN from step 50 on, value=loss": (
        lambda: train(tells_value=True, loss_factor=at(slice(50, None), NAN)),
        "loss not finite",
    ),
    "NaN from step 50 on, down to the floor": (
        lambda: train(loss_factor=at(slice(50, None), NAN)),
        "loss not finite",
    ),
    "an infinite loss that is applied": (
        lambda: written(150, loss=np.full(150, np.inf)),
        "loss not finite",
    ),
    "NaN all along, without scaling": (
        lambda: train("no scaling", without=NORMS, loss_factor=NAN * NONE),
        "loss not finite",
    ),
    "NaN from one batch on, without scaling": (
        lambda: train("no scaling", without=NORMS, loss_factor=at(200, NAN)),
        "loss not finite",
    ),
    "the same in a History": (
        lambda: recorded(train("no scaling", without=NORMS, loss_factor=at(200, NAN))),
        "loss not finite",
    ),
    "NaN all along in a History": (
        lambda: recorded(train("no scaling", without=NORMS, loss_factor=NAN * NONE)),
        "loss not finite",
    ),
    "gradients that are never finite": (
        lambda: train(gradient_factor=NAN * NONE),
        "overflow at the floor",
    ),
    "gradients that are never finite, resumed": (
        lambda: only(train(gradient_factor=NAN * NONE), slice(100, None)),
        "overflow at the floor",
    ),
    "gradients that are never finite, every tenth step": (
        lambda: only(train(gradient_factor=NAN * NONE), slice(9, None, 10)),
        "overflow at the floor",
    ),
    "gradients that are never finite, counted by samples": (
        lambda: (
            columns := train(gradient_factor=NAN * NONE, min_scale=128.0),
            columns | {"step": 64 * columns["step"]},
        )[1],
        "overflow at the floor",
    ),
    "gradients that are NaN from step 5 on": (
        lambda: train(gradient_factor=at(slice(5, None), NAN)),
        "overflow at the floor",
    ),
    "a floor of one's own": (
        lambda: train(min_scale=128.0, gradient_factor=NAN * NONE),
        "overflow at the floor",
    ),
    "a floor of one's own, with the settings": (
        lambda: Told(
            train(
                min_scale=128.0,
                gradient_factor=at(EVERY_20TH, NAN),
                growth_interval=2000,
                recovery_interval=None,
            ),
            min_scale=128.0,
            max_scale=2.0**32,
            growth_interval=2000.0,
        ),
        "overflow at the floor",
    ),
    "ten steps, all skipped, and falling": (
        lambda: only(train(gradient_factor=NAN * NONE), slice(10)),
        "no step applied",
    ),
    "twelve skips at the end": (
        lambda: only(train(gradient_factor=at(slice(50, None), NAN)), slice(62)),
        "no step applied",
    ),
    "retries that do not help": (
        lambda: train("retrying", gradient_factor=NAN * NONE),
        "overflow at the floor",
    ),
    "a member of a population": (
        lambda: only(
            jax.tree.map(
                lambda x: np.stack([x, x], 1), train(gradient_factor=NAN * NONE)
            ),
            (slice(None), 1),
        ),
        "overflow at the floor",
    ),
    "updates that are NaN": (
        lambda: train("retrying", rate=NAN),
        "updates not finite",
    ),
    "updates that are NaN now and then": (
        lambda: train("retrying", rate_factor=at(EVERY_20TH, NAN)),
        "updates not finite",
    ),
    "infinite updates that are applied": (
        lambda: train(rate_factor=at(300, jnp.inf), without="loss"),
        "updates not finite",
    ),
    "Adam 3.0": (lambda: train(adam=True, rate=3.0), "divergence"),
    "Adam 0.5": (
        lambda: train(adam=True, rate=0.5, recovery_interval=None),
        "divergence",
    ),
    "SGD 30": (lambda: train(rate=30.0), "divergence"),
    "SGD 3.0 with a growing rate": (
        lambda: train(rate=3.0, rate_factor=1.02 ** jnp.arange(STEPS)),
        "divergence",
    ),
    "SGD 1e5, NaN at once": (lambda: train(rate=1e5), "loss not finite"),
    "Adam with a growing rate": (
        lambda: train(adam=True, rate=1e-3, rate_factor=1.03 ** jnp.arange(STEPS)),
        "divergence",
    ),
    "SGD 1e3 without scaling": (lambda: train("no scaling", rate=1e3), "divergence"),
    "2.3, 28000, NaN": (
        lambda: written(
            50,
            loss=[2.3, 28000] + 48 * [np.nan],
            skips=range(2, 50),
            scale=SCALE_FALLS[:50],
        ),
        "divergence",
    ),
    "2.3, 193, stuck at 2.3": (
        lambda: written(50, loss=[2.3, *np.linspace(193, 150, 9), *40 * [2.302585]]),
        "divergence",
    ),
    "bad batches": (lambda: train(loss_factor=at(EVERY_20TH, NAN)), "bad batches"),
    "bad batches, value=loss": (
        lambda: train(tells_value=True, loss_factor=at(EVERY_20TH, NAN)),
        "bad batches",
    ),
    "bad batches, up to the end": (
        lambda: train(loss_factor=at(slice(-3, None), NAN, at(EVERY_20TH, NAN))),
        "bad batches",
    ),
    "a burst of bad batches": (
        lambda: train(loss_factor=at(BURST, NAN), recovery_interval=2000),
        "bad batches",
    ),
    "bad gradients": (
        lambda: train(gradient_factor=at(EVERY_20TH, jnp.inf), recovery_interval=None),
        "frequent overflow",
    ),
    "bad gradients, and a scale that returns": (
        lambda: Told(
            train(gradient_factor=at(EVERY_20TH, jnp.inf), growth_interval=2000),
            growth_interval=2000.0,
        ),
        "frequent overflow",
    ),
    "bad batches, value=loss, no loss": (
        lambda: train(
            tells_value=True, loss_factor=at(EVERY_20TH, NAN), without="loss"
        ),
        "frequent overflow",
    ),
    "a burst, and no recovery": (
        lambda: train(
            gradient_factor=at(BURST, NAN), recovery_interval=2000, growth_interval=2000
        ),
        "collapsed after a burst",
    ),
    "bad gradients that reset the count": (
        lambda: Told(
            train(
                gradient_factor=at(slice(40, None, 90), jnp.inf), recovery_interval=None
            ),
            growth_interval=100.0,
        ),
        "the scale never grows",
    ),
    "one bad batch in 150": (
        lambda: moved(now_and_then(2000, 150)),
        "slid after single overflows",
    ),
    "one bad batch in 300": (
        lambda: moved(now_and_then(5000, 300)),
        "slid after single overflows",
    ),
    "one bad batch in 1000": (lambda: moved(FEW), "slid after single overflows"),
    "one bad batch in 1000, every tenth step": (
        lambda: only(moved(FEW), slice(9, None, 10)),
        "slid after single overflows",
    ),
    "one bad batch in 1000, and the scale grew before": (
        lambda: moved(np.append(np.zeros(5000, bool), FEW)),
        "slid after single overflows",
    ),
    "one bad batch in 2000": (
        lambda: moved(now_and_then(40_000, 2000)),
        "slid after single overflows",
    ),
    "one bad batch in 300, and a burst that the former default came back from": (
        lambda: moved_formerly(AND_A_BURST),
        "slid after single overflows",
    ),
    "every thousandth batch is bad": (
        lambda: moved(np.arange(20_000) % 1000 == 999),
        "slid after single overflows",
    ),
    "one bad batch in each epoch": (
        lambda: moved(ONE_EACH_EPOCH),
        "slid after single overflows",
    ),
    "one NaN batch in each epoch, with the loss": (
        lambda: moved(
            ONE_EACH_EPOCH, loss=np.where(ONE_EACH_EPOCH, NAN, 2 + RNG.random(6000))
        ),
        "slid after single overflows",
    ),
    "a float16 loss": (
        lambda: train(is_half=True, growth_interval=60, rate=0.2),
        "float16 loss",
    ),
    "weight decay behind the wrapper": (
        lambda: train(decay=1e-5, **PROBES),
        "a wrapper in the wrong order",
    ),
    "a loss of tiny weight": (
        lambda: train(weight=1e-17, adam=True, rate=0.01),
        "the parameters do not move",
    ),
    "a loss of tiny weight, with the share of zeros": (
        lambda: train(weight=1e-17, without=NORMS) | {"zero_share": np.ones(STEPS)},
        "gradients too small",
    ),
    "a loss of tiny weight, with the share that underflows": (
        lambda: train(weight=1e-13) | {"underflow_share": np.full(STEPS, 0.9)},
        "gradients too small",
    ),
    "a loss of tiny weight, at the ceiling": (
        lambda: train(weight=1e-17, growth_interval=10, without=NORMS),
        "at the ceiling without an overflow",
    ),
    "a rate of zero": (lambda: train(rate=0.0), "the parameters do not move"),
    "units that died in the first step": (
        lambda: written(
            STEPS, loss=2.3 + 0.1 * RNG.random(STEPS), update_norm=[9.0] + 399 * [0.0]
        ),
        "the parameters do not move",
    ),
    "float16 parameters": (
        lambda: train(rounds=True, adam=True, rate=1e-6),
        "the parameters do not move",
    ),
    "float16 parameters, one batch": (
        lambda: written(200, loss=np.full(200, 1.0), update_norm=np.full(200, 2e-4)),
        "the parameters do not move",
    ),
    "gradients that are unscaled already": (
        lambda: train(forgets_scale=True, growth_interval=20),
        "the gradients are not scaled",
    ),
    "gradients that were never scaled, at the ceiling": (
        lambda: written(
            STEPS, loss=2.3 + 0.1 * RNG.random(STEPS), scale=climbing(STEPS)
        ),
        "at the ceiling without an overflow",
    ),
}


@functools.cache
def names(name, *, broken):
    run_of = BROKEN_RUNS[name][0] if broken else HEALTHY_RUNS[name]
    return [finding.name for finding in dls.diagnose(run_of())]


@pytest.mark.parametrize("name", HEALTHY_RUNS)
def test_a_healthy_run_has_no_finding(name):
    assert names(name, broken=False) == []


@pytest.mark.parametrize("name", BROKEN_RUNS)
def test_what_is_wrong_is_named_first(name):
    assert names(name, broken=True)[:1] == [BROKEN_RUNS[name][1]]


def test_precision_and_recall_are_one():
    found = sum(bool(names(name, broken=True)) for name in BROKEN_RUNS)
    alarms = sum(bool(names(name, broken=False)) for name in HEALTHY_RUNS)
    assert len(BROKEN_RUNS) >= 30 and len(HEALTHY_RUNS) >= 30
    assert found / (found + alarms) == 1
    assert found / len(BROKEN_RUNS) == 1
