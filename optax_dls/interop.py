"""Reads and writes the scaler states of other systems, so that a run keeps its scale.

Other systems save their scalers as dicts of numbers, so none of them is needed here. Give
the optimizer the rule of the same name from :mod:`optax_dls.profiles`, with the settings of
the run. Then the scale moves on as it would have there. Call both functions outside of
``jit``.
"""

import numbers
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, TypeGuard, TypeVar

import jax
import numpy as np

from ._lookup import scaler_state, with_scaler
from ._scaler_state import ScalerState
from .rules import DynamicRuleState, HysteresisRuleState, LevelRuleState, _settings

__all__ = ("export_scaler", "import_scaler")

Tree = TypeVar("Tree")
Counting = DynamicRuleState | HysteresisRuleState | LevelRuleState


class Counters(NamedTuple):
    """What the scalers of all systems remember; None where there is no hysteresis."""

    loss_scale: float
    growth_count: int
    overflows_left: int | None = None


class System(NamedTuple):
    """How one system saves its scaler, as a dict.

    Attributes:
      keys: the keys that the dict must have.
      read: the counters in the dict.
      write: the dict for the counters.
      settings: the settings that the dict holds as well, with the system's defaults.
    """

    keys: tuple[str, ...]
    read: Callable[[Mapping[str, float]], Counters]
    write: Callable[[Counters], dict[str, float | np.ndarray]]
    settings: Mapping[str, float] = MappingProxyType({})


def _read_deepspeed(saved: Mapping[str, float]) -> Counters:
    finite_steps = int(saved["cur_iter"] - saved["last_overflow_iter"] - 1)
    window = int(saved["scale_window"])
    if finite_steps < 0 or window < 1:
        raise ValueError(
            "cur_iter must be above last_overflow_iter and scale_window at least 1, got "
            f"{dict(saved)}."
        )
    # The count of profiles.deepspeed goes from 0 to scale_window and from there back to 1.
    count = (finite_steps - 1) % window + 1 if finite_steps else 0
    left = saved.get("cur_hysteresis")
    return Counters(saved["cur_scale"], count, None if left is None else int(left))


SCALES = ("scale", "cur_scale", "loss_scale")
OPTIONAL_KEYS = ("cur_hysteresis",)
SYSTEMS = {
    "torch": System(
        ("scale", "_growth_tracker"),
        lambda saved: Counters(saved["scale"], int(saved["_growth_tracker"])),
        lambda c: {"scale": c.loss_scale, "_growth_tracker": c.growth_count},
        {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000},
    ),
    "megatron": System(
        ("scale", "growth_tracker", "hysteresis_tracker"),
        lambda saved: Counters(
            saved["scale"],
            int(saved["growth_tracker"]),
            int(saved["hysteresis_tracker"]),
        ),
        lambda c: {
            # The loader of Megatron moves it to the GPU: a tensor of shape (1,) there.
            "scale": np.array([c.loss_scale], np.float32),
            "growth_tracker": c.growth_count,
            "hysteresis_tracker": 1 if c.overflows_left is None else c.overflows_left,
        },
    ),
    "deepspeed": System(
        ("cur_scale", "cur_iter", "last_overflow_iter", "scale_window"),
        _read_deepspeed,
        lambda c: {
            "cur_scale": c.loss_scale,
            "cur_iter": c.growth_count,
            "last_overflow_iter": -1,
            # DeepSpeed backs off at exactly 1, so below that it never would.
            "cur_hysteresis": max(c.overflows_left or 1, 1),
        },
        {"scale_window": 1000},
    ),
    "flax": System(
        ("scale", "fin_steps"),
        lambda saved: Counters(saved["scale"], int(saved["fin_steps"])),
        lambda c: {"scale": c.loss_scale, "fin_steps": c.growth_count},
    ),
    "jmp": System(
        ("loss_scale", "counter"),
        lambda saved: Counters(saved["loss_scale"], int(saved["counter"])),
        lambda c: {"loss_scale": c.loss_scale, "counter": c.growth_count},
    ),
}


