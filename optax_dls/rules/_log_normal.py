"""A rule that learns how large gradients are, and how much they vary."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from . import _settings
from ._rule import DEFAULT_INIT_SCALE, DEFAULT_MAX_SCALE, DEFAULT_MIN_SCALE, Rule

LARGEST_FLOAT16 = 65504.0

# After an overflow the averages count as averages of so few steps: they were wrong, and in
# this way the next steps change them faster.
COUNT_AFTER_OVERFLOW = 20


class LogNormalRuleState(NamedTuple):
    """State of :func:`log_normal`, all about log2 of the largest gradient.

    Attributes:
      step_count: how many steps the averages are of.
      mean: the running mean.
      slow_mean: a running mean over a longer time, for the variance.
      variance: the running mean of the squared distance from ``slow_mean``.
    """

    step_count: jax.Array  # shape=(), dtype=int32
    mean: jax.Array  # shape=(), dtype=float32
    slow_mean: jax.Array  # shape=(), dtype=float32
    variance: jax.Array  # shape=(), dtype=float32


def log_normal(
    *,
    init_scale: ArrayLike = DEFAULT_INIT_SCALE,
    overflow_probability: ArrayLike = 0.001,
    mean_decay: ArrayLike = 0.99,
    variance_decay: ArrayLike = 0.999,
    gradient_limit: ArrayLike = LARGEST_FLOAT16,
    growth_factor: ArrayLike = 2.0,
    backoff_factor: ArrayLike = 0.5,
    min_scale: ArrayLike = DEFAULT_MIN_SCALE,
    max_scale: ArrayLike = DEFAULT_MAX_SCALE,
    power_of_two: bool = True,
) -> Rule:
    r"""Keeps the scale as large as the statistics of the gradients allow.

    With :math:`x_t` the log2 of the largest gradient of the step, :math:`\mu` and
    :math:`\sigma` its running mean and deviation, and :math:`z` the quantile of the
    normal distribution that ``overflow_probability`` leaves above:

    .. math:: S_{t+1} = \text{gradient\_limit} \cdot 2^{-(\mu + z \sigma)}

    The first overflow of a streak shows that a gradient was above what the scale could
    hold. It counts as one bit above, :math:`x_t = 1 + \log_2(\text{gradient\_limit} /
    S_t)`. Every overflow backs the scale off by ``backoff_factor`` or more. The finite
    steps after it take the scale back, each by at most ``growth_factor``. A step whose
    gradients are all zero is not counted.

    The rule sees the gradients of the parameters alone. If gradients inside the network
    overflow before them, it learns from overflows only, and :func:`dynamic` is the better
    choice.

    Args:
      init_scale: the scale of the first step.
      overflow_probability: the share of steps that may overflow, between 0 and 0.5.
      mean_decay: the decay of the running mean, between 0 and 1. 0.99 looks back 100
        steps.
      variance_decay: the decay of ``slow_mean`` and ``variance``, between 0 and 1.
      gradient_limit: the largest number that gradients can hold, 65504 in float16.
      growth_factor: the largest growth in a step, at least 2, or at least 1 without
        ``power_of_two``. ``inf`` does not limit the growth.
      backoff_factor: the smallest backoff at an overflow, between 0 and 1.
      min_scale: the floor.
      max_scale: the ceiling.
      power_of_two: whether to round the scale down to a power of two, so that scaling is
        exact.

    Returns:
      A :class:`Rule` that asks for ``largest_gradient``, with a
      :class:`LogNormalRuleState`.

    Raises:
      TypeError, ValueError: as :func:`dynamic`.

    Example:
      >>> import jax.numpy as jnp
      >>> import optax_dls as dls
      >>> rule = dls.rules.log_normal(init_scale=1.0)
      >>> scale, state = rule.init()
      >>> for _ in range(20):
      ...     scale, state = rule.update(
      ...         jnp.array(True), scale, state, largest_gradient=jnp.float32(0.5))
      >>> float(scale)  # the largest power of two that keeps 0.5 below 65504
      65536.0

    References:
      Kuchaiev et al., `Mixed-Precision Training for NLP and Speech Recognition with
      OpenSeq2Seq <https://arxiv.org/abs/1805.10387>`_, 2018
    """
    _settings.check_scales(init_scale, min_scale, max_scale)
    _settings.check_backoff_factor(backoff_factor)
    least = 2 if power_of_two is True else 1
    _settings.check(
        "growth_factor",
        growth_factor,
        f"at least {least}" + (", for powers of two" if least == 2 else ""),
        lambda x: x >= least,
        "Use 2.0.",
    )
    _settings.check(
        "overflow_probability",
        overflow_probability,
        "above 0 and below 0.5",
        lambda x: 0 < x < 0.5,
        "Use 0.001.",
    )
    for name, decay, default in (
        ("mean_decay", mean_decay, 0.99),
        ("variance_decay", variance_decay, 0.999),
    ):
        _settings.check(
            name, decay, "above 0 and below 1", lambda x: 0 < x < 1, f"Use {default}."
        )
    _settings.check_gradient_limit(gradient_limit)
    if not isinstance(power_of_two, bool):
        raise TypeError(f"power_of_two must be True or False, got {power_of_two!r}.")

    def init() -> tuple[jax.Array, optax.OptState]:
        loss_scale = _settings.first_scale(init_scale, min_scale, max_scale)
        zero = jnp.zeros((), jnp.float32)
        return loss_scale, LogNormalRuleState(
            jnp.zeros((), jnp.int32), zero, zero, zero
        )

    def update(
        grads_finite: jax.Array,
        loss_scale: jax.Array,
        rule_state: optax.OptState,
        *,
        last_finite: ArrayLike = True,
        largest_gradient: ArrayLike,
    ) -> tuple[jax.Array, optax.OptState]:
        # Imported here: it takes longer than the rest of the package.
        from jax.scipy.special import ndtri

        limit = _settings.float32(gradient_limit)
        limit = jnp.log2(_settings.clamp(limit, 2.0**-100, np.finfo(np.float32).max))
        largest = jnp.asarray(largest_gradient, jnp.float32)
        # The later overflows of a streak are left out: in a burst of NaN the scale falls on
        # and on, and each would count as a larger gradient than the one before.
        is_evidence = jnp.logical_not(grads_finite) & last_finite
        x = jnp.where(
            grads_finite,
            jnp.log2(jnp.where(largest > 0, largest, 1.0)),
            1 + limit - jnp.log2(loss_scale),
        )
        forgetful = rule_state._replace(
            step_count=jnp.where(
                is_evidence,
                jnp.minimum(rule_state.step_count, COUNT_AFTER_OVERFLOW),
                rule_state.step_count,
            )
        )
        rule_state = jax.tree.map(
            lambda new, old: jnp.where(
                is_evidence | (grads_finite & (largest > 0)), new, old
            ),
            _observe(forgetful, x, mean_decay, variance_decay),
            rule_state,
        )
        probability = _settings.float32(overflow_probability)
        z = -ndtri(_settings.clamp(probability, 1e-30, 0.5))
        exponent = limit - rule_state.mean - z * jnp.sqrt(rule_state.variance)
        best = jnp.exp2(jnp.clip(exponent, -126.0, 126.0))
        best = jnp.where(rule_state.step_count > 0, best, loss_scale)
        growth = _settings.clamp(growth_factor, 1, np.inf)
        backoff = _settings.clamp(backoff_factor, 0, 1)
        farthest = loss_scale * jnp.where(grads_finite, growth, backoff)
        new_scale = _settings.clip(jnp.minimum(best, farthest), min_scale, max_scale)
        if power_of_two:
            # exp2 rounds: a value just below a power of two is meant to be that power.
            _, exponent = jnp.frexp(new_scale * (1 + 1e-5))
            new_scale = jnp.ldexp(jnp.ones_like(new_scale), exponent - 1)
            new_scale = _settings.clip(new_scale, min_scale, max_scale)
        return new_scale, rule_state

    settings = _settings.known(
        init_scale=init_scale, min_scale=min_scale, max_scale=max_scale
    )
    return Rule(init, update, ("last_finite", "largest_gradient"), settings)


def _observe(
    rule_state: LogNormalRuleState,
    x: jax.Array,
    mean_decay: ArrayLike,
    variance_decay: ArrayLike,
) -> LogNormalRuleState:
    """The averages after one more x, with weights that go as decay**age and sum to 1."""
    count = optax.safe_increment(rule_state.step_count)

    def share_of_newest(decay: ArrayLike) -> jax.Array:
        decay = _settings.clamp(decay, 0.0, 1 - 1e-6)
        return (1 - decay) / (1 - decay ** count.astype(jnp.float32))

    # Computed from distances: a difference of mean squares would lose all digits.
    share = share_of_newest(variance_decay)
    distance = x - rule_state.slow_mean
    return LogNormalRuleState(
        step_count=count,
        mean=rule_state.mean + share_of_newest(mean_decay) * (x - rule_state.mean),
        slow_mean=rule_state.slow_mean + share * distance,
        variance=(1 - share) * (rule_state.variance + share * distance * distance),
    )
