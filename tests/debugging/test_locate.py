"""Finding the operation that made the first inf or NaN, forward and backward."""

import functools
import inspect
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import optax_dls as dls
from optax_dls.debugging import _interpret

HALF = jnp.float16


def norm(x):
    return jnp.sqrt(jnp.sum(x * x))


def scaled_loss(x):
    return 0.01 * jnp.sum(x.astype(HALF).astype(jnp.float32) ** 2)


def scaled_grad(x):
    state = dls.static_loss_scaling(optax.sgd(1.0), 2.0**20).init(x)
    return dls.value_and_scaled_grad(scaled_loss)(x, state=state)[1]


def exp(x):
    return jnp.exp(x.astype(HALF)).astype(jnp.float32)


def log(x):
    return jnp.log(x)


def ratio(x):
    return x / (2 * x)


def cast(x):
    return x.astype(HALF).astype(jnp.float32)


def total(x):
    return x + jnp.sum(x.astype(HALF)).astype(jnp.float32)


def sqrt_grad(x):
    return jax.grad(lambda x: jnp.sum(jnp.sqrt(x)))(x)


def norm_grad(x):
    return jax.grad(norm)(x)


# function, argument, primitive, dtype, value, backward
FAULTS = {
    "exp": (exp, [1.0, 12.0], "exp", "float16", "inf", False),
    "log": (log, [1.0, 0.0], "log", "float32", "-inf", False),
    "ratio": (ratio, [1.0, 0.0], "div", "float32", "nan", False),
    "cast": (cast, [1.0, 1e5], "convert_element_type", "float16", "inf", False),
    # jnp.sum itself adds in float32.
    "total": (total, [6e4, 6e4], "convert_element_type", "float16", "inf", False),
    # 0.5 / sqrt(x) comes on the way forward.
    "sqrt_grad": (sqrt_grad, [1.0, 0.0], "div", "float32", "inf", False),
    "norm_grad": (norm_grad, [0.0, 0.0], "div", "float32", "inf", False),
    "scaled_grad": (
        scaled_grad,
        [1.0, 4.0],
        "convert_element_type",
        "float16",
        "inf",
        True,
    ),
}


def in_custom_vjp(fn):
    wrapped = jax.custom_vjp(lambda x: fn(x))
    wrapped.defvjp(lambda x: (fn(x), None), lambda _, g: (cast(g),))
    return wrapped


def in_custom_jvp(fn):
    wrapped = jax.custom_jvp(lambda x: fn(x))
    wrapped.defjvp(lambda primals, tangents: (fn(*primals), cast(tangents[0])))
    return wrapped


def in_scan(fn):
    def run(x):
        def body(carry, i):
            return carry, fn(jnp.where(i == 3, carry, 1.0))

        return lax.scan(body, x, jnp.arange(5))[1]

    return run


def in_reverse_scan(fn):
    def run(x):
        xs = jnp.ones((5, 2)).at[3].set(x)
        return lax.scan(lambda c, x: (c, fn(x)), 0, xs, reverse=True)[1]

    return run


def in_while(fn):
    def run(x):
        def body(state):
            i, x, _ = state
            return i + 1, x, fn(jnp.where(i == 2, x, 1.0))

        return lax.while_loop(lambda s: s[0] < 3, body, (0, x, x))[2]

    return run


def in_batched_while(fn):
    """Each row has a condition of its own, and the first is done before the fault."""

    def run(x):
        def loop(n):
            def body(state):
                i, _ = state
                return i + 1, fn(jnp.where(i == 2, x, 1.0))

            return lax.while_loop(lambda s: s[0] < n, body, (0, jnp.ones_like(x)))[1]

        return jax.vmap(loop)(jnp.array([1, 3]))

    return run


def in_cond(fn):
    return lambda x: lax.cond(x[0] >= 0, lambda x: fn(x), lambda x: x, x)


def in_switch(fn):
    branches = [lambda x: x, lambda x: 2 * x, lambda x: fn(x)]
    return lambda x: lax.switch(jnp.argmin(x) * 0 + 7, branches, x)


def in_nested(fn):
    return jax.jit(lambda x: in_scan(jax.jit(fn))(x))


