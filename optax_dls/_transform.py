"""The wrapper: unscale, check, apply or skip, and move the scale, in one lax.cond."""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.typing import ArrayLike

from . import _checks, rules
from ._devices import AxisName, agree, largest_on_all_devices
from ._dtypes import cast_to_float32, only_arrays
from ._finite import all_finite, largest_finite
from ._one_kernel import in_one_array
from ._outside_jit import compiled_outside_jit
from ._scaler_state import (
    LossScalingState,
    ScalerState,
    StepInfo,
    caught_up,
    first_scaler,
    next_scaler,
    scaling_is_off,
    strongly_typed_state,
)
from ._stable_types import (
    keep_types,
    no_update,
    strongly_typed_copy,
    tree_where,
)
from ._unscale import Mask, align, scaled_leaves, unscale


class LossScaling(optax.GradientTransformationExtraArgs):  # type: ignore[misc]
    """A transformation that knows the rule of its scale, for those who record a run."""

    rule: rules.Rule


def loss_scaling(
    inner: optax.GradientTransformation,
    rule: rules.Rule,
    *,
    check_updates: bool = False,
    axis_name: AxisName | None = None,
    mask: Mask | None = None,
) -> LossScaling:
    r"""Wraps an optimizer so that it takes scaled gradients and skips overflows.

    With scaled gradients :math:`g`, scale :math:`S_t` and inner state :math:`s_t`:

    .. math::

      (u, s_{t+1}) = \begin{cases}
        \text{inner}(g / S_t,\ s_t) & \text{if all of } g / S_t \text{ is finite} \\
        (0,\ s_t) & \text{otherwise}
      \end{cases}

    and the rule gives :math:`S_{t+1}`. The inner optimizer gets half-precision parameters
    and gradients cast to float32, and never meets inf, NaN or a scaled value. On a skipped step its state is left as it was, bit for bit.

    Wrap the whole optimizer, once. A link before the wrapper would see scaled
    gradients, a link behind it would act on skipped steps.

    Args:
      inner: the optimizer, with clipping, weight decay and schedules inside.
      rule: how the scale moves, e.g. ``rules.dynamic()``.
      check_updates: also skip a step for which ``inner`` itself proposes something
        that is not finite. The scale stays where it is, since no scale could have
        helped. It looks at the updates in their own dtype, float32 for float16
        parameters. Off by default, as it costs a read of them and a select.
      axis_name: further mapped axes whose devices have to agree on a skip. Without
        it they agree over every mesh or ``pmap`` axis they share the scale on; ``()``
        turns agreement off, for members of a population that each have a scaler.
      mask: which gradients are scaled and checked: a tree of bools like the parameters (or
        its upper part), or a function that makes one of them, as in ``optax.masked``.
        Where it is False a gradient reaches ``inner`` as it came: that of a frozen
        parameter that may be inf, or state that travels as a gradient. Without it all
        are, but for Flax's collection ``_overwrite_with_gradient``.

    Returns:
      A transformation with state :class:`LossScalingState`. Its ``update`` takes the
      gradients of the scaled loss and gives unscaled updates, in float32 for
      half-precision parameters; on a skipped step they are -0.0, which leaves every bit
      of a parameter as it is. It compiles itself where it is called outside of ``jit``,
      so ``inner`` and ``rule`` have to be pure functions.

      Extra arguments reach ``inner``. If ``value`` (the true loss) is among them and is
      not finite, the step is skipped and the scale stays, since scaling cannot have
      caused that. If ``grad`` is (the gradients once more, as line searches take them),
      it is unscaled as they are.

    Raises:
      TypeError: an argument is of the wrong kind.
      ValueError: ``init`` finds a scaler inside ``inner``, or ``update`` finds that
        gradients and parameters are different trees.

    Example:
      >>> import jax.numpy as jnp
      >>> import optax
      >>> import optax_dls as dls
      >>> tx = dls.loss_scaling(optax.sgd(1.0), dls.rules.static(8.0))
      >>> params = jnp.zeros(2, jnp.float16)
      >>> updates, state = tx.update(jnp.array([8.0, 16.0]), tx.init(params), params)
      >>> updates
      Array([-1., -2.], dtype=float32)
      >>> updates, state = tx.update(jnp.array([8.0, jnp.inf]), state, params)
      >>> updates, int(state.scaler.total_skips)
      (Array([-0., -0.], dtype=float32), 1)

    References:
      Micikevicius et al., `Mixed Precision Training
      <https://arxiv.org/abs/1710.03740>`_, 2018
    """
    _checks.check_arguments(inner, rule, check_updates, axis_name)
    inner = optax.with_extra_args_support(inner)
    if scaling_is_off(jax.eval_shape(lambda: first_scaler(rule))):
        return _without_scaling(inner, rule)

    def init(params: optax.Params) -> LossScalingState:
        state = LossScalingState(
            first_scaler(rule), inner.init(cast_to_float32(only_arrays(params)))
        )
        _checks.check_one_scaler(state)
        # Several optimizers alias the parameters or a constant in their state, and
        # donation refuses a buffer that is handed over twice.
        return jax.tree.map(strongly_typed_copy, state)

    def update(
        grads: optax.Updates,
        state: LossScalingState,
        params: optax.Params | None = None,
        **extra_args: ArrayLike | Callable,
    ) -> tuple[optax.Updates, LossScalingState]:
        _checks.check_state(state, rule)
        grads, dtypes = align(grads, params, mask)
        _checks.check_inner_state(state.inner_state, inner, params)
        state = strongly_typed_state(state)

        scale = state.scaler.loss_scale
        with jax.named_scope("check_finite"):
            checked = scaled_leaves(unscale(grads, scale, dtypes), dtypes)
            value = _checks.checked_value(extra_args.get("value"))
            flags = [all_finite(checked), all_finite(value)]
            grads_finite, value_finite = agree(flags, scale, axis_name)
            largest = None
            if "largest_gradient" in rule.needs:
                largest = largest_finite(checked)
                largest = largest_on_all_devices(largest, scale, axis_name)
        step = StepInfo(grads_finite, largest)

        @jax.named_scope("applied_step")
        def applied(
            grads: optax.Updates,
            state: LossScalingState,
            params: optax.Params | None,
            scaler: ScalerState,
        ) -> tuple[optax.Updates, LossScalingState]:
            # Unscaled here: before the cond it would write out every gradient.
            with jax.named_scope("unscale"):
                grads = unscale(grads, state.scaler.loss_scale, dtypes)
                unscaled_args = _with_unscaled_grad(extra_args, params, scale, mask)
            updates, inner_state = inner.update(
                grads, state.inner_state, cast_to_float32(params), **unscaled_args
            )
            inner_state = keep_types(
                inner_state, state.inner_state, "inner.update", _STATE_OF_ONE_TYPE
            )
            ok = jnp.array(True)
            if check_updates:
                (ok,) = agree([all_finite(updates)], scale, axis_name)
                updates = tree_where(ok, updates, jax.tree.map(no_update, updates))
                inner_state = tree_where(ok, inner_state, state.inner_state)
            scaler = next_scaler(rule, scaler, step, applied=ok, updates_rule=ok)
            return updates, LossScalingState(scaler, inner_state)

        @jax.named_scope("skipped_step")
        def skipped(
            grads: optax.Updates,
            state: LossScalingState,
            params: optax.Params | None,
            scaler: ScalerState,
        ) -> tuple[optax.Updates, LossScalingState]:
            no = jnp.array(False)
            # A constant from outside has no mesh, which vmap on an explicit one refuses.
            updates_rule = jnp.array(True) if value is None else value_finite
            scaler = next_scaler(
                rule, scaler, step, applied=no, updates_rule=updates_rule
            )
            updates = jax.tree.map(no_update, updates_type)
            return updates, state._replace(scaler=scaler)

        state = state._replace(scaler=in_one_array(state.scaler))
        scaler = caught_up(rule, state.scaler, step)
        # As operands, since closed-over arrays lose their sharding on explicit meshes.
        operands = (grads, state, params, scaler)
        applied = jax.jit(applied, inline=True)  # so that it is traced only once
        with _checks.blaming_foreign_state(
            state.inner_state, inner, grads if params is None else params
        ):
            updates_type, _ = jax.eval_shape(applied, *operands)
        # XLA updates a donated state in place only if the branch that passes it through
        # comes first in its program, which is the false one.
        return lax.cond(grads_finite & value_finite, applied, skipped, *operands)

    return _with_rule(rule, init, compiled_outside_jit(update))