def import_scaler(system: str, saved: Mapping[str, Any], state: Tree) -> Tree:
    """Puts the scale and the counts of another system into a training state.

    Args:
      system: ``"torch"``, ``"megatron"``, ``"deepspeed"``, ``"flax"`` or ``"jmp"``.
      saved: what the system saved: ``GradScaler.state_dict()``; Megatron's
        ``DynamicGradScaler.state_dict()``; ``vars()`` of DeepSpeed's ``DynamicLossScaler``
        or the ``state_dict()`` of its ``FP16_Optimizer``;
        ``flax.serialization.to_state_dict(dynamic_scale)``; ``vars()`` of jmp's
        ``DynamicLossScale``. Numbers may be arrays or tensors of one element, on any
        device. Settings in it are ignored: give them to the profile.
      state: anything that holds exactly one scaler, of a dynamic rule.

    Returns:
      ``state`` with the new scale and the new counts. The counts of skips stay as they
      are. A scale outside the bounds of the rule moves into them at the next step.

    Raises:
      ValueError: the system is unknown, a key is missing, a value is not one number, or
        the scale is outside [2**-100, 2**126] (torch can reach 0); or as
        ``scaler_state``.
      TypeError: ``state`` is of another rule, or holds a population of scalers.

    Example:
      >>> import jax.numpy as jnp
      >>> import optax
      >>> import optax_dls as dls
      >>> tx = dls.loss_scaling(optax.adam(1e-3), dls.profiles.torch())
      >>> saved = {"scale": 1024.0, "growth_factor": 2.0, "backoff_factor": 0.5,
      ...          "growth_interval": 2000, "_growth_tracker": 17}
      >>> state = dls.interop.import_scaler("torch", saved, tx.init(jnp.zeros(2)))
      >>> float(dls.loss_scale(state)), int(optax.tree.get(state, "growth_count"))
      (1024.0, 17)
    """
    entry = _entry(system)
    if not isinstance(saved, Mapping):
        raise TypeError(
            f"saved must be a dict, got {type(saved).__name__}. The order is "
            "import_scaler(system, saved, state)."
        )
    missing = [key for key in entry.keys if key not in saved]
    if missing:
        raise ValueError(
            f"saved has no {missing[0]!r}, which a {system} scaler saves: got the keys "
            f"{sorted(map(str, saved))}. An empty dict is that of a scaler that was off."
        )
    keys = (*entry.keys, *(key for key in OPTIONAL_KEYS if key in saved))
    counters = entry.read({key: _number(key, saved[key]) for key in keys})
    _settings.check_scale("scale", counters.loss_scale)
    scaler = scaler_state(state)
    _rule_state(scaler)
    count = max(counters.growth_count, 0)
    new = {**counters._asdict(), "growth_count": count}
    # The other systems count from the last overflow or growth, and their scale is settled.
    new |= {"finite_steps": count, "test_steps": 0, "failures": 0}
    new |= dict.fromkeys(("level", "last_scale"), counters.loss_scale)

    def put(old: jax.Array, name: str) -> jax.Array:
        return jax.device_put(np.asarray(new[name], old.dtype), old.sharding)

    def replace(node: object) -> object:
        if not _is_counting(node):
            return node
        names = [name for name in node._fields if new.get(name) is not None]
        return node._replace(**{name: put(getattr(node, name), name) for name in names})

    scaler = jax.tree.map(replace, scaler, is_leaf=_is_counting)
    scaler = scaler._replace(loss_scale=put(scaler.loss_scale, "loss_scale"))
    return with_scaler(state, scaler)


