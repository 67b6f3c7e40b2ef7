"""Every wrapper of Optax around a loss scaler and inside one, and every extra argument.

Where a new version of Optax brings another wrapper, or another argument of ``update``,
the two lists read off its modules no longer fit the table, until somebody judges it.
"""

import ast
import functools
import inspect
import re
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

import optax_dls as dls

pytestmark = [
    pytest.mark.standard_promotion,
    pytest.mark.filterwarnings("ignore:inject_stateful_hyperparams:DeprecationWarning"),
]

SGD = optax.sgd(0.1, momentum=0.9)
PARAMS = {"w": jnp.array([[1.0, -2.0], [0.5, 3.0]]), "b": jnp.array([1.0, -1.0])}
MASK = {"w": True, "b": False}
LABELS = {"w": "x", "b": "y"}
OVERFLOWS = (0, 3, 4)  # of the eight steps of a run


def loss_fn(params, batch):
    return sum(jnp.sum(jnp.abs(p - batch) ** 2) for p in jax.tree.leaves(params)) / 2


class Case(NamedTuple):
    """A transformation, and what becomes of a scaler inside it.

    Attributes:
      wrap: makes it from an optimizer.
      inside: of a scaler inside, "right": it makes the same run; "refused": functions
        with ``state=`` raise, and name the order that works; "silent": it is wrong and
        nobody says so; None: it takes no optimizer.
      optimizer: what is wrapped.
      params: where they are special.
      extra_args: those of ``update``, from (value, scaled gradients, batch).
      per_example: whether it takes the gradient of every example.
    """

    wrap: Callable
    inside: str | None = "right"
    optimizer: optax.GradientTransformation = SGD
    params: optax.Params = PARAMS
    extra_args: Callable = lambda value, grads, batch: {}
    per_example: bool = False


def with_value(value, grads, batch):
    return {"value": value}


def with_obj_fn(value, grads, batch):
    return {"obj_fn": lambda params: loss_fn(params, batch)}


def with_grad_fn(value, grads, batch):
    return {"grad_fn": lambda params, step: jax.grad(loss_fn)(params, batch)}


def with_line(value, grads, batch):
    """As Optax documents it: ``grad`` is what ``update`` gets, here scaled."""
    return {"value": value, "grad": grads, "value_fn": loss_fn, "batch": batch}


def partition(optimizer):
    return optax.partition({"x": optimizer, "y": optax.sgd(0.1)}, LABELS)


def aggregating():
    from optax.experimental import aggregating

    return aggregating


