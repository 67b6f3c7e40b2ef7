"""A function run operation by operation, following each inf and NaN to its origin."""

import os
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core, source_info_util

from ._nonfinite import Nonfinite, nonfinite

# Where an operation has no line of the user's, it must not get a line of this package.
source_info_util.register_exclusion(os.path.dirname(__file__) + os.sep)

# Of longer loops the rest runs as one operation, since each operation by itself costs
# about 0.2 ms.
_MAX_ITERATIONS = 1000

# Primitives that evaluate one jaxpr on their own inputs, and where they keep it.
_CALLS = {
    "jit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
}


class Value(NamedTuple):
    """An array, and which fault its inf or NaN comes from: None if it is finite."""

    array: Any
    fault: int | None = None


class Place(NamedTuple):
    inside: tuple[str, ...] = ()
    source: str = ""
    backward: bool = False

    def at(self, eqn: core.JaxprEqn) -> "Place":
        # Operations of JAX's own functions have no frame of the user in JAX 0.12.
        source = source_info_util.summarize(eqn.source_info)
        known = re.sub(r"(:\d+):\d+", r"\1", source) or self.source
        transposed = "transpose(" in str(eqn.source_info.name_stack)
        return Place(self.inside, known, self.backward or transposed)

    def enter(self, label: str) -> "Place":
        return self._replace(inside=(*self.inside, label))


class Step(NamedTuple):
    """One equation of a jaxpr, with the values and the place it is evaluated at."""

    jaxpr: core.Jaxpr
    eqn: core.JaxprEqn
    values: list[Value]
    at: Place