def in_vmap(fn):
    return lambda x: jax.vmap(fn)(jnp.stack([jnp.ones(2), x]))


# wrapper -> which calls it must name
WRAPPERS: dict[str, tuple[Callable, tuple[str, ...]]] = {
    "plain": (lambda fn: fn, ()),
    "jit": (jax.jit, ("jit(*)",)),
    "nested": (in_nested, ("jit(*)", "scan, iteration 3", "jit(*)")),
    "scan": (in_scan, ("scan, iteration 3",)),
    "reverse_scan": (in_reverse_scan, ("scan, iteration 3",)),
    "while": (in_while, ("while, iteration 2",)),
    "batched_while": (in_batched_while, ("while, iteration 2",)),
    "cond": (in_cond, ("cond, branch 1",)),
    "switch": (in_switch, ("cond, branch 2",)),
    "checkpoint": (jax.checkpoint, ("checkpoint",)),
    "custom_vjp": (in_custom_vjp, ("custom_vjp_call",)),
    "custom_jvp": (in_custom_jvp, ("custom_jvp_call",)),
    "vmap": (in_vmap, ()),
}


def lines_of(*fns):
    found = set()
    for fn in fns:
        lines, start = inspect.getsourcelines(fn)
        found |= {f"{__file__}:{start + i} " for i in range(len(lines))}
    return found


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("name", FAULTS)
def test_finds_the_operation(name, wrapper):
    fn, x, primitive, dtype, value, backward = FAULTS[name]
    wrap, calls = WRAPPERS[wrapper]
    fault = dls.locate_nonfinite(wrap(fn), jnp.array(x))
    assert (fault.kind, fault.name, fault.dtype, fault.value, fault.backward) == (
        "operation",
        primitive,
        dtype,
        value,
        backward,
    )
    assert fault.inputs_finite
    inside = tuple("jit(*)" if c.startswith("jit(") else c for c in fault.inside)
    assert inside[: len(calls)] == calls
    assert set(inside[len(calls) :]) <= {"jit(*)"}  # as of jnp functions
    helpers = {norm_grad: norm, scaled_grad: scaled_loss}
    assert any(
        fault.source.startswith(line) for line in lines_of(fn, helpers.get(fn, fn))
    )


@pytest.mark.parametrize(
    "wrapper", sorted(WRAPPERS.keys() - {"while", "batched_while"})
)
def test_finds_the_backward_pass_of_a_wrapped_function(wrapper):
    wrap, _ = WRAPPERS[wrapper]
    state = dls.static_loss_scaling(optax.sgd(1.0), 2.0**20).init(0.0)

    def loss_fn(x):
        return jnp.sum(wrap(lambda x: cast(x))(x))

    fault = dls.locate_nonfinite(
        lambda x: dls.value_and_scaled_grad(loss_fn)(x, state=state), jnp.ones(2)
    )
    assert (fault.name, fault.dtype, fault.value) == (
        "convert_element_type",
        "float16",
        "inf",
    )
    assert fault.backward and "in the backward pass" in str(fault)
    assert any(fault.source.startswith(line) for line in lines_of(cast, loss_fn))


def test_iterations_of_a_backward_scan_are_those_of_the_forward_one():
    def loss_fn(x):
        def body(carry, w):
            return carry * w, None

        return lax.scan(body, x, jnp.array([1, 1, 3e4, 1, 30], HALF))[0].astype(
            jnp.float32
        )

    grad_fn = jax.grad(lambda x: loss_fn(x))
    fault = dls.locate_nonfinite(grad_fn, jnp.array(1e-3, HALF))
    assert (fault.name, fault.value) == ("mul", "inf")
    assert fault.inside == ("scan, iteration 2",) and fault.backward


def test_a_loop_keeps_its_values():
    def fn(x, key):
        keys = jax.random.split(key, 3)

        def body(carry, inputs):
            key, i = inputs
            return carry + i, (key, jax.random.normal(key, ()) + carry)

        carry, (keys, ys) = lax.scan(body, x, (keys, jnp.arange(3.0)), reverse=True)
        expected = jnp.array([7.0, 6.0, 4.0])
        ys = ys - jax.vmap(lambda key: jax.random.normal(key, ()))(keys)
        wrong = jnp.any(jnp.abs(ys - expected) > 1e-5) | (carry != 7.0)
        count = lax.fori_loop(0, 7, lambda i, n: n + i, 0)
        wrong = wrong | (count != 21)
        empty = lax.scan(lambda c, x: (c, x), x, jnp.zeros((0, 2)))[1]
        return jnp.where(wrong, jnp.nan, 0.0) + jnp.sum(empty)

    assert dls.locate_nonfinite(fn, jnp.array(4.0), jax.random.key(0)) is None