# A name in front, and a variant of it in brackets.
CASES = {
    "MultiSteps": Case(
        lambda opt: optax.MultiSteps(opt, 2).gradient_transformation(), "refused"
    ),
    "add_mean_variance_to_opt": Case(
        lambda opt: aggregating().add_mean_variance_to_opt(opt),
        "silent",  # the updates are right, the variance is that of scaled gradients
        per_example=True,
    ),
    "apply_if_finite": Case(lambda opt: optax.apply_if_finite(opt, 9), "refused"),
    "chain": Case(optax.chain),
    "chain (clipping before)": Case(
        lambda opt: optax.chain(optax.clip_by_global_norm(1.0), opt), "silent"
    ),
    "chain (decay behind)": Case(
        lambda opt: optax.chain(opt, optax.add_decayed_weights(-0.1)), "silent"
    ),
    "conditionally_mask": Case(
        lambda opt: optax.conditionally_mask(opt, lambda step: step % 2 == 0), "refused"
    ),
    "conditionally_transform": Case(
        lambda opt: optax.conditionally_transform(opt, lambda step: step % 2 == 0),
        "refused",
    ),
    "chain (per-example clipping before)": Case(
        lambda opt: optax.chain(
            optax.contrib.differentially_private_aggregate(1.0, 0.1, key=0), opt
        ),
        None,  # as any clipping before it
        per_example=True,
    ),
    "flatten": Case(optax.flatten),
    "galore": Case(
        lambda opt: optax.contrib.galore(0.1, base_optimizer=opt), "refused"
    ),
    "inject_hyperparams": Case(
        lambda opt: optax.inject_hyperparams(lambda rate: opt)(rate=1.0)
    ),
    "inject_stateful_hyperparams": Case(
        lambda opt: optax.inject_stateful_hyperparams(lambda rate: opt)(rate=1.0)
    ),
    "lbfgs": Case(
        lambda opt: optax.lbfgs(memory_size=1, linesearch=opt),
        "silent",  # its memory of gradients is a link before the scaler
        optimizer=optax.scale(0.1),
    ),
    "lookahead": Case(
        lambda opt: optax.lookahead(opt, 2, 0.5),
        "refused",
        params=optax.LookaheadParams.init_synced(PARAMS),
    ),
    "masked": Case(lambda opt: optax.masked(opt, MASK), "refused"),
    "mechanize": Case(optax.contrib.mechanize, "refused"),
    "momo": Case(lambda opt: optax.contrib.momo(0.1), None, extra_args=with_value),
    "momo_adam": Case(
        lambda opt: optax.contrib.momo_adam(0.1), None, extra_args=with_value
    ),
    "multi_transform": Case(
        lambda opt: optax.multi_transform({"x": opt, "y": optax.sgd(0.1)}, LABELS),
        "refused",
    ),
    "named_chain": Case(lambda opt: optax.named_chain(("main", opt))),
    "partition": Case(partition, "refused"),
    "process": Case(
        lambda opt: aggregating().process(
            optax.identity(), aggregating().average_per_element_updates(), opt
        ),
        per_example=True,
    ),
    "reduce_on_plateau": Case(
        lambda opt: optax.chain(opt, optax.contrib.reduce_on_plateau(patience=1)),
        "silent",  # it counts the loss of skipped steps too
        extra_args=with_value,
    ),
    "sam": Case(lambda opt: optax.contrib.sam(opt, optax.sgd(0.05)), "refused"),
    "sam (opaque)": Case(
        lambda opt: optax.contrib.sam(opt, optax.sgd(0.05), opaque_mode=True),
        "refused",
        extra_args=with_grad_fn,
    ),
    "scale_by_backtracking_linesearch": Case(
        lambda opt: optax.chain(opt, optax.scale_by_backtracking_linesearch(15)),
        "silent",  # grad= stays scaled where it does not go through the scaler
        extra_args=with_line,
    ),
    "scale_by_galore": Case(
        lambda opt: optax.contrib.scale_by_galore(base_optimizer=opt), "refused"
    ),
    "scale_by_polyak": Case(
        lambda opt: optax.polyak_sgd(max_learning_rate=0.5),
        None,
        extra_args=with_value,
    ),
    "schedule_free": Case(lambda opt: optax.contrib.schedule_free(opt, 0.1), "refused"),
    "selective_transform": Case(  # harmless, but looks like any other partition
        lambda opt: optax.selective_transform(opt, freeze_mask={"w": False, "b": True}),
        "refused",
    ),
    "sophia": Case(
        lambda opt: optax.contrib.sophia(0.1, hessian_diagonal_fn=opt),
        "refused",
        optimizer=optax.contrib.hutchinson_estimator_diag_hessian(),
        extra_args=with_obj_fn,
    ),
    "split_real_and_imaginary": Case(
        optax.contrib.split_real_and_imaginary,
        params={"w": jnp.array([1.0 + 2.0j, -1.0j]), "b": jnp.ones(2)},
    ),
    "with_extra_args_support": Case(optax.with_extra_args_support),
}
# What is tested elsewhere, and where.
APART = {
    "hutchinson_estimator_diag_hessian": "inside sophia",
    "monitor": "in tests of its own below",
    "scale_by_zoom_linesearch": "inside lbfgs in test_unscale.py",
    "track_per_element_mean_and_variance_with_ema": "inside add_mean_variance_to_opt",
}
# What Optax 0.2.6 does not have yet.
SINCE_0_2_6 = {
    "add_mean_variance_to_opt",
    "galore",
    "monitor",
    "process",
    "scale_by_galore",
    "track_per_element_mean_and_variance_with_ema",
    # Its arguments, which process makes from the gradients that it gets:
    "sample_size",
    "sum_sq_diff_grads",
}


