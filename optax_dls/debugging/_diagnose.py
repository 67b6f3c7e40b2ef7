"""What is wrong with a run, from its history: findings with numbers, causes and cures."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from . import _descent, _progress, _skips
from ._run import Finding, Run, check_is_history, read_run

if TYPE_CHECKING:
    from ._history import History

Check = Callable[[Run], Finding | None]

# Why steps are lost has one answer: the first that the record proves.
WHY_LOST: tuple[Check, ...] = (
    _progress.divergence,
    _skips.loss_not_finite,
    _skips.updates_not_finite,
    _skips.overflow_at_the_floor,
    _skips.overflow_at_a_fixed_scale,
    _skips.no_step_applied,
    _skips.frequent_overflow,
)
FURTHER: tuple[Check, ...] = (
    _skips.same_leaf,
    _descent.collapsed,
    _descent.slid,
    _progress.never_scaled,
    _progress.underflow,
    _progress.does_not_move,
    _progress.at_the_ceiling,
    _descent.never_grows,
    _progress.float16_loss,
    _skips.wrong_order,
)


def diagnose(
    history: "History | Mapping[str, np.ndarray]",
    *,
    growth_interval: float | None = None,
    min_scale: float | None = None,
    max_scale: float | None = None,
) -> list[Finding]:
    """Says what is wrong with a run; an empty list if nothing is seen.

    One skipped step now and then is the probe for a larger scale, and no finding; nor is
    the search for a first scale. The more the history holds, the more can be found: pass
    ``loss=`` and ``update_norm=optax.tree.norm(updates)`` on every step, for float16
    parameters ``param_norm=optax.tree.norm(params)``, and from time to time ``grad_norm=``
    (of ``dls.unscale(grads, opt_state)``), ``nonfinite_leaf=`` and ``underflow_share=``
    (both from a :class:`GradientReport`, the latter of a gradient computed in float32).

    Args:
      history: a :class:`History`, or what its ``arrays()`` gives. The former knows more:
        the settings of the rule, and a loss that was NaN from one that was not recorded
        (a column of ``arrays()`` that is NaN throughout counts as not recorded).
      growth_interval: of the rule. By default what ``history.settings`` says, then what
        the record shows, then the default of ``rules.dynamic``.
      min_scale: likewise.
      max_scale: likewise.

    Returns:
      A list of :class:`Finding`, the most likely cause of everything else first; ``print``
      each.

    Raises:
      TypeError: this is no history.
      ValueError: the history is empty, a column is missing or of another shape than
        (records,), ``growth_interval`` is below 1, or ``min_scale`` above ``max_scale``.

    Example:
      A run that overflows at every step, although the scale is at its floor:

      >>> import numpy as np
      >>> import optax_dls as dls
      >>> skips = np.arange(1, 41)
      >>> history = {"step": skips - 1, "loss_scale": np.maximum(2.0**15 / 2.0**skips, 2.0**-14),
      ...            "consecutive_skips": skips, "total_skips": skips}
      >>> [finding.name for finding in dls.diagnose(history)]
      ['overflow at the floor']
    """
    check_is_history(history)
    if growth_interval is not None and not growth_interval >= 1:
        raise ValueError(
            f"growth_interval must be at least 1, as of the rule, got {growth_interval!r}."
        )
    for name, scale in (("min_scale", min_scale), ("max_scale", max_scale)):
        if scale is not None and not 0 < scale < np.inf:
            raise ValueError(
                f"{name} must be above 0 and finite, as of the rule, got {scale!r}."
            )
    if min_scale is not None and max_scale is not None and min_scale > max_scale:
        raise ValueError(
            f"min_scale must be at most max_scale, got {min_scale!r} and {max_scale!r}."
        )
    settings = {
        "growth_interval": growth_interval,
        "min_scale": min_scale,
        "max_scale": max_scale,
    }
    run = read_run(history, settings)
    why_lost = next(filter(None, (check(run) for check in WHY_LOST)), None)
    findings = [why_lost, *(check(run) for check in FURTHER)]
    return [finding for finding in findings if finding is not None]
