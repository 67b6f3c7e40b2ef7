"""Rules: how the loss scale moves. Pure functions on scalars, no trees."""

import numbers
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.typing import ArrayLike

__all__ = (
    "DynamicRuleState",
    "NoScalingState",
    "RetryingRuleState",
    "Rule",
    "dynamic",
    "none",
    "retrying",
    "static",
)

# XLA flushes subnormal float32 numbers to zero. Outside these bounds the scale,
# its reciprocal or an ordinary scaled gradient would be one, and silently vanish.
SMALLEST_SCALE = 2.0**-100
LARGEST_SCALE = 2.0**126

DEFAULT_INIT_SCALE = 2.0**15
DEFAULT_GROWTH_INTERVAL = 2000
DEFAULT_MIN_SCALE = 2.0**-14
DEFAULT_MAX_SCALE = 2.0**32


class Rule(NamedTuple):
    """How the loss scale moves, as a pair of pure functions on scalars.

    Attributes:
      init: ``() -> (loss_scale, rule_state)``, the scale of the first step
        (shape (), float32) and a pytree of whatever the rule has to remember.
      update: ``(grads_finite, loss_scale, rule_state) -> (loss_scale, rule_state)``,
        called once a step; ``grads_finite`` has shape () and dtype bool. The shapes
        and dtypes of the state must not change.

    Example:
      A rule that halves the scale on overflow and never grows:

      >>> import jax.numpy as jnp
      >>> import optax
      >>> import optax_dls as dls
      >>> def halve(grads_finite, loss_scale, rule_state):
      ...     return jnp.where(grads_finite, loss_scale, loss_scale / 2), rule_state
      >>> rule = dls.rules.Rule(lambda: (jnp.float32(1024), ()), halve)
      >>> tx = dls.loss_scaling(optax.sgd(0.1), rule)
      >>> state = tx.init(jnp.ones(2))
      >>> _, state = tx.update(jnp.array([jnp.inf, 0.0]), state)
      >>> float(dls.loss_scale(state))
      512.0
    """

    init: Callable[[], tuple[jax.Array, optax.OptState]]
    update: Callable[
        [jax.Array, jax.Array, optax.OptState], tuple[jax.Array, optax.OptState]
    ]


class DynamicRuleState(NamedTuple):
    """State of :func:`dynamic`.

    Attributes:
      growth_count: finite steps since the last growth or overflow.
    """

    growth_count: jax.Array  # shape=(), dtype=int32


