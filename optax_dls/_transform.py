"""The wrapper: unscale, check, apply or skip, and move the scale, in one lax.cond."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.typing import ArrayLike

from . import _checks, _types, _views, rules
from ._finite import AxisName, agree, all_finite, largest_finite, shared_axes
from ._scaler import LossScalingState, ScalerState, holds_scaler, next_scaler


def loss_scaling(
    inner: optax.GradientTransformation,
    rule: rules.Rule,
    *,
    check_updates: bool = False,
    axis_name: AxisName | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Wraps an optimizer so that it takes scaled gradients and skips overflows.

    With scaled gradients :math:`g`, scale :math:`S_t` and inner state :math:`s_t`:

    .. math::

      (u, s_{t+1}) = \begin{cases}
        \text{inner}(g / S_t,\ s_t) & \text{if all of } g / S_t \text{ is finite} \\
        (0,\ s_t) & \text{otherwise}
      \end{cases}

    and the rule gives :math:`S_{t+1}`. The inner optimizer works on float32 views of
    half-precision parameters and gradients and never meets inf, NaN or a scaled
    value. On a skipped step its state is left as it was, bit for bit.

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

    Returns:
      A transformation with state :class:`LossScalingState`. Its ``update`` takes the
      gradients of the scaled loss and gives unscaled updates, in float32 for
      half-precision parameters. It compiles itself where it is called outside of
      ``jit``, so ``inner`` and ``rule`` have to be pure functions. It passes extra
      arguments on to ``inner``; if
      ``value`` (the true loss) is among them and is not finite, the step is skipped
      and the scale stays, since scaling cannot have caused that.

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
      (Array([0., 0.], dtype=float32), 1)

    References:
      Micikevicius et al., `Mixed Precision Training
      <https://arxiv.org/abs/1710.03740>`_, 2018
    """
    _checks.check_arguments(inner, rule, check_updates, axis_name)
    inner = optax.with_extra_args_support(inner)

    def init(params: optax.Params) -> LossScalingState:
        loss_scale, rule_state = rule.init()
        is_off = isinstance(rule_state, rules.NoScalingState)
        inner_state = inner.init(params if is_off else _views.widen(params))
        if holds_scaler(inner_state):
            raise ValueError(
                "inner already holds a loss scaler, and one loss has one scale. Wrap the "
                "whole optimizer once: dynamic_loss_scaling(chain(...))."
            )
        scaler = ScalerState(
            loss_scale=jnp.asarray(loss_scale, jnp.float32),
            grads_finite=jnp.array(True),
            consecutive_skips=jnp.zeros((), jnp.int32),
            total_skips=jnp.zeros((), jnp.int32),
            rule_state=rule_state,
        )
        # Several optimizers alias the parameters or a constant in their state, and
        # donation refuses a buffer that is handed over twice.
        return jax.tree.map(_types.own, LossScalingState(scaler, inner_state))

    def update(
        grads: optax.Updates,
        state: LossScalingState,
        params: optax.Params | None = None,
        **extra_args: ArrayLike | Callable,
    ) -> tuple[optax.Updates, LossScalingState]:
        _checks.check_state(state, rule)
        if isinstance(state.scaler.rule_state, rules.NoScalingState):
            grads, _ = _views.align(grads, params)
            updates, inner_state = inner.update(
                grads, state.inner_state, params, **extra_args
            )
            return updates, state._replace(inner_state=inner_state)

        # An un-jitted conditional would be compiled anew on each call. Under a trace this
        # would be wrong, as it remembers what the optimizer did in another one.
        arguments = (grads, state, params, extra_args)
        is_traced = any(
            isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(arguments)
        )
        extras_are_arrays = all(  # functions and flags cannot go through jit
            isinstance(extra, jax.Array | np.floating | float)
            for extra in extra_args.values()
        )
        step = jitted_step if extras_are_arrays and not is_traced else one_step
        return step(*arguments)

    def one_step(
        grads: optax.Updates,
        state: LossScalingState,
        params: optax.Params | None,
        extra_args: dict[str, ArrayLike | Callable],
    ) -> tuple[optax.Updates, LossScalingState]:
        grads, dtypes = _views.align(grads, params)
        _checks.check_inner_state(state.inner_state, inner, params)
        state = jax.tree.map(_types.strongly_typed, state)
        loss_scale = jnp.asarray(state.scaler.loss_scale, jnp.float32)
        state = state._replace(scaler=state.scaler._replace(loss_scale=loss_scale))

        unscaled = _views.unscale(grads, loss_scale, dtypes)
        flags = [all_finite(unscaled)]
        if extra_args.get("value") is not None:
            flags.append(all_finite(_checks.checked_value(extra_args["value"])))
        grads_finite, *value_finite = agree(flags, loss_scale, axis_name)
        largest_gradient = None
        if "largest_gradient" in rule.needs:
            largest_gradient = largest_finite(unscaled)
            axes = shared_axes([largest_gradient], loss_scale, axis_name)
            if axes:
                largest_gradient = lax.pmax(largest_gradient, axes)

        move_scale = functools.partial(
            next_scaler,
            rule,
            grads_finite=grads_finite,
            largest_gradient=largest_gradient,
        )

        @functools.partial(jax.jit, inline=True)  # so that it is traced only once
        def applied(
            grads: optax.Updates, state: LossScalingState, params: optax.Params | None
        ) -> tuple[optax.Updates, LossScalingState]:
            scaler, inner_state = state
            updates, new_inner_state = inner.update(
                # Here, not before the cond, where it would write out every gradient.
                _views.unscale(grads, scaler.loss_scale, dtypes),
                inner_state,
                _views.widen(params),
                **extra_args,
            )
            new_inner_state = _types.keep(
                new_inner_state,
                inner_state,
                "inner.update",
                "If a gradient is None, this optimizer cannot skip that parameter: leave "
                "it out with optax.partition or optax.masked inside the wrapper.",
            )
            ok = jnp.array(True)
            if check_updates:
                (ok,) = agree([all_finite(updates)], scaler.loss_scale, axis_name)
                zeros = jax.tree.map(jnp.zeros_like, updates)
                updates = _types.select(ok, updates, zeros)
                new_inner_state = _types.select(ok, new_inner_state, inner_state)
            scaler = move_scale(scaler, applied=ok, heard=ok)
            return updates, LossScalingState(scaler, new_inner_state)

        def skipped(
            grads: optax.Updates, state: LossScalingState, params: optax.Params | None
        ) -> tuple[optax.Updates, LossScalingState]:
            del grads, params
            updates = jax.tree.map(_types.zeros, updates_type)
            heard = value_finite[0] if value_finite else jnp.array(True)
            scaler = move_scale(state.scaler, applied=jnp.array(False), heard=heard)
            return updates, state._replace(scaler=scaler)

        # As operands, since closed-over arrays lose their sharding on explicit meshes.
        operands = (grads, state, params)
        updates_type, _ = jax.eval_shape(applied, *operands)
        # XLA updates a donated state in place only if the branch that passes it through
        # comes first in its program, which is the false one.
        finite = jnp.all(jnp.stack([grads_finite, *value_finite]))
        return lax.cond(finite, applied, skipped, *operands)

    jitted_step = jax.jit(one_step)
    return optax.GradientTransformationExtraArgs(init, update)
