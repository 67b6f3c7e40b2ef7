"""Variables that a loss may write in place: those of NNX modules.

A variable belongs to the trace in which it was made. NNX refuses to differentiate or write
it in another, and the loop of the retries is one. So each attempt gets copies, and what the
last attempt wrote into them is written into the variables themselves after the loop.
"""

from typing import Protocol, TypeGuard, TypeVar

import jax

Tree = TypeVar("Tree")


class Variable(Protocol):
    """An ``nnx.Variable``, without importing Flax."""

    def get_raw_value(self) -> object: ...

    def set_raw_value(self, value: object) -> None: ...


def with_copied_variables(tree: Tree) -> Tree:
    """The tree with a copy of each variable; one that it holds twice stays one."""
    nodes, structure = jax.tree.flatten(tree, is_leaf=_is_variable)
    if not any(map(_is_variable, nodes)):
        return tree
    copies = {id(node): jax.tree.map(lambda leaf: leaf, node) for node in nodes}
    return jax.tree.unflatten(structure, [copies[id(node)] for node in nodes])


def written_values(copy: object, original: object) -> dict[int, object]:
    """The values of the variables that were written in ``copy``, by their positions.

    Raises:
      ValueError: a module in ``copy`` has gained or lost something.
    """
    old, old_structure = jax.tree.flatten(original, is_leaf=_is_variable)
    if not any(map(_is_variable, old)):
        return {}
    new, new_structure = jax.tree.flatten(copy, is_leaf=_is_variable)
    if new_structure != old_structure:  # type: ignore[operator]
        raise ValueError(
            "With max_retries the loss may write the variables of a module, but not add "
            "any, nor change its other attributes (as sow does). Return what it has to "
            "keep as aux, with has_aux=True."
        )
    return {
        position: after.get_raw_value()
        for position, (before, after) in enumerate(zip(old, new, strict=True))
        if _is_variable(before) and _is_written(before, after)
    }


def write_values(original: object, values: dict[int, object]) -> None:
    """Writes what :func:`written_values` gave into the variables of ``original``."""
    variables = jax.tree.leaves(original, is_leaf=_is_variable)
    for position, value in values.items():
        variables[position].set_raw_value(value)


def _is_variable(node: object) -> TypeGuard[Variable]:
    return hasattr(node, "set_raw_value")


def _is_written(before: Variable, after: Variable) -> bool:
    """Whether the arrays are others now. NNX hands on those that nobody writes."""
    old, new = jax.tree.leaves(before), jax.tree.leaves(after)
    return len(old) != len(new) or any(
        n is not o for n, o in zip(new, old, strict=True)
    )