def modules(module, found):
    """Adds the module, and the modules under it that have public names."""
    found.add(module)
    for name, part in inspect.getmembers(module, inspect.ismodule):
        is_public = part.__name__.startswith("optax.") and not name.startswith("_")
        if is_public and part not in found:
            modules(part, found)
    return found


@functools.cache
def public():
    """The public functions and classes of Optax, by name."""
    return {
        name: part
        for module in modules(optax, set())
        for name, part in inspect.getmembers(module)
        if (inspect.isfunction(part) or inspect.isclass(part))
        and part.__module__.startswith("optax.")
        and not name.startswith("_")
    }


def takes_an_optimizer(part):
    if inspect.isclass(part) and issubclass(part, tuple):  # a state
        return False
    parameters = inspect.signature(part).parameters.values()
    return any("GradientTransformation" in str(p.annotation) for p in parameters)


@functools.cache
def extra_arguments():
    """Arguments of ``update`` beyond gradients, state and parameters, by where it is."""
    found = {}
    for module in {inspect.getmodule(part) for part in public().values()}:
        for part in ast.parse(inspect.getsource(module)).body:
            for node in ast.walk(part) if getattr(part, "name", "") in public() else ():
                if isinstance(node, ast.FunctionDef) and "update" in node.name:
                    names = [arg.arg for arg in node.args.args if arg.arg != "self"]
                    extra = {*names[3:], *(arg.arg for arg in node.args.kwonlyargs)}
                    if names[1:] and names[1].endswith("state") and extra:
                        found[getattr(part, "name", "")] = extra
    return found


def test_every_wrapper_and_every_extra_argument_of_optax_is_judged():
    found = {name for name, part in public().items() if takes_an_optimizer(part)}
    found |= set(extra_arguments())
    judged = {name.partition(" ")[0] for name in CASES} | set(APART)
    assert found <= judged
    assert judged - found <= SINCE_0_2_6
    # Of all these, only ``grad`` is a tree like the gradients that the caller passes.
    assert set().union(*extra_arguments().values()) - SINCE_0_2_6 == {
        *("value", "grad", "value_fn", "obj_fn", "grad_fn")
    }


def existing(*verdicts):
    """The cases with these verdicts that this version of Optax has."""
    return [
        name
        for name, case in CASES.items()
        if case.inside in verdicts and name.partition(" ")[0] in public()
    ]


def scaled(optimizer):
    # The scale moves at every step, whatever comes.
    rule = dls.rules.Rule(
        init=lambda: (jnp.float32(2.0**10), ()),
        update=lambda finite, scale, _: (jnp.where(finite, 2 * scale, scale / 2), ()),
    )
    return dls.loss_scaling(optimizer, rule)


def stepper(tx, case):
    """One jitted step of training: ``fault`` is a factor of the gradient."""

    @jax.jit
    def step(params, state, batch, fault):
        at = getattr(params, "fast", params)
        value, grads = jax.value_and_grad(loss_fn)(at, batch)
        scale = optax.tree.get(state, "loss_scale", jnp.float32(1.0))
        grads = jax.tree.map(lambda g: g * (scale * fault), grads)
        if case.per_example:
            grads = jax.tree.map(lambda g: jnp.stack([g, 3 * g]), grads)
        extra_args = case.extra_args(value, grads, batch)
        updates, state = tx.update(grads, state, params, **extra_args)
        return optax.apply_updates(params, updates), state

    return step