def export_scaler(system: str, state: object, **settings: float) -> dict[str, Any]:
    """The scale and the counts of a training state, as another system saves them.

    Args:
      system: as in :func:`import_scaler`.
      state: anything that holds exactly one scaler, of a dynamic rule. It is copied
        from the device.
      **settings: settings that the system saves and that ``state`` does not hold:
        ``growth_factor``, ``backoff_factor`` and ``growth_interval`` for torch,
        ``scale_window`` for DeepSpeed. The default is that of the system.

    Returns:
      A dict of plain numbers, for torch's ``GradScaler.load_state_dict`` and the like. Its
      count is that of the finite steps in a row at this scale.

      Megatron's ``load_state_dict`` needs a tensor as scale. The dict holds a float32
      array of shape (1,): set ``saved["scale"] = torch.from_numpy(saved["scale"])``.

      DeepSpeed's ``DynamicLossScaler`` loads no dict: set the numbers as its attributes.

    Raises:
      ValueError: the system is unknown, or does not save a setting.
      TypeError: as :func:`import_scaler`.

    Example:
      >>> import jax.numpy as jnp
      >>> import optax
      >>> import optax_dls as dls
      >>> tx = dls.dynamic_loss_scaling(optax.adam(1e-3))
      >>> dls.interop.export_scaler("flax", tx.init(jnp.zeros(2)))
      {'scale': 32768.0, 'fin_steps': 0}
    """
    entry = _entry(system)
    unknown = [name for name in settings if name not in entry.settings]
    if unknown:
        raise ValueError(
            f"a {system} scaler does not save {unknown[0]!r}; settings that it saves: "
            f"{sorted(entry.settings) or 'none'}."
        )
    scaler = scaler_state(state)
    rule_state = _rule_state(scaler)
    left = getattr(rule_state, "overflows_left", None)
    counters = Counters(
        float(scaler.loss_scale),
        _growth_count(scaler, rule_state),
        None if left is None else int(left),
    )
    return {**entry.write(counters), **entry.settings, **settings}


def _number(key: str, value: object) -> float:
    """A number, or an array or tensor of one element, as a float."""
    try:
        # Tensors have item() as arrays do. Unlike np.asarray it works on GPUs, too.
        number = value.item() if hasattr(value, "item") else np.asarray(value).item()
        if not isinstance(number, numbers.Real):
            raise TypeError
        number = float(number)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # the last: from torch
        raise ValueError(f"saved[{key!r}] must be one number, got {value!r}.") from None
    if key not in SCALES and not (-(2**31) <= number < 2**31 and number == int(number)):
        raise ValueError(
            f"saved[{key!r}] must be a whole number within int32, got {value!r}."
        )
    return number


def _entry(system: str) -> System:
    if not isinstance(system, str) or system not in SYSTEMS:
        raise ValueError(f"system must be one of {sorted(SYSTEMS)}, got {system!r}.")
    return SYSTEMS[system]


def _growth_count(scaler: ScalerState, rule_state: Counting) -> int:
    """Finite steps in a row since the last growth or overflow, as the others count them."""
    count = max(int(rule_state.growth_count), 0)
    if (
        not isinstance(rule_state, LevelRuleState)
        or scaler.loss_scale > rule_state.level
    ):
        return count
    return min(count, max(int(rule_state.finite_steps), 0))


def _is_counting(node: object) -> TypeGuard[Counting]:
    return isinstance(node, Counting)


def _rule_state(scaler: ScalerState) -> Counting:
    """The state of the dynamic rule of one scaler, also inside another rule's state."""
    if isinstance(scaler.loss_scale, jax.core.Tracer):
        raise TypeError(
            "state must be concrete, got a traced one. Call this function before or after "
            "the jitted function, not inside."
        )
    found = list(
        filter(_is_counting, jax.tree.leaves(scaler.rule_state, is_leaf=_is_counting))
    )
    if not found:
        raise TypeError(
            "state must be of a dynamic rule, got the rule state "
            f"{type(scaler.rule_state).__name__}. Build the optimizer with "
            "dynamic_loss_scaling(...) or loss_scaling(optimizer, profiles.torch())."
        )
    if scaler.loss_scale.shape != ():
        raise TypeError(
            f"state must hold one scale, got scales of shape {scaler.loss_scale.shape}. "
            "Take the members of a population apart first."
        )
    return found[0]
