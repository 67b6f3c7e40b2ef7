"""Settings of a rule: numbers are checked, arrays are clamped where they are used."""

import numbers
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ._rule import (
    DEFAULT_INIT_SCALE,
    DEFAULT_MAX_SCALE,
    LARGEST_SCALE,
    SMALLEST_SCALE,
)

# NumPy computes with plain numbers, so that compiled programs hold only the results.
Scalar = jax.Array | np.ndarray


def float32(x: ArrayLike) -> Scalar:
    array = jnp if isinstance(x, jax.Array) else np
    return array.asarray(x, np.float32)


def is_finite(x: Scalar) -> Scalar:
    return (x > -np.inf) & (x < np.inf)


def where(condition: Scalar, x: ArrayLike, y: ArrayLike) -> Scalar:
    x, y = float32(x), float32(y)
    if any(isinstance(part, jax.Array) for part in (condition, x, y)):
        return jnp.where(condition, x, y)
    return np.where(condition, x, y)


def clamp(x: ArrayLike, lower: ArrayLike, upper: ArrayLike) -> Scalar:
    """The nearest value in [lower, upper]; NaN becomes ``lower``."""
    x, lower, upper = float32(x), float32(lower), float32(upper)
    return where(x > lower, where(x < upper, x, upper), lower)


def clip(
    loss_scale: ArrayLike, min_scale: ArrayLike, max_scale: ArrayLike
) -> jax.Array:
    """The scale in [min_scale, max_scale], both moved into the legal range."""
    ceiling = float32(max_scale)
    ceiling = where(is_finite(ceiling), ceiling, DEFAULT_MAX_SCALE)
    ceiling = clamp(ceiling, SMALLEST_SCALE, LARGEST_SCALE)
    floor = clamp(min_scale, SMALLEST_SCALE, ceiling)
    return jnp.asarray(clamp(loss_scale, floor, ceiling))


def first_scale(
    init_scale: ArrayLike, min_scale: ArrayLike, max_scale: ArrayLike
) -> jax.Array:
    """The first scale, in bounds; the default for an array that is not finite."""
    scale = float32(init_scale)
    scale = where(is_finite(scale), scale, DEFAULT_INIT_SCALE)
    return clip(scale, min_scale, max_scale)


def steps(interval: ArrayLike, largest: int = 2**31 - 1) -> Scalar:
    """A number of steps as int32 of at least 1."""
    if not isinstance(interval, jax.Array):
        return np.asarray(np.clip(interval, 1, largest), np.int32)
    return jnp.clip(interval, 1, largest).astype(jnp.int32)


def known(**settings: ArrayLike | None) -> tuple[tuple[str, float], ...]:
    """The settings that are numbers, not arrays or tracers; so that rules can be hashed."""
    return tuple(
        (name, float(value))  # type: ignore[arg-type]
        for name, value in settings.items()
        if isinstance(value, numbers.Real)
    )


def check(
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


def check_scale(name: str, value: ArrayLike) -> None:
    check(
        name,
        value,
        "a finite number from 2**-100 to 2**126",
        lambda x: SMALLEST_SCALE <= x <= LARGEST_SCALE,
        "It is the factor that the loss is multiplied by, usually a power of two "
        "such as 2.0**15; further out float32 itself flushes gradients to zero.",
    )


def check_order(low_name: str, low: ArrayLike, high_name: str, high: ArrayLike) -> None:
    if isinstance(low, numbers.Real) and isinstance(high, numbers.Real) and low > high:
        raise ValueError(
            f"{low_name} must be at most {high_name}, got {low_name}={low!r} and "
            f"{high_name}={high!r}. Lower the one or raise the other: the scale lives "
            "in [min_scale, max_scale] and starts at init_scale."
        )


def check_scales(
    init_scale: ArrayLike, min_scale: ArrayLike, max_scale: ArrayLike
) -> None:
    check_scale("min_scale", min_scale)
    check_scale("max_scale", max_scale)
    check_scale("init_scale", init_scale)
    check_order("min_scale", min_scale, "max_scale", max_scale)
    check_order("min_scale", min_scale, "init_scale", init_scale)
    check_order("init_scale", init_scale, "max_scale", max_scale)


def check_factors(growth_factor: ArrayLike, backoff_factor: ArrayLike) -> None:
    check(
        "growth_factor",
        growth_factor,
        "at least 1 and finite in float32",
        lambda x: 1 <= x <= float(np.finfo(np.float32).max),
        "Use 2.0, or 1.0 for a scale that never grows.",
    )
    check_backoff_factor(backoff_factor)


def check_backoff_factor(backoff_factor: ArrayLike) -> None:
    check(
        "backoff_factor",
        backoff_factor,
        "above 0 and below 1",
        lambda x: 0 < x < 1,
        "Use 0.5.",
    )


def check_steps(
    name: str, value: ArrayLike, cure: str, largest: int = 2**31 - 1
) -> None:
    bound = "2**31 - 1" if largest == 2**31 - 1 else str(largest)
    check(
        name,
        value,
        f"a whole number from 1 to {bound}",
        lambda x: 1 <= x <= largest,
        cure,
        kind=numbers.Integral,
    )


def check_gradient_limit(gradient_limit: ArrayLike) -> None:
    check(
        "gradient_limit",
        gradient_limit,
        "above 0 and finite in float32",
        lambda x: 0 < x <= float(np.finfo(np.float32).max),
        "Use 65504 for gradients computed in float16.",
    )