def dynamic(
    *,
    init_scale: ArrayLike = DEFAULT_INIT_SCALE,
    growth_factor: ArrayLike = 2.0,
    backoff_factor: ArrayLike = 0.5,
    growth_interval: ArrayLike = DEFAULT_GROWTH_INTERVAL,
    min_scale: ArrayLike = DEFAULT_MIN_SCALE,
    max_scale: ArrayLike = DEFAULT_MAX_SCALE,
) -> Rule:
    r"""Grows after N finite steps in a row, backs off at every overflow.

    With the scale :math:`S_t`, the count :math:`c_t` of finite steps since the last
    growth or overflow, and N the growth interval:

    .. math::

      (S_{t+1}, c_{t+1}) = \begin{cases}
        (\mathrm{clip}(S_t \cdot \text{backoff\_factor}),\ 0)
          & \text{overflow} \\
        (\mathrm{clip}(S_t \cdot \text{growth\_factor}),\ 0)
          & \text{finite and } c_t + 1 = N \\
        (S_t,\ c_t + 1) & \text{otherwise}
      \end{cases}

    where clip keeps the scale in [min_scale, max_scale].

    Args:
      init_scale: the first scale. 2**15 is the largest power of two that float16
        holds; a start too high costs one skipped step for each halving.
      growth_factor: at least 1 (1 never grows). 2 keeps the scale a power of two,
        so that scaling and unscaling are exact.
      backoff_factor: between 0 and 1, both excluded. 0.5, for the same reason.
      growth_interval: N, a whole number of at least 1. In the steady state each
        probe of a larger scale costs one step in N + 1: 0.05 % at 2000.
      min_scale: the floor. 2**-14 still lets a loss far above the range of float16
        through, and is 14 growths away from 1.
      max_scale: the ceiling. A loss of order one overflows float16 long before 2**32,
        and float32 is far from its end there; a loss of tiny weight may use more.

    Arrays and tracers are taken as they come (this is how
    ``optax.inject_hyperparams`` passes them) and are clamped to the legal range
    where they are used, because a traced value cannot be compared in Python. A
    ``max_scale`` array that is not finite stands for the default: float16 cannot
    hold it.

    Returns:
      A :class:`Rule` whose state is a :class:`DynamicRuleState`.

    Raises:
      TypeError: an argument is not a real number (bool is not), or
        ``growth_interval`` is not an integer.
      ValueError: an argument is out of range, NaN or inf, or the bounds and
        ``init_scale`` are out of order. The message says which.

    Example:
      >>> import jax.numpy as jnp
      >>> import optax_dls as dls
      >>> rule = dls.rules.dynamic(init_scale=8.0, growth_interval=2)
      >>> scale, state = rule.init()
      >>> for finite in (True, True, False):
      ...     scale, state = rule.update(jnp.array(finite), scale, state)
      ...     print(float(scale))
      8.0
      16.0
      8.0

    References:
      Micikevicius et al., `Mixed Precision Training
      <https://arxiv.org/abs/1710.03740>`_, 2018
    """
    _check_scale("min_scale", min_scale)
    _check_scale("max_scale", max_scale)
    _check_scale("init_scale", init_scale)
    _check_order("min_scale", min_scale, "max_scale", max_scale)
    _check_order("min_scale", min_scale, "init_scale", init_scale)
    _check_order("init_scale", init_scale, "max_scale", max_scale)
    _check(
        "growth_factor",
        growth_factor,
        "at least 1 and finite in float32",
        lambda x: 1 <= x <= float(np.finfo(np.float32).max),
        "Use 2.0, or 1.0 for a scale that never grows.",
    )
    _check(
        "backoff_factor",
        backoff_factor,
        "above 0 and below 1",
        lambda x: 0 < x < 1,
        "Use 0.5.",
    )
    _check(
        "growth_interval",
        growth_interval,
        "a whole number from 1 to 2**31 - 1",
        lambda x: 1 <= x < 2**31,
        "Use 2000, or growth_factor=1.0 for a scale that never grows.",
        kind=numbers.Integral,
    )

    def clip(loss_scale: jax.Array) -> jax.Array:
        ceiling = _float32(max_scale)
        ceiling = jnp.where(jnp.isfinite(ceiling), ceiling, DEFAULT_MAX_SCALE)
        ceiling = _clamp(ceiling, SMALLEST_SCALE, LARGEST_SCALE)
        return _clamp(
            loss_scale, _clamp(_float32(min_scale), SMALLEST_SCALE, ceiling), ceiling
        )

    def init() -> tuple[jax.Array, optax.OptState]:
        count = jnp.zeros((), jnp.int32)
        return clip(_float32(init_scale)), DynamicRuleState(growth_count=count)

    def update(
        grads_finite: jax.Array, loss_scale: jax.Array, rule_state: optax.OptState
    ) -> tuple[jax.Array, optax.OptState]:
        interval = jnp.maximum(jnp.asarray(growth_interval, jnp.int32), 1)
        # Compare before counting, so that no interval can overflow the counter.
        grows = rule_state.growth_count >= interval - 1
        finite_scale = jnp.where(
            grows, loss_scale * _clamp(_float32(growth_factor), 1, np.inf), loss_scale
        )
        finite_count = jnp.where(grows, 0, rule_state.growth_count + 1)
        overflow_scale = loss_scale * _clamp(_float32(backoff_factor), 0, 1)
        return (
            clip(jnp.where(grads_finite, finite_scale, overflow_scale)),
            DynamicRuleState(growth_count=jnp.where(grads_finite, finite_count, 0)),
        )

    return Rule(init, update)


def static(scale: ArrayLike) -> Rule:
    r"""A fixed scale, :math:`S_t = S`; steps that overflow are still skipped.

    The scale is that of the rule, also where a restored state brought another one: it
    holds from the second step on.

    Args:
      scale: the factor itself (not its exponent). A power of two is exact.

    Returns:
      A :class:`Rule` without state.

    Raises:
      TypeError: ``scale`` is not a real number.
      ValueError: ``scale`` is outside [2**-100, 2**126], NaN or inf.

    Example:
      >>> import optax_dls as dls
      >>> scale, state = dls.rules.static(128.0).init()
      >>> float(scale)
      128.0
    """
    _check_scale("scale", scale)

    def init() -> tuple[jax.Array, optax.OptState]:
        return _clamp(_float32(scale), SMALLEST_SCALE, LARGEST_SCALE), ()

    def update(
        grads_finite: jax.Array, loss_scale: jax.Array, rule_state: optax.OptState
    ) -> tuple[jax.Array, optax.OptState]:
        del grads_finite, loss_scale, rule_state
        return init()

    return Rule(init, update)


class RetryingRuleState(NamedTuple):
    """State of :func:`retrying`.

    Attributes:
      unheard_retries: retries of this step that the rule inside has yet to hear of; 0
        once ``tx.update`` has run.
      total_retries: retries since ``init``; saturates at 2**31 - 1.
      rule_state: state of the rule inside.
    """

    unheard_retries: jax.Array  # shape=(), dtype=int32
    total_retries: jax.Array  # shape=(), dtype=int32
    rule_state: optax.OptState


