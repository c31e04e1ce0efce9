"""``gradients``: reverse-mode differentiation of a graph, as a graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor, fx

from anabranch.errors import CaptureError, NotFound, SchemaError
from anabranch.graph.graph import Graph
from anabranch.graph.nodes import evaluate
from anabranch.graph.operation_graph import Input
from anabranch.graph.step.lookups import Lookup, SparseLookups
from anabranch.graph.trace import TraceRecorder, TraceSource, build
from anabranch.tensors import flatten

InsertGrad = Sequence[Tensor] | Literal[True] | None


def gradients(
    graph: Graph,
    outputs: Sequence[str] | None = None,
    wrt: Sequence[str] = (),
    insert_grad: InsertGrad = None,
) -> Graph:
    """Return the graph of ``outputs``, followed by the gradients of their sum with respect to ``wrt``.

    >>> from anabranch.graph import capture
    >>> graph = capture(lambda x, w: (x * w).sum(), torch.ones(3), torch.ones(3))
    >>> graph = gradients(graph, wrt=["w"])
    >>> graph(torch.tensor([1.0, 2.0, 3.0]), torch.ones(3))
    (tensor(6.), tensor([1., 2., 3.]))

    Args:
        graph: a captured graph; its state stays bound. The result may be differentiated again.
        outputs: names of outputs or nodes, each of a floating dtype; all floating outputs by default.
        wrt: names of inputs or nodes.
        insert_grad: the gradient of the outputs: ones (``None``), new inputs ``grad_<output>`` after the others
            (``True``), for a gradient that comes from across a boundary, or these tensors.

    Returns:
        A graph that takes the inputs of ``graph`` and returns the outputs and then the gradients, as one tuple. The
        gradient of a table that is looked up sparsely is a pair ``(ids, rows)``.

    Raises:
        NotFound: for a name that is not in the graph.
        TypeError: for a value that is not a graph, and an output or ``wrt`` with an integer dtype.
        ValueError: for a ``wrt`` that no output reaches, or none at all; names it.
        SchemaError: for gradients of the wrong number or shape.
    """
    if not isinstance(graph, Graph):
        raise TypeError(f"graph must be a Graph, as capture returns, got {type(graph).__name__}")
    if not wrt:
        raise ValueError("wrt is empty; name the inputs or nodes to differentiate with respect to")
    tape = _Tape(graph, outputs, wrt)
    arriving = tape.arriving(insert_grad)
    bindings = [*graph.bindings, *arriving]
    sources = []
    for node, binding in zip(graph.placeholders, graph.bindings, strict=True):
        value = node.meta.get("val")
        sources.append(TraceSource(binding.name, value if isinstance(value, Tensor) else 1.0))
    for binding, name in zip(arriving, tape.outputs, strict=False):
        sources.append(TraceSource(binding.name, tape.nodes[name].meta["val"]))
    names: list[str] = []

    def body(values: Sequence[Tensor], recorder: TraceRecorder) -> list[object]:
        recorder.differentiable = True
        results, names[:] = tape.run(values[: len(graph.bindings)], values[len(graph.bindings) :], recorder)
        return results

    traced = build(body, sources, names)
    merged = Graph(traced.fx, [*bindings, *traced.bindings[len(bindings) :]], names)
    results = [(0, 0) if f"{name}.grad.ids" in names else 0 for name in wrt]
    merged.output_structure = flatten((*[0] * len(tape.outputs), *results))[1]
    if (origin := graph.origin) is not None:
        merged.origin = lambda shapes: gradients(cast(Graph, origin(shapes)), outputs, wrt, insert_grad)
    return merged


class _Tape:
    """Replays a graph's operations with autograd on."""

    def __init__(self, graph: Graph, outputs: Sequence[str] | None, wrt: Sequence[str]) -> None:
        self._graph = graph
        self.nodes = {node.name: node for node in graph.fx.nodes}
        self.nodes.update({b.name: n for n, b in zip(graph.placeholders, graph.bindings, strict=True)})
        results = {n: r for n, r in zip(graph.outputs, graph.results, strict=True) if isinstance(r, fx.Node)}
        self.nodes.update(results)
        self.outputs = list(outputs) if outputs is not None else [n for n, r in results.items() if _floats(r)]
        self._wrt = list(wrt)
        for name in [*self.outputs, *self._wrt]:
            if name not in self.nodes:
                raise NotFound(f"the graph has no {name!r}; inputs {graph.inputs}, outputs {graph.outputs}")
            if not _floats(self.nodes[name]):
                raise TypeError(f"{name!r} does not have a floating dtype, so it has no gradient")

    def arriving(self, insert_grad: InsertGrad) -> list[Input]:
        """Return the inputs that bring the gradients of the outputs."""
        if insert_grad is None:
            return []
        if insert_grad is True:
            return [Input(f"grad_{name}") for name in self.outputs]
        if len(insert_grad) != len(self.outputs):
            raise SchemaError(f"insert_grad has {len(insert_grad)} tensors for {len(self.outputs)} outputs")
        for name, tensor in zip(self.outputs, insert_grad, strict=True):
            expected = tuple(self.nodes[name].meta["val"].shape)
            if tensor.shape != expected:
                raise SchemaError(f"insert_grad for {name!r} has shape {tuple(tensor.shape)}, the output {expected}")
        return [Input(f"grad_{n}", "constant", t) for n, t in zip(self.outputs, insert_grad, strict=True)]

    def run(
        self, values: Sequence[Tensor], arriving: Sequence[Tensor], recorder: TraceRecorder
    ) -> tuple[list[object], list[str]]:
        """Return the outputs and the gradients, flat, and their names."""
        targets = {self.nodes[name]: name for name in self._wrt}
        computed, lookups = self._replay(values, targets)
        roots = [computed[self.nodes[name]] for name in self.outputs]
        leaves = [computed[self.nodes[name]] for name in self._wrt]
        leaves += [*(lookup.leaf for lookup in lookups), *recorder.entries]
        seeds = list(arriving) or [torch.ones_like(root) for root in roots]
        live = [(root, seed) for root, seed in zip(roots, seeds, strict=True) if root.requires_grad]
        arrived: Sequence[Tensor | None] = [None] * len(leaves)
        if live:
            reached, arriving = zip(*live, strict=True)
            arrived = torch.autograd.grad(reached, leaves, arriving, allow_unused=True)
        rows = list(zip(lookups, arrived[len(self._wrt) :], strict=False))
        results: list[object] = list(roots)
        names = list(self.outputs)
        for name, gradient in zip(self._wrt, arrived, strict=False):
            looked_up = [(lookup, row) for lookup, row in rows if lookup.table == name]
            if looked_up and gradient is not None:
                raise CaptureError(
                    f"the table {name!r} has both sparse lookups and dense uses, so its gradient is not a "
                    "list of rows; make it sparse=False"
                )
            pairs = [_pair(lookup, row) for lookup, row in looked_up if row is not None]
            if pairs:
                results += pairs[0] if len(pairs) == 1 else [torch.cat(parts) for parts in zip(*pairs, strict=True)]
                names += [f"{name}.grad.ids", f"{name}.grad.rows"]
            elif gradient is not None:
                results.append(gradient)
                names.append(f"{name}.grad")
            else:
                raise NotFound(f"{name!r} is not reached: no gradient flows to it from {', '.join(self.outputs)}")
        return results, names

    def _replay(
        self, values: Sequence[Tensor], targets: Mapping[fx.Node, str]
    ) -> tuple[dict[fx.Node, Tensor], list[Lookup]]:
        """Return the value of each node, and the sparse lookups in the targets."""
        computed: dict[fx.Node, Tensor] = {}
        cut = SparseLookups()
        inputs = iter(values)
        for node in self._graph.fx.nodes:
            if node.op == "output":
                continue
            with torch.set_grad_enabled(bool(node.meta.get("recorded", True))):
                value: Any = next(inputs) if node.op == "placeholder" else cut.of_node(node, computed.__getitem__)
                if value is NotImplemented:
                    value = evaluate(node, computed.__getitem__)
            if node in targets:
                if not value.requires_grad:
                    value.requires_grad_()
                if node.op == "placeholder":
                    cut.tables[id(value)] = targets[node]
            computed[node] = value
        return computed, cut.found


def _pair(lookup: Lookup, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the ids and their rows, zeros for those of the padding."""
    if lookup.padding_idx >= 0:
        rows = rows.masked_fill((lookup.ids == lookup.padding_idx).unsqueeze(-1), 0)
    return lookup.ids.reshape(-1), rows.reshape(-1, rows.shape[-1])


def _floats(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
