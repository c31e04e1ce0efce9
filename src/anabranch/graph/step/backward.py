"""Forward and backward of a step as one graph: batch in, loss, other results and gradients out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, cast

import torch
from torch import Tensor, fx

from anabranch.errors import CaptureError
from anabranch.graph.dynamo.front import TracedCall
from anabranch.graph.dynamo.traced_calls import Arguments, run_calls
from anabranch.graph.graph import Graph
from anabranch.graph.step.lookups import SparseLookups, SparseRows
from anabranch.graph.trace import TraceRecorder, TraceSource, build, free_name


@dataclass(frozen=True, slots=True)
class Gradients:
    """Results of the forward and backward of one batch.

    Attributes:
        outputs: ``"loss"``, the loss's further tensors, and the values that Python keeps.
        dense: the gradient of each reached parameter, by name.
        sparse: for each table looked up sparsely, its lookups in the order of the forward.
    """

    outputs: dict[str, object]
    dense: dict[str, Tensor]
    sparse: dict[str, list[SparseRows]]


Report: TypeAlias = "Callable[[str, Tensor], None]"
"""``report("loss", value)``, then ``report("<parameter>.grad", value)`` for each dense gradient once it is final,
during backward; it must not be changed in place."""


@dataclass(frozen=True, slots=True)
class Backward:
    """The graph of forward and backward, and how its flat results are sorted into ``Gradients``.

    ``kept``: which of the call's outputs have a history on the tape, such as values that a model keeps in an attribute.
    """

    graph: Graph
    outputs: tuple[str, ...]
    dense: tuple[str, ...]
    lookups: tuple[tuple[str, int], ...]
    kept: tuple[int, ...] = ()

    @property
    def rows(self) -> list[str]:
        """The names of the results that are sparse rows and their ids."""
        return _row_names(self.lookups)

    @property
    def reported(self) -> list[str]:
        """The names of the results that a ``Report`` gets."""
        return ["loss", *(f"{name}.grad" for name in self.dense)]

    def sort(self, results: Mapping[str, object]) -> Gradients:
        """Sort the graph's results into ``Gradients``."""
        dense = {name: cast(Tensor, results[f"{name}.grad"]) for name in self.dense}
        return Gradients({name: results[name] for name in self.outputs}, dense, self.sparse_of(results))

    def sparse_of(self, results: Mapping[str, object]) -> dict[str, list[SparseRows]]:
        """Return the sparse lookups among the results, by table."""
        sparse: dict[str, list[SparseRows]] = {}
        for index, (table, padding) in enumerate(self.lookups):
            ids, rows = (cast(Tensor, results[f"{table}.{part}.{index}"]) for part in ("ids", "rows"))
            sparse.setdefault(table, []).append(SparseRows(ids, rows, padding))
        return sparse


def capture_backward(
    call: TracedCall, arguments: Arguments, args: Sequence[object], wrt: Sequence[str], seed: Tensor | None = None
) -> Backward:
    """Return the graph of a loss and its gradients with respect to the parameters ``wrt``.

    Args:
        call: Dynamo's calls for the loss, which is marked ``"loss"``.
        arguments: the placeholders of ``call``, sorted.
        args: their values in the run in progress.
        wrt: names of parameters, in the order in which gradients are wanted.
        seed: the gradient of the loss, read in each run; 1 without it.

    Raises:
        CaptureError: for what a graph cannot represent faithfully.
    """
    outputs = output_names(call)
    sources = arguments.sources
    if seed is not None:
        sources = (*sources, TraceSource(free_name("seed", sources), seed, "buffer"))
    recorded = {s.name: s.state for s in sources if isinstance(s.value, Tensor) and s.value.requires_grad}
    trained = [name for name in wrt if recorded.get(name)]  # in the model's order, in which gradients are clipped
    foreign = [name for name, state in recorded.items() if not state]
    dense: list[str] = []
    lookups: list[tuple[str, int]] = []
    names: list[str] = []
    kept: list[int] = []
    cut = SparseLookups()

    def traced(values: Sequence[Tensor], recorder: TraceRecorder) -> list[object]:
        leaf_of = {source.name: value for source, value in zip(sources, values, strict=True)}
        cut.tables = {id(leaf_of[name]): name for name in trained}
        results, marked = run_calls(call, arguments.given(args, values), recorder)
        kept[:] = [i for i, value in enumerate(results) if isinstance(value, Tensor) and value.requires_grad]
        loss = marked["loss"]
        recorder.follow_backward(loss)
        rows = [lookup.leaf for lookup in cut.found]
        leaves = [leaf_of[name] for name in [*trained, *foreign]]
        begin = None if seed is None else values[-1]
        gradients = torch.autograd.grad(loss.reshape(()), [*leaves, *rows, *recorder.entries], begin, allow_unused=True)
        for name, gradient in zip(foreign, gradients[len(trained) :], strict=False):
            if gradient is not None:
                raise CaptureError(
                    f"a gradient reaches {name!r}, which is not a parameter of the model, so a graph would lose it; "
                    "detach it, make it a parameter of the model, or use engine='tape'"
                )
        unique = dict(zip(outputs, results, strict=True))
        reached = {n: g for n, g in zip(trained, gradients, strict=False) if g is not None}
        laid_out = {name: _laid_out_as(leaf_of[name], gradient) for name, gradient in reached.items()}
        owned = _in_own_memory(laid_out, [*values, *unique.values()])
        dense[:] = list(owned)
        of_rows = zip(cut.found, gradients[len(leaves) : len(leaves) + len(rows)], strict=True)
        sparse = [(lookup, gradient) for lookup, gradient in of_rows if gradient is not None]
        for lookup, _ in sparse:
            if lookup.table in owned:
                raise CaptureError(
                    f"the table {lookup.table!r} has both sparse lookups and dense uses; make it sparse=False, or use "
                    "engine='tape'"
                )
        lookups[:] = [(lookup.table, lookup.padding_idx) for lookup, _ in sparse]
        names[:] = [*unique, *(f"{name}.grad" for name in dense), *_row_names(lookups)]
        detached = [value.detach() if isinstance(value, Tensor) else value for value in unique.values()]
        return [*detached, *owned.values(), *(part for lookup, rows in sparse for part in (lookup.ids, rows))]

    graph = build(traced, sources, names, interceptor=cut)
    return Backward(graph, tuple(dict.fromkeys(outputs)), tuple(dense), tuple(lookups), tuple(kept))