def retrying(rule: Rule) -> Rule:
    r"""Lets ``value_and_scaled_grad(..., max_retries=k)`` count its retries.

    After r retries in a step, ``rule`` hears of r overflows and then of the outcome, so
    the scale moves as if each attempt had been a step:

    .. math:: S_{t+1} = \text{rule}(\text{outcome},
      \text{rule}(\text{overflow}, \ldots S_t))

    The retries themselves halve the scale, whatever the backoff factor of ``rule`` is.

    Args:
      rule: any rule. ``none()`` comes back as it is: it has nothing to retry.

    Returns:
      A :class:`Rule` whose state is a :class:`RetryingRuleState`.

    Example:
      >>> import optax
      >>> import optax_dls as dls
      >>> rule = dls.rules.retrying(dls.rules.dynamic(growth_interval=100))
      >>> tx = dls.loss_scaling(optax.adam(3e-4), rule)
    """
    if isinstance(jax.eval_shape(rule.init)[1], NoScalingState):
        return rule

    def init() -> tuple[jax.Array, optax.OptState]:
        loss_scale, rule_state = rule.init()
        count = jnp.zeros((), jnp.int32)
        return loss_scale, RetryingRuleState(count, count, rule_state)

    def update(
        grads_finite: jax.Array, loss_scale: jax.Array, rule_state: optax.OptState
    ) -> tuple[jax.Array, optax.OptState]:
        unheard, total, inside = rule_state

        def overflow(
            _: int, before: tuple[jax.Array, optax.OptState]
        ) -> tuple[jax.Array, optax.OptState]:
            after = rule.update(jnp.array(False), *before)
            return jax.tree.map(lambda a, b: jnp.asarray(a, b.dtype), after, before)

        heard = lax.fori_loop(0, unheard, overflow, (loss_scale, inside))
        loss_scale, inside = rule.update(grads_finite, *heard)
        return loss_scale, RetryingRuleState(jnp.zeros_like(unheard), total, inside)

    return Rule(init, update)


class NoScalingState(NamedTuple):
    """State of :func:`none`: empty, but it tells that nothing is scaled or skipped."""


def none() -> Rule:
    """No scaling: the scale is 1, and nothing is checked, unscaled or skipped.

    Returns:
      A :class:`Rule` with the empty :class:`NoScalingState`.

    Example:
      >>> import optax_dls as dls
      >>> scale, state = dls.rules.none().init()
      >>> float(scale)
      1.0
    """
    return Rule(
        lambda: (jnp.ones((), jnp.float32), NoScalingState()),
        lambda grads_finite, loss_scale, rule_state: (loss_scale, rule_state),
    )


def _float32(x: ArrayLike) -> jax.Array:
    return jnp.asarray(x, jnp.float32)


def _clamp(x: jax.Array, lower: ArrayLike, upper: ArrayLike) -> jax.Array:
    """The nearest value in [lower, upper]; NaN becomes ``lower``."""
    lower, upper = _float32(lower), _float32(upper)
    return jnp.where(x > lower, jnp.where(x < upper, x, upper), lower)


def _check(
    name: str,
    value: ArrayLike,
    rule: str,
    is_legal: Callable[[float], bool],
    cure: str,
    kind: type = numbers.Real,
) -> None:
    """Raises unless ``value`` is an array scalar, or a number that obeys ``rule``."""
    if isinstance(value, jax.Array | np.ndarray):
        is_integer = jnp.issubdtype(value.dtype, np.integer)
        is_float = jnp.issubdtype(value.dtype, np.floating)
        is_right = is_integer or (is_float and kind is numbers.Real)
        if value.shape != () or not is_right:
            raise TypeError(
                f"{name} must be {rule}; as an array it must be a scalar of shape (), "
                f"got shape {value.shape} and dtype {value.dtype}. {cure}"
            )
        return
    if isinstance(value, bool | np.bool_) or not isinstance(value, kind):
        raise TypeError(
            f"{name} must be {rule}, got {value!r} of type {type(value).__name__}. "
            f"{cure}"
        )
    if not is_legal(value):  # type: ignore[arg-type]
        raise ValueError(f"{name} must be {rule}, got {value!r}. {cure}")


def _check_scale(name: str, value: ArrayLike) -> None:
    _check(
        name,
        value,
        "a finite number from 2**-100 to 2**126",
        lambda x: SMALLEST_SCALE <= x <= LARGEST_SCALE,
        "It is the factor that the loss is multiplied by, usually a power of two "
        "such as 2.0**15; further out float32 itself flushes gradients to zero.",
    )


def _check_order(
    low_name: str, low: ArrayLike, high_name: str, high: ArrayLike
) -> None:
    if isinstance(low, numbers.Real) and isinstance(high, numbers.Real) and low > high:
        raise ValueError(
            f"{low_name} must be at most {high_name}, got {low_name}={low!r} and "
            f"{high_name}={high!r}. Lower the one or raise the other: the scale lives "
            "in [min_scale, max_scale] and starts at init_scale."
        )
