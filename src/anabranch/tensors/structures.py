"""Nested containers of tensors, through optree: flatten, rebuild, map, and name each leaf by its path.

``None`` is a leaf, not an empty container: a missing tensor keeps its place when it crosses a boundary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import optree

if TYPE_CHECKING:
    from optree import PyTreeSpec

__all__ = ["Structure", "flatten", "map_structure", "paths", "unflatten"]

Structure: TypeAlias = Any
"""Tensors in any nesting of dict, list, tuple, named tuple and registered dataclass."""


def flatten(structure: Structure, is_leaf: Callable[[object], bool] | None = None) -> tuple[list[object], PyTreeSpec]:
    """Return the leaves, those for which ``is_leaf`` holds whole, and the treedef that puts them back.

    >>> leaves, treedef = flatten({"a": 1, "b": (2, None)})
    >>> leaves
    [1, 2, None]
    >>> unflatten(treedef, leaves)
    {'a': 1, 'b': (2, None)}
    """
    return optree.tree_flatten(structure, is_leaf, none_is_leaf=True)


def unflatten(treedef: PyTreeSpec, leaves: list[object]) -> Structure:
    """Return the structure that ``treedef`` describes, holding ``leaves``."""
    return optree.tree_unflatten(treedef, leaves)


def map_structure(function: Callable[[object], object], structure: Structure) -> Structure:
    """``structure`` with every leaf replaced by ``function(leaf)``."""
    return optree.tree_map(function, structure, none_is_leaf=True)


def paths(structure: Structure, is_leaf: Callable[[object], bool] | None = None) -> list[str]:
    """Each leaf's path, joined by dots, in the order of ``flatten``.

    >>> paths({"ids": 0, "pair": (1, [2])})
    ['ids', 'pair.0', 'pair.1.0']
    """
    found, _, _ = optree.tree_flatten_with_path(structure, is_leaf, none_is_leaf=True)
    return [".".join(str(entry) for entry in path) for path in found]
