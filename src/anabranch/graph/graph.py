"""``Graph``: a captured function as a list of ATen operations that can be read, changed and run.

Each report on a graph (its plan, its page, its shapes) is a module that works on graphs as any pass does. Those modules
import this one; users find them as methods all the same, so the methods import them when they are called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch
from torch import Tensor, fx

from anabranch.errors import SchemaError
from anabranch.graph.effects import Effects
from anabranch.graph.nodes import copy_node
from anabranch.graph.run.codegen import Program, generate
from anabranch.tensors import Structure, flatten, unflatten

if TYPE_CHECKING:
    from optree import PyTreeSpec
    from torch.export import ExportedProgram

    from anabranch.graph.run.lifetimes import MemoryPlan

__all__ = ["Graph", "Input", "InputKind", "Node", "Origin"]

InputKind = Literal["argument", "parameter", "buffer", "optimizer", "constant"]
Origin: TypeAlias = "Callable[[Sequence[torch.Size]], Graph]"
"""Captures the same function for other shapes of its tensor inputs."""


@dataclass(frozen=True, slots=True)
class Input:
    """One input of a graph: its name, its kind, the tensor it is bound to, the only value it takes, if any."""

    name: str
    kind: InputKind = "argument"
    bound: Tensor | None = None
    fixed: object = None


@dataclass(frozen=True, slots=True)
class Node:
    """One operation of a graph, as the reader sees it."""

    name: str
    operation: str
    inputs: tuple[str, ...]
    shape: tuple[int, ...] | None
    dtype: torch.dtype | None
    scope: str


class Graph:
    """A captured function: named inputs, operations, named outputs.

    A graph is a value: the passes return new ones and leave theirs unchanged. State (parameters, buffers, optimizer
    state) is an input that is bound already, and is updated in place on the user's own tensors.
    """

    def __init__(
        self,
        graph: fx.Graph,
        inputs: Sequence[Input],
        outputs: Sequence[str],
        *,
        argument_structure: PyTreeSpec | None = None,
        output_structure: PyTreeSpec | None = None,
    ) -> None:
        self.fx = graph
        self.bindings = tuple(inputs)
        self.outputs = list(outputs)
        self._argument_structure = argument_structure
        self._output_structure = output_structure
        self._program: Program | None = None
        self.origin: Origin | None = None
        self.times: dict[str, float] = {}

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
        """The nodes of the outputs, in their order; an output that is a constant stands for itself."""
        return tuple(self.fx.output_node().args[0])  # type: ignore[arg-type]

    @property
    def nodes(self) -> list[Node]:
        """The operations in the order in which they run."""
        return [_describe(node) for node in self.fx.nodes if node.op == "call_function"]

    @property
    def code(self) -> str:
        """The Python source that a call runs."""
        return self.program().source

    def program(self) -> Program:
        """Return the generated program, made at first use."""
        if self._program is None:
            lowered = self.lowered()
            self._program = generate(lowered.fx, dict(lowered.shared()))
        return self._program

    def telling_program(self, told: Mapping[str, Callable[[object], None]]) -> Program:
        """Return a program that hands each output in ``told`` over at the line where it is final, the first of them
        first.
        """
        lowered = self.lowered()
        results = dict(zip(lowered.outputs, lowered.results, strict=True))
        calls = [(node, call) for name, call in told.items() if isinstance(node := results[name], fx.Node)]
        return generate(lowered.fx, dict(lowered.shared()), calls)

    def lowered(self) -> Graph:
        """Return the graph that the program is generated from: handles dropped, quicker kernels, memory reused in
        place.
        """
        from anabranch.graph.passes.dead_nodes import drop_handles, sum_to_final_shape
        from anabranch.graph.passes.in_place import reuse_in_place
        from anabranch.graph.passes.table_gradients import sum_table_gradients
        from anabranch.graph.run.copy_streams import copy_beside_compute, crosses_from_cuda, launch_before_crossings

        graph = sum_table_gradients(sum_to_final_shape(drop_handles(self, stops=True)))
        if not crosses_from_cuda(graph):
            return reuse_in_place(graph)
        return copy_beside_compute(reuse_in_place(launch_before_crossings(graph)))

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

    def copy(self) -> Graph:
        """Return a graph of the same nodes that can be changed without changing this one."""
        fresh, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        for node in self.fx.nodes:
            copies[node] = copy_node(fresh, node, copies.__getitem__)
        return self.with_nodes(fresh)

    def with_nodes(self, graph: fx.Graph) -> Graph:
        """Return a graph of other nodes with the inputs and outputs of this one."""
        return Graph(
            graph,
            self.bindings,
            self.outputs,
            argument_structure=self._argument_structure,
            output_structure=self._output_structure,
        )

    def with_structure(
        self, arguments: PyTreeSpec | None, outputs: PyTreeSpec, fixed: Mapping[str, object] | None = None
    ) -> Graph:
        """Return this graph, called with and returning nested structures; inputs in ``fixed`` take that value only."""
        bindings = [replace(b, fixed=fixed[b.name]) if fixed and b.name in fixed else b for b in self.bindings]
        graph = Graph(self.fx, bindings, self.outputs, argument_structure=arguments, output_structure=outputs)
        graph.origin = self.origin
        return graph

    def memory_plan(self) -> MemoryPlan:
        """Return the lifetime of each value in a run, the values reused in place, and the most bytes alive at once.

        Only memory that a run allocates is counted: neither the inputs nor the state.
        """
        from anabranch.graph.run.lifetimes import plan_memory

        return plan_memory(self)

    def recompute(self, budget_bytes: int) -> Graph:
        """Return this graph with values computed again instead of kept, so that ``memory_plan().peak_bytes`` fits the
        budget.

        >>> import torch
        >>> from anabranch.graph import capture
        >>> def fn(x):
        ...     kept = [torch.sin(x * i) for i in range(1, 6)]
        ...     return sum(k.sum() for k in reversed(kept))
        >>> graph = capture(fn, torch.ones(1000))
        >>> graph.memory_plan().peak_bytes
        20004
        >>> smaller = graph.recompute(9000)
        >>> smaller.memory_plan().peak_bytes <= 9000, bool(smaller(torch.ones(1000)) == graph(torch.ones(1000)))
        (True, True)

        Args:
            budget_bytes: most bytes that a run may have allocated at once.

        Raises:
            ValueError: if no choice of recomputation that was found fits; the message gives the least peak reached.

        Source: min-cut rematerialisation (Jain et al., "Checkmate", 2020; He and Yu, "Transcending runtime-memory
        tradeoffs in checkpointing by being fusion aware", 2023).
        """
        from anabranch.graph.passes.recompute import recompute

        return recompute(self, budget_bytes)

    def infer_shapes(self, *input_shapes: Sequence[int]) -> dict[str, torch.Size]:
        """Return the shape of every input, operation and output, for free inputs of these shapes.

        >>> import torch
        >>> from anabranch.graph import capture
        >>> graph = capture(torch.nn.Flatten(), torch.ones(2, 3, 4))
        >>> graph.infer_shapes((5, 3, 4))["output"]
        torch.Size([5, 12])

        Args:
            input_shapes: one for each free tensor input, in order; none at all for the captured shapes.

        Raises:
            ValueError: if the operations do not work on these shapes; names the first that fails.
        """
        from anabranch.graph.passes.shapes import infer_shapes

        return infer_shapes(self, input_shapes)

    def profile(self, *inputs: Structure, runs: int = 10) -> dict[str, float]:
        """Run the graph operation by operation; returns the median seconds of each, which ``to_html`` shows too.

        These are real runs: state is updated. Free inputs are given as in a call.
        """
        from anabranch.graph.run.profile import profile

        leaves, _ = flatten(inputs)
        self.times = profile(self, leaves, runs)
        return self.times

    def to_html(self, path: str | Path) -> None:
        """Write one page that loads nothing: the operations by module, boundaries coloured, shapes and bytes on edges.

        Forward reads downwards, backward upwards beside it. The page can be searched and zoomed; after ``profile`` it
        shows the time of each operation.
        """
        from anabranch.graph.view.page import to_html

        to_html(self, path)

    def save(self, path: str | Path) -> None:
        """Write the graph and its state into one file, which ``Graph.load`` reads; nothing is pickled.

        Raises:
            ValueError: an operation of this process alone (a boundary, a collective, a Python function), state that
                shares memory, or a structure other than dicts, lists and tuples; names it.
        """
        from anabranch.graph.stored import save

        save(self, Path(path))

    @staticmethod
    def load(path: str | Path) -> Graph:
        """Return the graph that ``save`` wrote, with state of its own.

        >>> import tempfile, torch
        >>> from anabranch.graph import capture
        >>> path = Path(tempfile.mkdtemp()) / "graph.safetensors"
        >>> capture(lambda x: x.sin() + 1, torch.zeros(2)).save(path)
        >>> Graph.load(path)(torch.zeros(2))
        tensor([1., 1.])

        Raises:
            CheckpointError: the file is no whole graph, or names an operator that this process has not.
            FileNotFoundError: there is none.
        """
        from anabranch.graph.stored import load

        return load(Path(path))

    def to_torch_export(self) -> ExportedProgram:
        """Return the graph as a program of ``torch.export``, for the compilers and runtimes that read those.

        It takes what the graph takes (a graph of ``gradients``: one tensor after the other), holds the graph's own
        state under its names, and updates it as the graph does; shapes are those of the capture.

        >>> import torch
        >>> from anabranch.graph import capture
        >>> exported = capture(lambda x: x.sin() + 1, torch.zeros(2)).to_torch_export()
        >>> exported.module()(torch.zeros(2))
        tensor([1., 1.])

        Raises:
            ValueError: an operation of this process alone (a boundary, a collective, a Python function); names it.
        """
        from anabranch.graph.exported import to_torch_export

        return to_torch_export(self)

    def to_dot(self) -> str:
        """Return the graph in Graphviz's language, a cluster a module."""
        from anabranch.graph.view.dot import to_dot

        return to_dot(self)

    def __repr__(self) -> str:
        """Return the names of free inputs and outputs, and the number of operations and of bound tensors."""
        free = ", ".join(binding.name for binding in self.bindings if binding.bound is None)
        held = sum(binding.bound is not None for binding in self.bindings)
        return f"Graph(({free}) -> ({', '.join(self.outputs)}): {len(self.nodes)} operations, {held} tensors of state)"

    def __call__(self, *inputs: Structure) -> Structure:
        """Run the operations; returns what the captured function returns.

        Raises:
            SchemaError: if an input differs from the captured example in structure, shape or dtype.
        """
        leaves, structure = flatten(inputs)
        if self._argument_structure is not None and structure != self._argument_structure:
            raise SchemaError(f"the graph was captured for inputs {self._argument_structure}, got {structure}")
        free = [(n, b) for n, b in zip(self.placeholders, self.bindings, strict=True) if b.bound is None]
        if len(leaves) != len(free):
            names = ", ".join(binding.name for _, binding in free)
            raise SchemaError(f"the graph takes {len(free)} inputs ({names}), got {len(leaves)}")
        for (node, binding), leaf in zip(free, leaves, strict=True):
            _check(binding, node.meta.get("val"), leaf)
        results = self.program().run(*leaves)
        if self._output_structure is None:
            return results
        return unflatten(self._output_structure, list(results))


def _describe(node: fx.Node) -> Node:
    value = node.meta.get("val")
    tensor = value if isinstance(value, Tensor) else None
    return Node(
        node.name,
        str(node.target) if not callable(node.target) or "torch" in str(type(node.target)) else node.target.__name__,
        tuple(source.name for source in node.all_input_nodes),
        tuple(tensor.shape) if tensor is not None else None,
        tensor.dtype if tensor is not None else None,
        node.meta.get("scope", ""),
    )


def _check(binding: Input, expected: object, value: object) -> None:
    name = binding.name
    if binding.fixed is not None:
        if value != binding.fixed:
            raise SchemaError(f"{name}: the graph was captured for {binding.fixed!r}, got {value!r}; capture it again")
    elif not isinstance(expected, Tensor):
        if isinstance(value, bool) or not isinstance(value, (float, int)):
            raise SchemaError(f"{name}: expected a number, got {type(value).__name__}")
    elif not isinstance(value, Tensor):
        raise SchemaError(f"{name}: expected a tensor, got {type(value).__name__}")
    elif value.shape != expected.shape or value.dtype != expected.dtype or value.device != expected.device:
        raise SchemaError(
            f"{name}: the graph was captured for {tuple(expected.shape)} {expected.dtype} on {expected.device}, got "
            f"{tuple(value.shape)} {value.dtype} on {value.device}; capture it again for other inputs"
        )
