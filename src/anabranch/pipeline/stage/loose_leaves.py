"""Leaves that a stage reads past its placeholders, such as a parameter in the closure of a loss.

Autograd adds to ``.grad`` of these with each microbatch. So until the call is over, their gradients and hooks of before
are set aside: a failed step leaves nothing behind, and a hook sees the sum, once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node

__all__ = ["LooseLeaves"]

_Hooks = list[tuple[dict[Any, Any], dict[Any, Any]]]


@dataclass(slots=True)
class LooseLeaves:
    """The loose leaves of one call.

    Attributes:
        placeholders: the ids of those of all stages here.
    """

    placeholders: set[int] = field(default_factory=set)
    _before: dict[Tensor, tuple[Tensor | None, _Hooks]] = field(default_factory=dict)

    def set_aside(self, loss: Node, outputs: Iterable[Node | None]) -> None:
        """Set aside what the leaves between the model's outputs and the loss have so far."""
        for leaf in _leaves([loss], outputs):
            if leaf not in self._before and id(leaf) not in self.placeholders:
                hooks = [those for those in (leaf._backward_hooks, leaf._post_accumulate_grad_hooks) if those]
                self._before[leaf] = leaf.grad, [(those, those.copy()) for those in hooks]
                leaf.grad = None
                for those in hooks:
                    those.clear()

    def take(self) -> list[tuple[Tensor, Tensor | None]]:
        """Return the leaves with the gradients of this call, and give them back what they had before."""
        gradients = [(leaf, leaf.grad) for leaf in self._before]
        for leaf, (grad, hooks) in self._before.items():
            leaf.grad = grad
            for those, before in hooks:
                those.update(before)
        self._before.clear()
        return gradients


def _leaves(roots: Iterable[Node], ends: Iterable[Node | None]) -> list[Tensor]:
    leaves: list[Tensor] = []
    seen, todo = {*ends, None}, [*roots]
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            following = node.next_functions
            todo += [after for after, _ in following]  # type: ignore[misc]
            if not following and hasattr(node, "variable"):
                leaves.append(node.variable)
    return leaves
