"""The scaler states of other systems, in and out, so that a run moves with its scale.

What they save are dicts of numbers, so none of these packages is needed here. Give the
optimizer the rule of the same name from :mod:`optax_dls.profiles`, with the settings of the
run, and the scale goes on as it would have there. Both functions are for outside of ``jit``.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, TypeGuard, TypeVar

import jax
import numpy as np

from ._lookup import scaler_state, with_scaler
from ._scaler_state import ScalerState
from .rules import DynamicRuleState, HysteresisRuleState, _settings

__all__ = ("export_scaler", "import_scaler")

Tree = TypeVar("Tree")


class Counters(NamedTuple):
    """What the systems have in common."""

    loss_scale: float
    growth_count: int
    overflows_left: int | None = None


class System(NamedTuple):
    """How one system writes them down.

    Attributes:
      keys: what has to be in its dict.
      read: from the dict.
      write: to the dict.
      settings: what its dict holds besides, with the defaults of the system.
    """

    keys: tuple[str, ...]
    read: Callable[[Mapping[str, float]], Counters]
    write: Callable[[Counters], dict[str, float | None]]
    settings: Mapping[str, float] = MappingProxyType({})


def _read_deepspeed(saved: Mapping[str, float]) -> Counters:
    finite_steps = int(saved["cur_iter"] - saved["last_overflow_iter"] - 1)
    window = int(saved["scale_window"])
    if finite_steps < 0 or window < 1:
        raise ValueError(
            "cur_iter must be above last_overflow_iter and scale_window at least 1, got "
            f"{dict(saved)}."
        )
    # From the first growth on, a growth is every scale_window steps.
    count = (finite_steps - 1) % window + 1 if finite_steps else 0
    left = saved.get("cur_hysteresis")
    return Counters(saved["cur_scale"], count, None if left is None else int(left))


SCALES = ("scale", "cur_scale", "loss_scale")
OPTIONAL_KEYS = ("cur_hysteresis",)
SYSTEMS = {
    "torch": System(
        ("scale", "_growth_tracker"),
        lambda saved: Counters(saved["scale"], int(saved["_growth_tracker"])),
        lambda c: {"scale": c.loss_scale, "_growth_tracker": max(c.growth_count, 0)},
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
            "scale": c.loss_scale,
            "growth_tracker": max(c.growth_count, 0),
            "hysteresis_tracker": 1 if c.overflows_left is None else c.overflows_left,
        },
    ),
    "deepspeed": System(
        ("cur_scale", "cur_iter", "last_overflow_iter", "scale_window"),
        _read_deepspeed,
        lambda c: {
            "cur_scale": c.loss_scale,
            "cur_iter": max(c.growth_count, 0),
            "last_overflow_iter": -1,
            "cur_hysteresis": max(c.overflows_left or 1, 1),
        },
        {"scale_window": 1000},
    ),
    "flax": System(
        ("scale", "fin_steps"),
        lambda saved: Counters(saved["scale"], int(saved["fin_steps"])),
        lambda c: {"scale": c.loss_scale, "fin_steps": max(c.growth_count, 0)},
    ),
    "jmp": System(
        ("loss_scale", "counter"),
        lambda saved: Counters(saved["loss_scale"], int(saved["counter"])),
        lambda c: {"loss_scale": c.loss_scale, "counter": max(c.growth_count, 0)},
    ),
}


def import_scaler(system: str, saved: Mapping[str, Any], state: Tree) -> Tree:
    """A training state that goes on with the scale and the counts of another system.

    Args:
      system: ``"torch"``, ``"megatron"``, ``"deepspeed"``, ``"flax"`` or ``"jmp"``.
      saved: what it saved: ``GradScaler.state_dict()``; Megatron's
        ``DynamicGradScaler.state_dict()``; ``vars()`` of DeepSpeed's ``DynamicLossScaler``
        or the ``state_dict()`` of its ``FP16_Optimizer``;
        ``flax.serialization.to_state_dict(dynamic_scale)``; ``vars()`` of jmp's
        ``DynamicLossScale``. Numbers may be arrays of one element. Settings among them are
        not taken over: they belong to ``profiles``.
      state: anything that holds exactly one scaler, of a dynamic rule.

    Returns:
      ``state`` with a new scale and new counts. Skips are counted from where they were. A
      scale outside the bounds of the rule moves into them at the next step.

    Raises:
      ValueError: the system is unknown, a key is missing, or the scale is outside
        [2**-100, 2**126], as where torch has reached 0; or as ``scaler_state``.
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
    new = counters._asdict()

    new["growth_count"] = max(counters.growth_count, 0)

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
    """The scale and the counts of a training state as another system saves them.

    Args:
      system: as in :func:`import_scaler`.
      state: anything that holds exactly one scaler, of a dynamic rule. It is copied
        from the device.
      **settings: those that the system saves too, and that a state does not hold:
        ``growth_factor``, ``backoff_factor`` and ``growth_interval`` for torch,
        ``scale_window`` for DeepSpeed. Without them the dict has the system's defaults.

    Returns:
      A dict of plain numbers, for ``GradScaler().load_state_dict(...)`` and the like. A
      scale that is recovering from a streak of overflows goes out with a count of 0. For
      DeepSpeed, set them as attributes of its ``DynamicLossScaler``.

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
        int(rule_state.growth_count),
        None if left is None else int(left),
    )
    return {**entry.write(counters), **entry.settings, **settings}


def _number(key: str, value: object) -> float:
    """A number, or an array or tensor of one element, as a float."""
    array = np.asarray(value)
    try:
        if array.size != 1 or array.dtype.kind in "OUSM":
            raise TypeError
        number = array.astype(np.float64).item()  # bfloat16 too
    except (TypeError, ValueError):
        raise ValueError(f"saved[{key!r}] must be one number, got {value!r}.") from None
    if key not in SCALES and not (-(2**31) <= number < 2**31 and number == int(number)):
        raise ValueError(
            f"saved[{key!r}] must be a whole number within int32, got {value!r}."
        )
    return float(number)


def _entry(system: str) -> System:
    if not isinstance(system, str) or system not in SYSTEMS:
        raise ValueError(f"system must be one of {sorted(SYSTEMS)}, got {system!r}.")
    return SYSTEMS[system]


def _is_counting(node: object) -> TypeGuard[DynamicRuleState | HysteresisRuleState]:
    return isinstance(node, DynamicRuleState | HysteresisRuleState)


def _rule_state(scaler: ScalerState) -> DynamicRuleState | HysteresisRuleState:
    """The state of the dynamic rule, wherever it is, of one scaler."""
    if isinstance(scaler.loss_scale, jax.core.Tracer):
        raise TypeError(
            "state must be concrete, got a traced one. Call it before or after the "
            "jitted function, not inside."
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
