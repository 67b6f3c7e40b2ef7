"""Which arrays ``unscale`` gave, so that nobody hands them to ``tx.update``.

They are remembered weakly, by identity, and so also while a function is traced. What is
computed from them is not known any more.
"""

import weakref

import jax
import optax

_unscaled: weakref.WeakValueDictionary[int, jax.Array] = weakref.WeakValueDictionary()


def tag_unscaled(unscaled: optax.Updates, scaled: optax.Updates) -> None:
    """Remembers the leaves of ``unscaled`` that are not those of ``scaled``."""
    passed = set(map(id, jax.tree.leaves(scaled)))
    for leaf in jax.tree.leaves(unscaled):
        if isinstance(leaf, jax.Array) and id(leaf) not in passed:
            _unscaled[id(leaf)] = leaf


def check_scaled(grads: optax.Updates, name: str) -> None:
    """Raises if a leaf is one that ``unscale`` gave."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(grads)[0]:
        if _unscaled.get(id(leaf)) is leaf:
            raise ValueError(
                f"{name}{jax.tree_util.keystr(path)} is what optax_dls.unscale gave, and "
                "tx.update divides by the scale itself. Pass the gradients of the scaled "
                "loss as they are, and keep the unscaled ones for logging."
            )