def train(step, tx, params, overflows):
    """Parameters and state after five good steps and those that overflow."""
    state, good = tx.init(params), 0
    for t in range(8):
        if t not in OVERFLOWS:
            params, state = step(params, state, 0.1 * good, 1.0)
            good += 1
        elif overflows:
            params, state = step(params, state, 9.0, np.inf)
    return params, state


@functools.cache
def bare_run(name):
    """The run without a scaler, on the good steps alone."""
    case = CASES[name]
    tx = case.wrap(case.optimizer)
    return train(stepper(tx, case), tx, case.params, overflows=False)[0]


def makes_the_bare_run(params, state, name):
    """Whether the overflows were skipped, and nothing else happened."""
    close = jax.tree.map(
        lambda p, expected: np.allclose(p, expected, rtol=1e-5, atol=1e-6),
        params,
        bare_run(name),
    )
    skips = int(optax.tree.get(state, "total_skips"))
    return jax.tree.all(close) and skips == len(OVERFLOWS)


def bits(tree):
    return [
        np.asarray(
            jax.random.key_data(leaf)
            if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
            else leaf
        ).tobytes()
        for leaf in jax.tree.leaves(tree)
    ]


@pytest.mark.parametrize("name", existing("right", "refused", "silent", None))
def test_around_it_a_scaler_makes_the_run_without_the_overflows(name):
    case = CASES[name]
    tx = scaled(case.wrap(case.optimizer))
    step = stepper(tx, case)
    params, state = train(step, tx, case.params, overflows=True)
    assert makes_the_bare_run(params, state, name)
    exact, exact_state = train(step, tx, case.params, overflows=False)
    assert bits(params) == bits(exact)
    assert bits(state.inner_state) == bits(exact_state.inner_state)


def run_inside(name):
    case = CASES[name]
    tx = case.wrap(scaled(case.optimizer))
    return train(stepper(tx, case), tx, case.params, overflows=True)


@pytest.mark.parametrize("name", existing("right"))
def test_inside_it_a_scaler_is_right_too(name):
    params, state = run_inside(name)
    assert makes_the_bare_run(params, state, name)
    assert dls.loss_scale(state) == optax.tree.get(state, "loss_scale")


@pytest.mark.parametrize("name", existing("silent"))
def test_inside_it_a_scaler_is_wrong_and_nobody_says_so(name):
    """So wrap the whole optimizer. A state does not show what its links do."""
    params, state = run_inside(name)
    finite = all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(state))
    assert not (finite and makes_the_bare_run(params, state, name))
    dls.loss_scale(state)


# Wrappers whose state has the name of another one.
OTHER_NAMES = {
    "multi_transform": "partition",
    "scale_by_galore": "galore",
    "selective_transform": "partition",
    "sophia": "Sophia",
}
UNDER_THEIR_NAME = [name for name in existing("refused") if name not in OTHER_NAMES]


@pytest.mark.parametrize("name", UNDER_THEIR_NAME)
def test_inside_it_a_scaler_would_be_wrong(name):
    params, state = run_inside(name)
    assert not makes_the_bare_run(params, state, name)


# What the cures in the messages leave to the user.
NAMES = {
    **vars(optax),
    "dynamic_loss_scaling": scaled,
    "optimizer": SGD,
    "optimizers": {"x": SGD, "y": optax.sgd(0.1)},
    "adversary": optax.sgd(0.05),
    "condition": lambda step: step % 2 == 0,
    "k": 2,
    "labels": LABELS,
    "learning_rate": 0.1,
    "mask": MASK,
    "n": 9,
    "slow_step_size": 0.5,
    "sync_period": 2,
}


@pytest.mark.parametrize("name", existing("refused"))
def test_inside_it_a_scaler_is_refused(name):
    case = CASES[name]
    tx = optax.chain(optax.identity(), case.wrap(scaled(case.optimizer)))
    wrapper = name.partition(" ")[0]
    wrapper = OTHER_NAMES.get(wrapper, wrapper)
    with pytest.raises(
        ValueError,
        match=rf"under optax\.(contrib\.)?{wrapper}, where .* dynamic_loss_scaling\(",
    ):
        dls.loss_scale(tx.init(case.params))