def test_a_loop_under_vmap_keeps_the_rows_that_are_done():
    def fn(x, keys):
        def loop(x, key):
            def body(state):
                x, key, _ = state
                return 2 * x, jax.random.split(key)[0], jnp.full(3, x)

            return lax.while_loop(lambda s: s[0] < 10, body, (x, key, jnp.zeros(3)))

        found, keys, rows = jax.vmap(jax.vmap(loop))(x, keys)
        wrong = jnp.any(found != jnp.array([[16.0, 12.0], [10.0, 20.0]]))
        last = jnp.array([[8.0, 6.0], [5.0, 0.0]])[..., None]
        wrong = wrong | jnp.any(rows != last) | (keys.shape != (2, 2))
        return jnp.where(wrong, jnp.nan, 0.0)

    x = jnp.array([[1.0, 3.0], [5.0, 20.0]])
    assert (
        dls.locate_nonfinite(fn, x, jax.random.split(jax.random.key(0), (2, 2))) is None
    )
    assert not np.isnan(fn(x, jax.random.split(jax.random.key(0), (2, 2))))


def test_the_gradient_of_a_scaled_layer_under_vmap():
    def loss_fn(w, x):
        layer = dls.layer_scaling(lambda w, x: x.astype(HALF) @ w.astype(HALF))
        return jnp.sum(layer(w, x).astype(jnp.float32))

    grads = jax.vmap(jax.grad(loss_fn), in_axes=(None, 0))
    w, x = jnp.ones((2, 2)), jnp.ones((3, 1, 2))
    assert dls.locate_nonfinite(grads, w, x) is None
    fault = dls.locate_nonfinite(grads, w, 1e5 * x)
    assert (fault.name, fault.dtype) == ("convert_element_type", "float16")


def test_a_long_loop_is_one_operation(monkeypatch):
    monkeypatch.setattr(_interpret, "_MAX_ITERATIONS", 3)

    def scan_fn(x):
        return lax.scan(lambda c, _: (c * HALF(100), None), x, length=10)[0]

    def while_fn(x):
        return lax.while_loop(lambda c: c < 6e4, lambda c: c * HALF(100), x)

    for fn, name in [(scan_fn, "scan"), (while_fn, "while")]:
        fault = dls.locate_nonfinite(fn, jnp.array(1e-3, HALF))
        assert (fault.name, fault.value, fault.inside) == (name, "inf", ())
        fault = dls.locate_nonfinite(fn, jnp.array(10, HALF))
        assert (fault.name, fault.inside) == ("mul", (f"{name}, iteration 1",))
    assert dls.locate_nonfinite(scan_fn, jnp.array(0, HALF)) is None