class Interpreter:
    """Evaluates a jaxpr eagerly, and notes where its infs and NaNs begin."""

    def __init__(self) -> None:
        self.faults: list[Nonfinite] = []

    def run(
        self,
        closed: core.ClosedJaxpr | core.Jaxpr,
        inputs: Sequence[Value],
        at: Place,
    ) -> list[Value]:
        """Evaluates a jaxpr, open or closed, on values."""
        jaxpr = closed.jaxpr if isinstance(closed, core.ClosedJaxpr) else closed
        # Before JAX 0.12 an open jaxpr has no consts; since then the two are one class.
        consts = getattr(closed, "consts", ())
        env = dict(zip(jaxpr.invars, inputs, strict=True))
        given = dict(zip(jaxpr.constvars, consts, strict=True))

        def read(atom: core.Var | core.Literal, at: Place) -> Value:
            if not isinstance(atom, core.Literal) and atom in env:
                return env[atom]
            array = atom.val if isinstance(atom, core.Literal) else given[atom]
            return self.constant(array, at)

        last_use = {
            atom: i
            for i, eqn in enumerate(jaxpr.eqns)
            for atom in eqn.invars
            if not isinstance(atom, core.Literal)
        }
        kept = {atom for atom in jaxpr.outvars if not isinstance(atom, core.Literal)}
        for i, eqn in enumerate(jaxpr.eqns):
            here = at.at(eqn)
            values = [read(atom, here) for atom in eqn.invars]
            outputs = self.equation(Step(jaxpr, eqn, values, here))
            env.update(zip(eqn.outvars, outputs, strict=True))
            # Frees the memory, as a compiled program would.
            for atom in (*eqn.invars, *eqn.outvars):
                if isinstance(atom, core.Literal) or atom in kept:
                    continue
                if last_use.get(atom, i) <= i:
                    env.pop(atom, None)
        return [read(atom, at) for atom in jaxpr.outvars]

    def equation(self, step: Step) -> list[Value]:
        _, eqn, values, at = step
        name, params = eqn.primitive.name, eqn.params
        if name in _CALLS:
            label = f"jit({params['name']})" if name == "jit" else name
            label = "checkpoint" if name == "remat2" else label
            return self.run(params[_CALLS[name]], values, at.enter(label))
        if name == "cond":
            last = len(params["branches"]) - 1
            branch = min(max(int(values[0].array), 0), last)
            inner = at.enter(f"cond, branch {branch}")
            return self.run(params["branches"][branch], values[1:], inner)
        if name == "scan" and 0 < params["length"]:
            return self.scan(step)
        if name == "while":
            return self.while_loop(step)
        return self.operation(step)

    def scan(self, step: Step) -> list[Value]:
        _, eqn, values, at = step
        body, length = eqn.params["jaxpr"], eqn.params["length"]
        body_jaxpr = getattr(body, "jaxpr", body)
        # By rank, since JAX 0.12 no longer has num_consts and num_carry.
        num_xs = _more_axes(eqn.invars, body_jaxpr.invars)
        num_carry = len(eqn.outvars) - _more_axes(eqn.outvars, body_jaxpr.outvars)
        first_x = len(values) - num_xs
        consts, xs = values[: first_x - num_carry], values[first_x:]
        carry = values[first_x - num_carry : first_x]
        rows: list[list[Value]] = []
        direction = -1 if eqn.params["reverse"] else 1
        for i in range(length)[::direction]:
            if len(rows) == _MAX_ITERATIONS:
                suspects = [*carry, *(y for row in rows for y in row)]
                return self.operation(step, suspects)
            inner = at.enter(f"scan, iteration {i}")
            x_row = [_row(x, i) for x in xs]
            outputs = self.run(body, [*consts, *carry, *x_row], inner)
            carry, row = outputs[:num_carry], outputs[num_carry:]
            rows.append(row)
        columns = zip(*rows[::direction], strict=True)
        return carry + [
            Value(_stack([y.array for y in column]), self.earliest(column))
            for column in columns
        ]

    def while_loop(self, step: Step) -> list[Value]:
        _, eqn, values, at = step
        params = eqn.params
        num_cond, num_body = params["cond_nconsts"], params["body_nconsts"]
        cond_consts = values[:num_cond]
        body_consts = values[num_cond : num_cond + num_body]
        carry = values[num_cond + num_body :]
        for i in range(_MAX_ITERATIONS):
            inner = at.enter(f"while, condition {i}")
            (go_on,) = self.run(params["cond_jaxpr"], [*cond_consts, *carry], inner)
            if not np.any(go_on.array):
                return carry
            inner = at.enter(f"while, iteration {i}")
            new = self.run(params["body_jaxpr"], [*body_consts, *carry], inner)
            # Under vmap each row has a condition of its own, and stays once it is false.
            rows = np.asarray(go_on.array)
            pairs = zip(new, carry, strict=True)
            carry = [self.where(rows, *pair) for pair in pairs] if rows.ndim else new
        return self.operation(step, carry)

    def where(self, rows: np.ndarray, new: Value, old: Value) -> Value:
        """The rows of ``new`` where ``rows`` is true, and of ``old`` elsewhere."""
        rows = rows.reshape(rows.shape + (1,) * (np.ndim(new.array) - rows.ndim))
        # The inf may be in a row that is not taken.
        taken = [
            value
            for value, mask in ((new, rows), (old, ~rows))
            if value.fault is not None
            and nonfinite(jnp.where(mask, value.array, jnp.zeros_like(value.array)))
        ]
        return Value(jnp.where(rows, new.array, old.array), self.earliest(taken))

    def operation(self, step: Step, suspects: Sequence[Value] = ()) -> list[Value]:
        """Evaluates one equation as a whole, and blames it if nothing before it is."""
        jaxpr, eqn, values, at = step
        used = [
            (var, value)
            for var, value in zip(eqn.invars, values, strict=True)
            if not isinstance(var, core.Literal)
        ]
        single = jaxpr.replace(
            constvars=[],
            invars=[var for var, _ in used],
            outvars=list(eqn.outvars),
            eqns=[eqn],
        )
        arrays = jax.core.eval_jaxpr(single, [], *(value.array for _, value in used))
        known = self.earliest([*values, *suspects])
        # A constant inf can become NaN: inf - inf, in a row that is masked as a whole.
        constant = known is not None and self.faults[known].kind == "constant"
        had_nan = constant and any(nonfinite(v.array) == "nan" for v in values)
        outputs = []
        for array in arrays:
            fault = None
            if kind := nonfinite(array):
                fault = known
                if known is None or (constant and kind == "nan" and not had_nan):
                    fault = known = self.add(
                        "operation", eqn.primitive.name, array, kind, not constant, at
                    )
                    constant = False
            outputs.append(Value(array, fault))
        return outputs

    def constant(self, array: Any, at: Place) -> Value:
        kind = nonfinite(array)
        return Value(
            array, self.add("constant", "", array, kind, True, at) if kind else None
        )

    def add(
        self, kind: str, name: str, array: Any, value: str, finite: bool, at: Place
    ) -> int:
        dtype, shape = jnp.result_type(array), np.shape(array)
        fault = Nonfinite(
            kind, name, dtype, shape, value, finite, at.source, at.inside, at.backward
        )
        self.faults.append(fault)
        return len(self.faults) - 1

    def earliest(self, values: Iterable[Value]) -> int | None:
        """The first fault among values, an operation before any constant."""
        found = {value.fault for value in values if value.fault is not None}
        return min(
            found, key=lambda i: (self.faults[i].kind == "constant", i), default=None
        )


def _more_axes(outer: Sequence[Any], inner: Sequence[Any]) -> int:
    """How many variables of a scan have one axis more outside than inside its body."""
    pairs = zip(outer, inner, strict=True)
    return sum(o.aval.ndim > i.aval.ndim for o, i in pairs)


def _row(x: Value, i: int) -> Value:
    row = jax.lax.dynamic_index_in_dim(x.array, i, keepdims=False)
    # The inf may be in another row.
    return Value(row, x.fault if x.fault is not None and nonfinite(row) else None)


def _stack(arrays: Sequence[jax.Array]) -> jax.Array:
    if jnp.issubdtype(arrays[0].dtype, jax.dtypes.extended):  # keys are no NumPy arrays
        return jnp.stack(arrays)
    # On the host: XLA takes seconds to compile the concatenation of 1000 arrays.
    return jnp.asarray(np.stack(arrays))