@pytest.mark.parametrize("name", UNDER_THEIR_NAME)
def test_the_cure_in_the_refusal_runs_as_it_stands(name):
    case = CASES[name]
    with pytest.raises(ValueError) as error:
        dls.loss_scale(case.wrap(scaled(case.optimizer)).init(case.params))
    cure = re.search(r"Put the scaler outside: (.*)\.$", str(error.value))[1]
    state = eval(cure, NAMES).init(case.params)
    assert type(state.inner_state) is type(case.wrap(case.optimizer).init(case.params))
    assert dls.loss_scale(state) == 2.0**10


SAM = optax.contrib.sam(scaled(SGD), optax.sgd(0.05)).init(PARAMS)
TAKES_STATE = {
    "gradient_report": lambda: dls.gradient_report(PARAMS, SAM),
    "loss_scale": lambda: dls.loss_scale(SAM),
    "metrics": lambda: dls.metrics(SAM),
    "raise_if_stalled": lambda: dls.raise_if_stalled(SAM),
    "rollback_if_skipped": lambda: dls.rollback_if_skipped(SAM, PARAMS, PARAMS),
    "scale_loss": lambda: dls.scale_loss(1.0, SAM),
    "scaler_state": lambda: dls.scaler_state(SAM),
    "unscale": lambda: dls.unscale(PARAMS, SAM),
    "value_and_scaled_grad": lambda: dls.value_and_scaled_grad(loss_fn)(
        PARAMS, 0.0, state=SAM
    ),
    "export_scaler": lambda: dls.interop.export_scaler("torch", SAM),
    "import_scaler": lambda: dls.interop.import_scaler(
        "jmp", {"loss_scale": 8.0, "counter": 0}, SAM
    ),
}


def test_every_function_that_takes_a_state_is_listed():
    found = {
        name
        for module in (dls, dls.interop)
        for name, part in inspect.getmembers(module, inspect.isfunction)
        if "state" in inspect.signature(part).parameters
        and (module is dls or part.__module__ == module.__name__)
    }
    assert found | {"value_and_scaled_grad"} == set(TAKES_STATE)


@pytest.mark.parametrize("name", TAKES_STATE)
def test_every_function_that_takes_a_state_refuses(name):
    with pytest.raises(ValueError, match=r"under optax.contrib.sam, where .*outside"):
        TAKES_STATE[name]()


@pytest.mark.skipif(not hasattr(optax, "monitor"), reason="new in Optax 0.2.7")
class TestMonitor:
    """Its state gets its measurements in the first update alone."""

    def test_inside_it_is_refused_with_what_works_instead(self):
        tx = scaled(optax.chain(SGD, optax.monitor({"norm": optax.tree.norm})))
        with pytest.raises(ValueError, match=r"monitor.*behind.*optax.snapshot inside"):
            tx.update(PARAMS, tx.init(PARAMS), PARAMS)

    @pytest.mark.parametrize(
        "build",
        [
            lambda norm: optax.chain(scaled(SGD), optax.monitor({"norm": norm})),
            lambda norm: scaled(optax.chain(SGD, optax.snapshot("norm", norm))),
        ],
        ids=["behind", "snapshot inside"],
    )
    def test_what_works_instead(self, build):
        tx = build(optax.tree.norm)
        params, state = train(stepper(tx, CASES["chain"]), tx, PARAMS, overflows=True)
        assert makes_the_bare_run(params, state, "chain")
        assert optax.tree.get(state, "norm") > 0

    def test_as_a_measure_a_scaler_is_not_known_to_be_safe(self):
        state = optax.monitor({"updates": scaled(SGD)}).init(PARAMS)
        with pytest.raises(ValueError, match="under optax.Monitor, where it is not"):
            dls.loss_scale(state)