class TestHealthy:
    def test_finds_nothing(self):
        def loss_fn(params, x):
            hidden = jax.nn.gelu(x.astype(HALF) @ params["w"].astype(HALF))
            return jnp.mean(hidden.astype(jnp.float32) ** 2)

        params, x = {"w": jnp.full((3, 4), 0.1)}, jnp.ones((2, 3))
        assert dls.locate_nonfinite(jax.value_and_grad(loss_fn), params, x) is None

    def test_a_mask_of_minus_inf_is_fine(self):
        mask = jnp.array([[True, False], [True, True]])

        def loss_fn(x):
            scores = jnp.where(mask, x, -jnp.inf)
            biased = x + jnp.where(mask, 0, -jnp.inf).astype(HALF)
            return jnp.sum(jax.nn.softmax(scores) * jax.nn.softmax(biased)) + jnp.max(
                scores, initial=-jnp.inf
            )

        x = jnp.ones((2, 2), HALF)
        assert dls.locate_nonfinite(jax.value_and_grad(jax.jit(loss_fn)), x) is None

    def test_an_inf_that_is_dropped_is_fine(self):
        def fn(x):
            return jnp.where(x > 0, jnp.log(x), 0.0)

        assert dls.locate_nonfinite(fn, jnp.array([0.0, 1.0])) is None

    def test_a_dropped_inf_does_not_hide_the_fault(self):
        def fn(x):
            return jnp.where(x > 0, jnp.log(x), 0.0) + jnp.exp(100 * x)

        assert dls.locate_nonfinite(fn, jnp.array([0.0, 1.0])).name == "exp"

    def test_an_inf_in_another_row_is_fine(self):
        def fn(x):
            rows = jnp.log(x)
            return lax.scan(lambda c, row: (c + row, None), jnp.float32(0), rows)[0]

        fault = dls.locate_nonfinite(fn, jnp.array([1.0, 0.0, 1.0]))
        assert fault.name == "log"

    def test_an_inf_in_a_row_that_is_done_is_fine(self):
        def fn(x):
            def loop(x, n):
                def body(state):
                    i, _, y = state
                    return i + 1, jnp.log(x - i), y + 1

                return lax.while_loop(lambda s: s[0] < n, body, (0.0, x, x))

            return jax.vmap(loop)(x, jnp.array([1.0, 2.0]))

        # The first row is done before its log(0).
        assert dls.locate_nonfinite(fn, jnp.array([1.0, 2.0])) is None
        fault = dls.locate_nonfinite(fn, jnp.array([2.0, 1.0]))
        assert (fault.name, fault.inside[0]) == ("log", "while, iteration 1")


def test_blames_what_the_row_that_counts_holds():
    def fn(x):
        def loop(x, n):
            def body(state):
                i, _ = state
                return i + 1, jnp.log(x + i) + jnp.exp(1e3 * i)

            return lax.while_loop(lambda s: s[0] < n, body, (0.0, x))[1]

        return jax.vmap(loop)(x, jnp.array([1.0, 2.0]))

    # The second row is log(0) first, and then exp(1000).
    assert dls.locate_nonfinite(fn, jnp.array([1.0, 0.0])).name == "exp"


def test_wants_the_state_from_before_the_step():
    tx = dls.dynamic_loss_scaling(optax.sgd(0.1), init_scale=2.0**20)
    params = jnp.array([1.0, 4.0])
    before = tx.init(params)
    _, grads = dls.value_and_scaled_grad(scaled_loss)(params, state=before)
    _, after = tx.update(grads, before, params)

    def at(state):
        return dls.locate_nonfinite(
            lambda w: dls.value_and_scaled_grad(scaled_loss)(w, state=state), params
        )

    assert at(before).name == "convert_element_type" and at(after) is None


def test_the_first_of_two_faults_counts():
    def fn(x):
        late = jnp.exp(x * 1000)
        return late, jnp.log(x - x)

    assert dls.locate_nonfinite(fn, jnp.ones(2)).name == "exp"


def test_a_row_that_is_masked_as_a_whole_makes_nan():
    def fn(x):
        scores = jnp.where(jnp.array([False, False]), x, -jnp.inf)
        return jnp.exp(scores - jnp.max(scores))

    fault = dls.locate_nonfinite(fn, jnp.ones(2))
    assert (fault.name, fault.value, fault.inputs_finite) == ("sub", "nan", False)
    assert "from a constant inf" in str(fault)


