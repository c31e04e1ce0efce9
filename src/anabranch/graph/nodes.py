"""Running one node of a graph by hand."""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

__all__ = ["evaluate", "resolved"]


def resolved(node: fx.Node, look: Callable[[fx.Node], object]) -> tuple[tuple[object, ...], dict[str, object]]:
    """The node's arguments, with ``look(source)`` in place of each node that they name."""
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), look)  # type: ignore[arg-type]
    return args, kwargs  # type: ignore[return-value]


def evaluate(node: fx.Node, look: Callable[[fx.Node], object]) -> object:
    """What the node's operation makes of these arguments."""
    assert callable(node.target)
    args, kwargs = resolved(node, look)
    return node.target(*args, **kwargs)
