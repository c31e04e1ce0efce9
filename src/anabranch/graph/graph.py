"""``Graph``: a captured function as a list of ATen operations that can be read, changed and run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, fx

from anabranch.errors import CaptureError, SchemaError
from anabranch.graph.operation_graph import Input, OperationGraph
from anabranch.graph.passes import lower
from anabranch.graph.run.codegen import Program, generate
from anabranch.graph.run.memory import MemoryPlan, plan_memory, recompute
from anabranch.tensors import Structure, flatten, unflatten


@dataclass(frozen=True, slots=True)
class Node:
    """One operation of a graph, as the reader sees it."""

    name: str
    operation: str
    inputs: tuple[str, ...]
    shape: tuple[int, ...] | None
    dtype: torch.dtype | None
    scope: str


class Graph(OperationGraph):
    """A captured function: named inputs, operations, named outputs.

    A graph is a value: the passes return new ones and leave theirs unchanged. State (parameters, buffers, optimizer
    state) is an input that is already bound, and is updated in place in the user's own tensors.
    """

    _program: Program | None = None

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
            lowered = lower(self)
            self._program = generate(lowered.fx, dict(lowered.shared()))
        return self._program

    def reporting_program(self, outputs: Sequence[str], report: Callable[..., None]) -> Program:
        """Return a program that calls ``report(name, value)`` with these outputs at the lines where they are final."""
        lowered = lower(self)
        results = dict(zip(lowered.outputs, lowered.results, strict=True))
        nodes = {name: node for name in outputs if isinstance(node := results[name], fx.Node)}
        return generate(lowered.fx, dict(lowered.shared()), nodes, report)

    def memory_plan(self) -> MemoryPlan:
        """Return the lifetime of each value in a run, the values reused in place, and the most bytes alive at once.

        Only memory that a run allocates is counted: neither the inputs nor the state.
        """
        return plan_memory(self)

    def recompute(self, budget_bytes: int) -> Graph:
        """Return this graph with values recomputed instead of kept, so that ``memory_plan().peak_bytes`` fits the
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
        >>> smaller.memory_plan().peak_bytes <= 9000
        True
        >>> bool(smaller(torch.ones(1000)) == graph(torch.ones(1000)))
        True

        Args:
            budget_bytes: most bytes that a run may have allocated at once.

        Raises:
            ValueError: if no choice of recomputation that was found fits; the message gives the least peak reached.

        Source: checkpoints between segments (Chen et al., "Training deep nets with sublinear memory cost", 2016).
        """
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
        pairs = list(zip(self.placeholders, self.bindings, strict=True))
        free = [
            (node, binding.name)
            for node, binding in pairs
            if binding.bound is None and isinstance(node.meta.get("val"), Tensor) and binding.fixed is None
        ]
        if input_shapes and len(input_shapes) != len(free):
            names = ", ".join(name for _, name in free)
            raise ValueError(f"infer_shapes takes a shape for each of {names}, or none; got {len(input_shapes)}")
        others = [torch.Size(shape) for shape in input_shapes]
        if any(node.meta["val"].shape != shape for (node, _), shape in zip(free, others, strict=False)):
            return self._captured_again(others).infer_shapes()
        named = [(binding.name, node) for node, binding in pairs]
        named += [(node.name, node) for node in self.fx.nodes if node.op == "call_function"]
        named += [(name, r) for name, r in zip(self.outputs, self.results, strict=True) if isinstance(r, fx.Node)]
        values = {name: node.meta.get("val") for name, node in named}
        return {name: torch.Size(value.shape) for name, value in values.items() if isinstance(value, Tensor)}

    def _captured_again(self, shapes: list[torch.Size]) -> Graph:
        if self.origin is None:
            raise ValueError("a graph from a file knows no shapes but its own; capture the function again")
        try:
            return cast(Graph, self.origin(shapes))
        except CaptureError as error:
            raise ValueError(f"the captured function does not work on {[tuple(s) for s in shapes]}: {error}") from error

    def to_html(self, path: str | Path) -> None:
        """Write one self-contained page: the operations by module, boundaries coloured, shapes and bytes on edges.

        Forward reads downwards, backward upwards beside it. The page can be searched and zoomed.
        """
        from anabranch.graph.view import to_html

        to_html(self, path)

    def save(self, path: str | Path) -> None:
        """Write the graph and its state into one file, which ``Graph.load`` reads; nothing is pickled.

        Raises:
            ValueError: an operation of this process alone (a boundary, a collective, a Python function), state that
                shares memory, or a structure other than dicts, lists and tuples; names it.
        """
        from anabranch.graph.stored import save

        self.check_bound()
        save(self, Path(path))

    @staticmethod
    def load(path: str | Path) -> Graph:
        """Return the graph written by ``save``, with its own state.

        Load only graphs that you trust, as with ``torch.load``: nothing is unpickled, but many of PyTorch's operators
        read and write foreign memory when they are given other values than they expect.

        >>> import tempfile, torch
        >>> from anabranch.graph import capture
        >>> path = Path(tempfile.mkdtemp()) / "graph.safetensors"
        >>> capture(lambda x: x.sin() + 1, torch.zeros(2)).save(path)
        >>> Graph.load(path)(torch.zeros(2))
        tensor([1., 1.])

        Raises:
            CheckpointError: the file is not a whole graph, or calls an operator that this process has not.
            FileNotFoundError: there is none.
        """
        from anabranch.graph.stored import load

        return load(Path(path), Graph)

    def to_dot(self) -> str:
        """Return the graph in Graphviz's language, with a cluster per module."""
        from anabranch.graph.view import to_dot

        return to_dot(self)

    def __repr__(self) -> str:
        """Return the names of free inputs and outputs, and the number of operations and of bound tensors."""
        free = ", ".join(binding.name for binding in self.bindings if binding.bound is None)
        held = sum(binding.bound is not None for binding in self.bindings)
        return f"Graph(({free}) -> ({', '.join(self.outputs)}): {len(self.nodes)} operations, {held} tensors of state)"

    def __call__(self, *inputs: Structure) -> Structure:
        """Run the operations; return the results of the captured function.

        Raises:
            SchemaError: if an input differs from the captured example in structure, shape or dtype.
            CaptureError: if a module holds another parameter or buffer than when it was captured.
        """
        self.check_bound()
        leaves, structure = flatten(inputs)
        if self.argument_structure is not None and structure != self.argument_structure:
            raise SchemaError(f"the graph was captured for inputs {self.argument_structure}, got {structure}")
        free = [(n, b) for n, b in zip(self.placeholders, self.bindings, strict=True) if b.bound is None]
        if len(leaves) != len(free):
            names = ", ".join(binding.name for _, binding in free)
            raise SchemaError(f"the graph takes {len(free)} inputs ({names}), got {len(leaves)}")
        for (node, binding), leaf in zip(free, leaves, strict=True):
            _check(binding, node.meta.get("val"), leaf)
        results = self.program().run(*leaves)
        if self.output_structure is None:
            return results
        return unflatten(self.output_structure, list(results))


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
    elif value.is_conj():
        raise SchemaError(f"{name}: expected a computed tensor, got a conjugate; pass tensor.resolve_conj()")
    elif value.shape != expected.shape or value.dtype != expected.dtype or value.device != expected.device:
        raise SchemaError(
            f"{name}: the graph was captured for {tuple(expected.shape)} {expected.dtype} on {expected.device}, got "
            f"{tuple(value.shape)} {value.dtype} on {value.device}; capture it again for other inputs"
        )