class TestInputs:
    def test_an_argument_is_named_by_its_path(self):
        batch = {"x": jnp.ones(2), "y": [np.array([1, np.inf], np.float32)]}
        fault = dls.locate_nonfinite(lambda p, *, batch: p, 1.0, batch=batch)
        assert fault.kind == "argument" and fault.name == "kwargs['batch']['y'][0]"
        assert fault.value == "inf" and fault.shape == (2,)
        fault = dls.locate_nonfinite(lambda *x: x, 1.0, (2, jnp.array(-jnp.inf, HALF)))
        assert (
            str(fault) == "args[1][1] (float16[]) holds -inf already when it comes in"
        )

    def test_a_complex_and_a_float8_argument_are_looked_at(self):
        fault = dls.locate_nonfinite(
            lambda x: x, jnp.array([1 + 1j, complex(0, np.nan)])
        )
        assert fault.value == "nan"
        narrow = jnp.array([1.0, jnp.nan]).astype(jnp.float8_e4m3fn)
        assert dls.locate_nonfinite(lambda x: x, narrow).dtype == jnp.float8_e4m3fn

    def test_leaves_without_inf_are_left_alone(self):
        def fn(x, n, flag, key, mode, *, nothing, count):
            assert mode == "sum" and flag and n == 3 and nothing is None
            noise = jax.random.normal(key, x.shape)
            return {"y": x * n + noise * count, "n": n, "mode": mode}

        key, count = jax.random.key(0), np.float32(2)
        args = (jnp.ones(2), 3, True, key, "sum")
        assert dls.locate_nonfinite(fn, *args, nothing=None, count=count) is None
        ints = jnp.arange(3), jnp.array([True])
        assert dls.locate_nonfinite(lambda *x: x, *ints) is None

    @pytest.mark.parametrize("wrap", [lambda fn: fn, jax.jit])
    def test_an_array_that_is_closed_over_is_a_constant(self, wrap):
        batch = jnp.array([[1.0, jnp.nan]])

        def loss_fn(w):
            return jnp.mean(w * batch)

        fault = dls.locate_nonfinite(wrap(loss_fn), jnp.ones((1, 2)))
        assert (fault.kind, fault.value, fault.shape) == ("constant", "nan", (1, 2))
        assert any(fault.source.startswith(line) for line in lines_of(loss_fn))
        assert str(fault).startswith("a constant of the function (float32[1,2]) holds")

    def test_names_no_line_of_its_own(self):
        # JAX 0.8 knows the caller's line, later ones none.
        source = dls.locate_nonfinite(jnp.exp, jnp.array(1e4)).source
        assert source == "" or source.startswith(f"{__file__}:")

    def test_refuses_what_it_cannot_look_at(self):
        with pytest.raises(TypeError, match="fn must be a function, got Array"):
            dls.locate_nonfinite(jnp.ones(2))  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="call it outside"):
            jax.jit(functools.partial(dls.locate_nonfinite, jnp.exp))(jnp.ones(2))
        with pytest.raises(TypeError, match="call it outside"):
            jax.grad(lambda x: dls.locate_nonfinite(lambda y: x * y, 1.0) or x)(1.0)


def test_shard_map_is_one_operation():
    mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("i")
    fn = jax.shard_map(jnp.exp, mesh=mesh, in_specs=spec, out_specs=spec)
    for wrapped in (fn, jax.jit(fn)):
        assert dls.locate_nonfinite(wrapped, jnp.ones(4)) is None
        fault = dls.locate_nonfinite(wrapped, jnp.array([1.0, 1.0, 1.0, 1e4]))
        assert (fault.name, fault.value) == ("shard_map", "inf")


def test_other_higher_order_operations_are_whole():
    def fn(x):
        y = lax.custom_linear_solve(lambda v: 2 * v, x, lambda _, b: b / 2)
        y = lax.reduce(y, np.float32(-np.inf), lax.max, (0,)) + jnp.cumsum(y)
        return y.at[0].add(1.0)

    assert dls.locate_nonfinite(fn, jnp.ones(3)) is None


def test_runs_where_debug_nans_is_on():
    with jax.debug_nans(True), jax.debug_infs(True):
        assert dls.locate_nonfinite(jnp.log, jnp.zeros(2)).value == "-inf"


def test_a_whole_train_step():
    tx = dls.dynamic_loss_scaling(optax.sgd(0.1))

    @jax.jit
    def step(params, opt_state, x):
        def loss_fn(params):
            return jnp.mean(jnp.log((x * params).astype(jnp.float32)))

        loss, grads = dls.value_and_scaled_grad(loss_fn)(params, state=opt_state)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    params = jnp.ones(2)
    state = tx.init(params)
    assert dls.locate_nonfinite(step, params, state, jnp.ones(2)) is None
    fault = dls.locate_nonfinite(step, params, state, jnp.array([1.0, 0.0]))
    # The update skips the gradients; the loss is what shows.
    assert (fault.name, fault.value, fault.inside) == ("log", "-inf", ("jit(step)",))
    assert ":" in fault.source and "(" in fault.source
