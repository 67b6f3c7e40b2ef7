"""The wrapper: unscale, check, apply or skip, and move the scale, in one lax.cond."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.typing import ArrayLike

from . import _rules, _views
from ._finite import AxisName, agree, all_finite


class ScalerState(NamedTuple):
    """What the loss scaler remembers. Each field has a buffer of its own.

    Attributes:
      loss_scale: S, the factor for the next loss.
      grads_finite: whether the unscaled gradients of the last step were all finite;
        True before the first step.
      consecutive_skips: skipped steps since the last applied one. Above 0 exactly
        if the last step was skipped.
      total_skips: skipped steps since ``init``. Both counters saturate at 2**31 - 1.
      rule_state: what the rule remembers, for instance a ``DynamicRuleState``.
    """

    loss_scale: jax.Array  # shape=(), dtype=float32
    grads_finite: jax.Array  # shape=(), dtype=bool
    consecutive_skips: jax.Array  # shape=(), dtype=int32
    total_skips: jax.Array  # shape=(), dtype=int32
    rule_state: optax.OptState


class LossScalingState(NamedTuple):
    """State of the loss-scaling transformations.

    Attributes:
      scaler: the scale and its counters.
      inner_state: state of the wrapped optimizer.
    """

    scaler: ScalerState
    inner_state: optax.OptState


def loss_scaling(
    inner: optax.GradientTransformation,
    rule: _rules.Rule,
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
        helped. Off by default, as it costs a read of the updates and a select.
      axis_name: further mapped axes whose devices have to agree on a skip. Without
        it they agree over every axis they share the scale on; ``()`` turns agreement
        off, for members of a population that each have a scaler.

    Returns:
      A transformation with state :class:`LossScalingState`. Its ``update`` takes the
      gradients of the scaled loss and gives unscaled updates, in float32 for
      half-precision parameters. It passes extra arguments on to ``inner``; if
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
    _check_arguments(inner, rule, check_updates)
    inner = optax.with_extra_args_support(inner)

    def init(params: optax.Params) -> LossScalingState:
        views = params if rule.update is None else _views.widen(params)
        inner_state = inner.init(views)
        if holds_scaler(inner_state):
            raise ValueError(
                "inner already holds a loss scaler, and one loss has one scale. Wrap the "
                "whole optimizer once: dynamic_loss_scaling(chain(...))."
            )
        loss_scale, rule_state = rule.init()
        scaler = ScalerState(
            loss_scale=loss_scale,
            grads_finite=jnp.array(True),
            consecutive_skips=jnp.zeros((), jnp.int32),
            total_skips=jnp.zeros((), jnp.int32),
            rule_state=rule_state,
        )
        # Several optimizers alias the parameters or a constant in their state, and
        # donation refuses a buffer that is handed over twice.
        return jax.tree.map(_own, LossScalingState(scaler, inner_state))

    def update(
        grads: optax.Updates,
        state: LossScalingState,
        params: optax.Params | None = None,
        **extra_args: ArrayLike | Callable,
    ) -> tuple[optax.Updates, LossScalingState]:
        _check_state(state)
        if rule.update is None:
            updates, inner_state = inner.update(
                grads, state.inner_state, params, **extra_args
            )
            return updates, state._replace(inner_state=inner_state)

        grads, dtypes = _views.align(grads, params)
        state = jax.tree.map(_strongly_typed, state)
        loss_scale = jnp.asarray(state.scaler.loss_scale, jnp.float32)
        state = state._replace(scaler=state.scaler._replace(loss_scale=loss_scale))

        flags = [all_finite(_views.unscale(grads, loss_scale, dtypes))]
        if extra_args.get("value") is not None:
            flags.append(all_finite(extra_args["value"]))
        grads_finite, *value_finite = agree(flags, loss_scale, axis_name)

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
            new_inner_state = _keep_types(new_inner_state, inner_state)
            ok = jnp.array(True)
            if check_updates:
                (ok,) = agree([all_finite(updates)], scaler.loss_scale, axis_name)
                zeros = jax.tree.map(jnp.zeros_like, updates)
                updates = _select(ok, updates, zeros)
                new_inner_state = _select(ok, new_inner_state, inner_state)
            scaler = _next_scaler(rule, scaler, grads_finite, applied=ok, heard=ok)
            return updates, LossScalingState(scaler, new_inner_state)

        def skipped(
            grads: optax.Updates, state: LossScalingState, params: optax.Params | None
        ) -> tuple[optax.Updates, LossScalingState]:
            del grads, params
            updates = jax.tree.map(jnp.zeros_like, updates_type)
            heard = value_finite[0] if value_finite else jnp.array(True)
            scaler = _next_scaler(
                rule, state.scaler, grads_finite, applied=jnp.array(False), heard=heard
            )
            return updates, state._replace(scaler=scaler)

        # As operands, since closed-over arrays lose their sharding on explicit meshes.
        operands = (grads, state, params)
        updates_type, _ = jax.eval_shape(applied, *operands)
        # XLA updates a donated state in place only if the branch that passes it through
        # comes first in its program, which is the false one.
        finite = jnp.all(jnp.stack([grads_finite, *value_finite]))
        return lax.cond(finite, applied, skipped, *operands)

    return optax.GradientTransformationExtraArgs(init, update)


def dynamic_loss_scaling(
    inner: optax.GradientTransformation,
    *,
    init_scale: ArrayLike = _rules.DEFAULT_INIT_SCALE,
    growth_factor: ArrayLike = 2.0,
    backoff_factor: ArrayLike = 0.5,
    growth_interval: ArrayLike = _rules.DEFAULT_GROWTH_INTERVAL,
    min_scale: ArrayLike = _rules.DEFAULT_MIN_SCALE,
    max_scale: ArrayLike = _rules.DEFAULT_MAX_SCALE,
    check_updates: bool = False,
    axis_name: AxisName | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer for float16 training: the scale finds its own size.

    ``loss_scaling(inner, rules.dynamic(...))``: the scale doubles after 2000 finite
    steps in a row; a step whose gradients overflow is skipped and halves it. See
    :func:`rules.dynamic` for the rule and the reasons of its defaults, and
    :func:`loss_scaling` for the skip.

    Args:
      inner: the whole optimizer, with clipping, weight decay and schedules inside.
      init_scale: the first scale.
      growth_factor: what the scale is multiplied by when it grows, at least 1.
      backoff_factor: what it is multiplied by at an overflow, between 0 and 1.
      growth_interval: finite steps in a row before it grows.
      min_scale: the floor.
      max_scale: the ceiling.
      check_updates: see :func:`loss_scaling`.
      axis_name: see :func:`loss_scaling`.

    Returns:
      A transformation with state :class:`LossScalingState`.

    Raises:
      TypeError: an argument is of the wrong kind.
      ValueError: a number is out of range or out of order.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import optax
      >>> import optax_dls as dls
      >>> tx = dls.dynamic_loss_scaling(optax.adam(0.1))
      >>> params = jnp.array([1.0, -2.0])
      >>> state = tx.init(params)
      >>> def loss_fn(params):  # gradients of 1e-8 are zero in float16
      ...     return 1e-8 * jnp.sum(params.astype(jnp.float16)).astype(jnp.float32)
      >>> @jax.jit
      ... def step(params, state):
      ...     loss, grads = dls.value_and_scaled_grad(loss_fn)(params, state=state)
      ...     updates, state = tx.update(grads, state, params)
      ...     return optax.apply_updates(params, updates), state, loss
      >>> params, state, loss = step(params, state)
      >>> print([round(float(p), 3) for p in params])
      [0.95, -2.05]
    """
    rule = _rules.dynamic(
        init_scale=init_scale,
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        growth_interval=growth_interval,
        min_scale=min_scale,
        max_scale=max_scale,
    )
    return loss_scaling(inner, rule, check_updates=check_updates, axis_name=axis_name)


