"""Under which wrappers of Optax a loss scaler must not be, and the order that works."""

import optax

from ._scaler_state import holds_scaler

# A scaler may be under these wrappers of Optax: they hand on the gradients as they are, and
# a skipped step leaves the parameters as they are.
_SAFE_WRAPPERS = (
    optax.InjectHyperparamsState,
    optax.InjectStatefulHyperparamsState,
    optax.contrib.SplitRealAndImaginaryState,
)
# It must not be under any other. Of those that are known: the order that works, and what
# goes wrong in the other one. By name, since older versions lack some of them.
_BREAKS_SCALER = {
    "ApplyIfFiniteState": (
        "apply_if_finite(optimizer, n)",
        "the scaler never hears of an overflow",
    ),
    "ConditionallyMaskState": (
        "conditionally_mask(optimizer, condition)",
        "the scaler misses steps",
    ),
    "ConditionallyTransformState": (
        "conditionally_transform(optimizer, condition)",
        "the scaler misses steps, and the scaled gradient becomes the update",
    ),
    "GaLoreState": (
        "contrib.galore(learning_rate, base_optimizer=optimizer)",
        "one overflow stays in its projection, so that many steps are skipped after it",
    ),
    "LookaheadState": (
        "lookahead(optimizer, sync_period, slow_step_size)",
        "a skipped step counts and can move the parameters",
    ),
    "MaskedState": (
        "masked(optimizer, mask)",
        "the other leaves get the scaled gradient as their update",
    ),
    "MechanicState": (
        "contrib.mechanize(optimizer)",
        "the first overflow makes the parameters NaN",
    ),
    "MultiStepsState": (
        "MultiSteps(optimizer, k).gradient_transformation()",
        "one overflow stays in its accumulator for ever",
    ),
    "PartitionState": (
        "partition(optimizers, labels)",
        "one loss has one scale, but the groups would be scaled apart",
    ),
    "SAMState": (
        "contrib.sam(optimizer, adversary)",
        "the adversary sees scaled gradients, and an overflow makes the parameters NaN",
    ),
    "ScheduleFreeState": (
        "contrib.schedule_free(optimizer, learning_rate)",
        "a skipped step counts and moves the parameters",
    ),
}


def is_of_optax(node: object) -> bool:
    """Whether this is one of the states (or other containers) that Optax defines."""
    return type(node).__module__.startswith("optax.")


def may_break_scaler(node: object) -> bool:
    """Whether this is the state of a transformation of Optax that no scaler may be under."""
    return is_of_optax(node) and not isinstance(node, _SAFE_WRAPPERS)


def check_breaks_no_scaler(node: object) -> None:
    """Raises where a scaler is under such a transformation."""
    if not (may_break_scaler(node) and holds_scaler(node)):
        return
    name = type(node).__name__
    right, harm = _BREAKS_SCALER.get(
        name, (f"{name.removesuffix('State')}(...)", "it is not known to be safe")
    )
    raise ValueError(
        f"state has a loss scaler under optax.{right.partition('(')[0]}, where {harm}. Put "
        f"the scaler outside: dynamic_loss_scaling({right})."
    )