def capture_forward(call: TracedCall, arguments: Arguments, args: Sequence[object]) -> Backward:
    """Return the graph of a call's results alone, computed without recording, as a ``Backward`` without gradients."""
    outputs = output_names(call)
    names = tuple(dict.fromkeys(outputs))

    def traced(values: Sequence[Tensor], recorder: TraceRecorder) -> list[object]:
        with torch.no_grad():
            results, _ = run_calls(call, arguments.given(args, values), recorder)
        return list(dict(zip(outputs, results, strict=True)).values())

    return Backward(build(traced, arguments.sources, names), names, (), ())


def output_names(call: TracedCall) -> list[str]:
    """Return a name for each output of a call: the name that it was marked with, else its position."""
    (results,) = call.module.graph.output_node().args
    marks = {node: name for name, node in call.marks().items()}
    names: list[str] = []
    for index, result in enumerate(results):  # type: ignore[arg-type]
        known = marks.get(_before_detach(result)) if isinstance(result, fx.Node) else None
        names.append(known or f"result.{index}")
    return names


def _before_detach(node: fx.Node) -> fx.Node:
    """Return the node before the ``detach`` that a marked result goes through, or ``node`` itself."""
    source = node.args[0] if node.op == "call_method" and node.target == "detach" else node
    assert isinstance(source, fx.Node)
    return source


def _row_names(lookups: Iterable[tuple[str, int]]) -> list[str]:
    return [f"{table}.{part}.{i}" for i, (table, _) in enumerate(lookups) for part in ("ids", "rows")]


def loss_of(call: TracedCall) -> Tensor:
    """Return an example of the loss."""
    return cast(Tensor, call.marks()["loss"].meta["example_value"])


def _in_own_memory(gradients: Mapping[str, Tensor], others: Iterable[object]) -> dict[str, Tensor]:
    """Copy dense gradients that share memory with another one or with ``others``, as autograd does before it sets
    ``.grad``; sparse ones share their rows there too.
    """
    owned: dict[str, Tensor] = {}
    taken = {_storage(value) for value in others if isinstance(value, Tensor) and value.layout is torch.strided}
    for name, gradient in gradients.items():
        owned[name] = gradient
        if gradient.layout is torch.strided:
            if _storage(gradient) in taken:
                with torch.no_grad():
                    owned[name] = gradient.clone()
            taken.add(_storage(owned[name]))
    return owned


def _storage(tensor: Tensor) -> int:
    return cast(int, tensor.untyped_storage()._cdata)


def _laid_out_as(parameter: Tensor, gradient: Tensor) -> Tensor:
    """``gradient`` with the strides of ``parameter``, like ``.grad``: otherwise kernels round differently."""
    if gradient.stride() == parameter.stride() and gradient.dtype == parameter.dtype:
        return gradient
    with torch.no_grad():
        return torch.empty_like(parameter).copy_(gradient)
