"""What a rule is, and the bounds of every scale."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import optax

# XLA flushes subnormal float32 numbers to zero. Outside these bounds the scale, its
# reciprocal or an ordinary scaled gradient would be subnormal, and silently vanish.
SMALLEST_SCALE = 2.0**-100
LARGEST_SCALE = 2.0**126

DEFAULT_INIT_SCALE = 2.0**15
DEFAULT_GROWTH_INTERVAL = 2000
DEFAULT_RECOVERY_INTERVAL = 10
DEFAULT_MIN_SCALE = 2.0**-14
DEFAULT_MAX_SCALE = 2.0**32

NEEDS = ("last_finite", "largest_gradient", "updates_rule")


class Rule(NamedTuple):
    """How the loss scale moves, as a pair of pure functions on scalars.

    Attributes:
      init: ``() -> (loss_scale, rule_state)``, the scale of the first step
        (shape (), float32) and a pytree of whatever the rule has to remember.
      update: ``(grads_finite, loss_scale, rule_state) -> (loss_scale, rule_state)``,
        called once a step. ``grads_finite`` has shape () and dtype bool. The shapes and
        dtypes of the state must not change. A step whose loss or updates were not finite
        leaves scale and state as they were, since no scale could have helped.
      needs: the step information that ``update`` takes besides, by the names of its
        keyword arguments. What no rule needs is not computed.

        - ``"last_finite"``: whether the gradients of the previous step were finite, True
          before the first step. This includes steps that left the rule as it was.
        - ``"largest_gradient"``: the largest finite magnitude among the entries of the
          unscaled gradients, or among their real and imaginary parts. It has shape () and
          dtype float32, and is equal on all devices that share the scale. It costs a
          second reduction over the gradients.
        - ``"updates_rule"``: False where a loss or an update that is not finite made the
          step skip, so that no scale could have helped. A rule that does not ask for it
          is not updated there; one that does is, and has to leave its scale alone.

      settings: pairs of a name and its number, of ``init_scale``, ``min_scale``,
        ``max_scale`` and ``growth_interval`` as far as the rule has them, for a
        :class:`History` to record. A rule works without.
      catch_up: ``(loss_scale, rule_state) -> (loss_scale, rule_state)``, with the same
        keyword arguments as ``update`` but ``updates_rule``. It is called before ``update``
        in every step: for what has happened before the outcome of the step is known, as
        retries have. A loop belongs here, since ``update`` is part of both branches of the
        conditional. None where nothing happens in between.

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
    update: Callable[..., tuple[jax.Array, optax.OptState]]
    needs: tuple[str, ...] = ()
    settings: tuple[tuple[str, float], ...] = ()
    catch_up: Callable[..., tuple[jax.Array, optax.OptState]] | None = None