def static_loss_scaling(
    inner: optax.GradientTransformation,
    scale: ArrayLike,
    *,
    check_updates: bool = False,
    axis_name: AxisName | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer with a fixed scale; overflowing steps are still skipped.

    ``loss_scaling(inner, rules.static(scale))``.

    Args:
      inner: the whole optimizer, with clipping, weight decay and schedules inside.
      scale: the factor itself, not its exponent. A power of two is exact.
      check_updates: see :func:`loss_scaling`.
      axis_name: see :func:`loss_scaling`.

    Returns:
      A transformation with state :class:`LossScalingState`.

    Raises:
      TypeError: an argument is of the wrong kind.
      ValueError: ``scale`` is outside [2**-100, 2**126].

    Example:
      >>> import jax.numpy as jnp
      >>> import optax
      >>> import optax_dls as dls
      >>> tx = dls.static_loss_scaling(optax.sgd(1.0), 16.0)
      >>> state = tx.init(jnp.zeros(()))
      >>> float(dls.scale_loss(3.0, state))
      48.0
    """
    rule = _rules.static(scale)
    return loss_scaling(inner, rule, check_updates=check_updates, axis_name=axis_name)


def no_loss_scaling(
    inner: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """The bare optimizer behind the same interface, for float32 and bfloat16.

    ``loss_scaling(inner, rules.none())``: the scale is 1, nothing is checked or
    skipped, and ``inner`` works on the parameters as they are. So one train step
    serves every precision. A run moves between the wrappers by
    ``tx.init(params)._replace(inner_state=old.inner_state)``.

    Args:
      inner: the whole optimizer.

    Returns:
      A transformation with state :class:`LossScalingState`.

    Raises:
      TypeError: ``inner`` is not a gradient transformation.

    Example:
      >>> import jax.numpy as jnp
      >>> import optax
      >>> import optax_dls as dls
      >>> tx = dls.no_loss_scaling(optax.sgd(1.0))
      >>> updates, state = tx.update(jnp.array([2.0]), tx.init(jnp.zeros(1)))
      >>> print(updates, dls.loss_scale(state))
      [-2.] 1.0
    """
    return loss_scaling(inner, _rules.none())


def holds_scaler(tree: object) -> bool:
    """Whether a tree contains the state of a loss-scaling transformation."""
    return any(
        isinstance(node, LossScalingState)
        for node in jax.tree.leaves(
            tree, is_leaf=lambda node: isinstance(node, LossScalingState)
        )
    )


def _next_scaler(
    rule: _rules.Rule,
    scaler: ScalerState,
    grads_finite: jax.Array,
    *,
    applied: jax.Array,
    heard: jax.Array,
) -> ScalerState:
    """The scaler after a step that was applied or not.

    The rule hears of it unless it failed for a reason that no scale could have helped.
    """
    assert rule.update is not None
    before = (scaler.loss_scale, scaler.rule_state)
    after = _keep_types(rule.update(applied, *before), before)
    loss_scale, rule_state = _select(heard, after, before)
    consecutive_skips = optax.safe_increment(scaler.consecutive_skips)
    total_skips = optax.safe_increment(scaler.total_skips)
    return ScalerState(
        loss_scale=loss_scale,
        grads_finite=grads_finite,
        consecutive_skips=jnp.where(applied, 0, consecutive_skips),
        total_skips=jnp.where(applied, scaler.total_skips, total_skips),
        rule_state=rule_state,
    )


def _select(
    condition: jax.Array, new: optax.OptState, old: optax.OptState
) -> optax.OptState:
    return jax.tree.map(lambda n, o: jnp.where(condition, n, o), new, old)


def _own(leaf: ArrayLike) -> ArrayLike:
    """A strongly typed copy in a buffer that nothing else holds."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    return _strongly_typed(jnp.array(leaf, copy=True))


def _strongly_typed(leaf: ArrayLike) -> jax.Array:
    array = jnp.asarray(leaf)
    return array.astype(array.dtype) if jax.typeof(array).weak_type else array


def _keep_types(new: optax.OptState, old: optax.OptState) -> optax.OptState:
    """The new state in the dtypes of the old one, so that its types never drift.

    Some optimizers promote: Adam's moments of an integer parameter, for instance.
    """
    if jax.tree.structure(new) != jax.tree.structure(old):  # type: ignore[operator]
        raise ValueError(
            "the inner optimizer must return a state of the structure that it got, but it "
            f"turned {jax.tree.structure(old)} into {jax.tree.structure(new)}. If a "
            "gradient is None, this optimizer cannot skip that parameter: leave it out "
            "with optax.partition or optax.masked inside the wrapper."
        )

    def keep_dtype(new_leaf: ArrayLike, old_leaf: jax.Array) -> jax.Array:
        array = _strongly_typed(new_leaf)
        return array if array.dtype == old_leaf.dtype else array.astype(old_leaf.dtype)

    return jax.tree.map(keep_dtype, new, old)


def _check_arguments(
    inner: optax.GradientTransformation, rule: _rules.Rule, check_updates: bool
) -> None:
    if not callable(getattr(inner, "init", None)) or not callable(
        getattr(inner, "update", None)
    ):
        raise TypeError(
            "inner must be an optax.GradientTransformation (with init and update), got "
            f"{inner!r}. Call the optimizer first: dynamic_loss_scaling(optax.adam(1e-3))."
        )
    if not isinstance(rule, _rules.Rule):
        raise TypeError(
            f"rule must be a Rule, got {rule!r}. Call one: rules.dynamic() or "
            "rules.static(128.0)."
        )
    if not isinstance(check_updates, bool):
        raise TypeError(f"check_updates must be True or False, got {check_updates!r}.")


def _check_state(state: LossScalingState) -> None:
    if not isinstance(state, LossScalingState):
        raise TypeError(
            "state must be the LossScalingState that tx.init gave, got "
            f"{type(state).__name__}. The state of an optimizer that ran without loss "
            "scaling goes under a new scaler by "
            "tx.init(params)._replace(inner_state=old_state)."
        )
