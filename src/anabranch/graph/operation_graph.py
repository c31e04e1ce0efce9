"""``OperationGraph``: operations on named inputs, without the reports of ``Graph``. Passes import this file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Literal, Self, TypeAlias, TypeVar

import torch
from torch import Tensor, fx

from anabranch.errors import CaptureError
from anabranch.graph.effects import Effects
from anabranch.graph.nodes import copy_node

if TYPE_CHECKING:
    from optree import PyTreeSpec

InputKind = Literal["argument", "parameter", "buffer", "optimizer", "constant"]
Entries: TypeAlias = Sequence[tuple[str, Mapping[str, object], str, object]]
Origin: TypeAlias = "Callable[[Sequence[torch.Size]], OperationGraph]"
"""Captures the same function for other shapes of its tensor inputs."""
AnyGraph = TypeVar("AnyGraph", bound="OperationGraph")


@dataclass(frozen=True, slots=True)
class Input:
    """One input of a graph: its name, its kind, the tensor it is bound to, and its fixed value, if any.

    ``entries``: those of modules' dicts on the ways to all tensors that a capture has bound, by the names in the model.
    """

    name: str
    kind: InputKind = "argument"
    bound: Tensor | None = None
    fixed: object = None
    entries: Entries = ()


class OperationGraph:
    """Named inputs, operations and named outputs, as nodes of a ``torch.fx.Graph``.

    A graph is a value: the passes return new ones and leave theirs unchanged. State (parameters, buffers, optimizer
    state) is an input that is already bound, and is updated in place in the user's own tensors.
    """

    argument_structure: PyTreeSpec | None = None
    """Of the arguments of a call; ``None`` for flat ones."""
    output_structure: PyTreeSpec | None = None
    """Of what a call returns."""
    origin: Origin | None = None

    def __init__(self, graph: fx.Graph, inputs: Sequence[Input], outputs: Sequence[str]) -> None:
        self.fx = graph
        self.bindings = tuple(inputs)
        self.outputs = list(outputs)

    @property
    def inputs(self) -> list[str]:
        """The names of all inputs: first the function's own, then its state."""
        return [binding.name for binding in self.bindings]

    @property
    def placeholders(self) -> list[fx.Node]:
        """The nodes of the inputs, in their order."""
        return list(self.fx.find_nodes(op="placeholder"))

    @property
    def results(self) -> tuple[object, ...]:
        """The nodes of the outputs, in order; a constant output is the constant itself."""
        return tuple(self.fx.output_node().args[0])  # type: ignore[arg-type]

    def check_bound(self) -> None:
        """Raise ``CaptureError`` if the modules hold another tensor now than the one that is bound."""
        captures = {id(binding.entries): binding.entries for binding in self.bindings}
        for name, mapping, key, value in chain.from_iterable(captures.values()):
            if mapping.get(key) is not value:
                raise CaptureError(
                    f"{name} was replaced after the capture (load_state_dict(assign=True), an assignment, a buffer's "
                    ".to()), and the graph computes with what was there before; capture again, or copy into the tensor"
                )

    def shared(self) -> list[tuple[fx.Node, Tensor]]:
        """Return the bound inputs, with their tensors."""
        pairs = zip(self.placeholders, self.bindings, strict=True)
        return [(node, binding.bound) for node, binding in pairs if binding.bound is not None]

    def effects(self) -> Effects:
        """Return the arguments that each operation writes and aliases, and whether it draws random numbers."""
        return Effects(self.fx, self.shared())

    def examples(self) -> tuple[object, ...]:
        """Examples of the outputs: a fake tensor for each tensor."""
        return tuple(r.meta["val"] if isinstance(r, fx.Node) else r for r in self.results)

    def copy(self) -> Self:
        """Return a graph of the same nodes that can be changed without changing this one."""
        fresh, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        for node in self.fx.nodes:
            copies[node] = copy_node(fresh, node, copies.__getitem__)
        graph = type(self)(fresh, self.bindings, self.outputs)
        graph.argument_structure, graph.output_structure = self.argument_structure, self.output_structure
        return graph