_STATE_OF_ONE_TYPE = (
    "If a gradient is None, this optimizer cannot skip that parameter: leave it out with "
    "optax.partition or optax.masked inside the wrapper. optax.monitor makes part of its "
    "state in the first update: chain it behind the wrapper, or use optax.snapshot inside."
)


def _with_unscaled_grad(
    extra_args: Mapping[str, ArrayLike | Callable],
    params: optax.Params | None,
    loss_scale: jax.Array,
    mask: Mask | None,
) -> dict[str, ArrayLike | Callable]:
    """The extra arguments; ``grad``, if it is among them, is the gradients once more."""
    extra_args = dict(extra_args)
    if extra_args.get("grad") is not None:
        grad, dtypes = align(extra_args["grad"], params, mask)
        extra_args["grad"] = unscale(grad, loss_scale, dtypes)
    return extra_args


def _without_scaling(
    inner: optax.GradientTransformationExtraArgs, rule: rules.Rule
) -> LossScaling:
    """The bare optimizer, in a state like that of the other wrappers."""

    def init(params: optax.Params) -> LossScalingState:
        state = LossScalingState(first_scaler(rule), inner.init(params))
        _checks.check_one_scaler(state)
        return jax.tree.map(strongly_typed_copy, state)

    def update(
        grads: optax.Updates,
        state: LossScalingState,
        params: optax.Params | None = None,
        **extra_args: ArrayLike | Callable,
    ) -> tuple[optax.Updates, LossScalingState]:
        _checks.check_state(state, rule)
        grads, _ = align(grads, params)
        updates, inner_state = inner.update(
            grads, state.inner_state, params, **extra_args
        )
        return updates, state._replace(inner_state=inner_state)

    return _with_rule(rule, init, update)


def _with_rule(
    rule: rules.Rule,
    init: optax.TransformInitFn,
    update: optax.TransformUpdateExtraArgsFn,
) -> LossScaling:
    tx = LossScaling(init, update)
    tx.rule = rule
    return tx
