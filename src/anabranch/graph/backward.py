"""Forward and backward of a step as one graph: batch in, loss, other results and gradients out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol, cast

import torch
from torch import Tensor, nn

from anabranch.errors import CaptureError
from anabranch.graph.build import build
from anabranch.graph.faithful import PythonState, captured_tensors, refuse_hooks
from anabranch.graph.graph import Graph, InputKind
from anabranch.graph.lookups import Lookup, SparseLookups, SparseRows
from anabranch.graph.tracing import Recorder, Source, TracedModules, UserMistake, WrongType, free_name
from anabranch.tensors import Structure, flatten, paths, unflatten

if TYPE_CHECKING:
    from optree import PyTreeSpec

    from anabranch.graph.codegen import Program

__all__ = ["Arrivals", "Backward", "Gradients", "Loss", "Nested", "capture_backward"]

Loss = Callable[[nn.Module, Structure], object]
"""``loss(model, batch)`` returns a scalar tensor, or that and a dict of further tensors."""


@dataclass(frozen=True, slots=True)
class Gradients:
    """What forward and backward of one batch yield.

    Attributes:
        outputs: ``"loss"``, the loss's further tensors, and what was fetched.
        dense: the gradient of each reached parameter, by name.
        sparse: for each table looked up sparsely, its lookups in the order of the forward.
    """

    outputs: dict[str, Structure]
    dense: dict[str, Tensor]
    sparse: dict[str, tuple[SparseRows, ...]]


class Arrivals(Protocol):
    """What is told of the results of a backward graph while it runs."""

    def begin(self, outputs: Sequence[str]) -> None:
        """A run begins that yields these outputs."""
        ...

    def loss(self, value: Tensor) -> None:
        """The loss is there; no gradient is yet."""
        ...

    def gradient(self, name: str, value: Tensor) -> None:
        """The gradient of the parameter ``name`` is final; it must not be changed in place."""
        ...


@dataclass(frozen=True, slots=True)
class Nested:
    """A fetched module output that is more than one tensor: the names of its leaves, and how they nest."""

    name: str
    leaves: tuple[str, ...]
    structure: PyTreeSpec

    def gather(self, results: dict[str, Structure]) -> None:
        """Puts the leaves among ``results`` together under the module's name."""
        results[self.name] = unflatten(self.structure, [results.pop(leaf) for leaf in self.leaves])


@dataclass(frozen=True, slots=True)
class Backward:
    """The graph of forward and backward, and how its flat results are sorted into ``Gradients``."""

    graph: Graph
    outputs: tuple[str, ...]
    dense: tuple[str, ...]
    lookups: tuple[tuple[str, int], ...]
    nested: tuple[Nested, ...] = ()
    _told: list[Arrivals] = field(default_factory=list)
    _programs: list[Program] = field(default_factory=list)

    @property
    def rows(self) -> list[str]:
        """The names of the results that are sparse rows and their ids."""
        return [f"{table}.{part}.{i}" for i, (table, _) in enumerate(self.lookups) for part in ("ids", "rows")]

    def telling(self, arrivals: Arrivals) -> Program:
        """The graph's program, telling ``arrivals`` of each result at the line where it is final."""
        self._told[:] = [arrivals]
        if not self._programs:
            told = self._told

            def tell(name: str) -> Callable[[object], None]:
                if name == "loss":
                    return lambda value: told[0].loss(cast(Tensor, value))
                parameter = name.removesuffix(".grad")
                return lambda value: told[0].gradient(parameter, cast(Tensor, value))

            names = ["loss", *(f"{name}.grad" for name in self.dense)]
            self._programs.append(self.graph.telling_program({name: tell(name) for name in names}))
        return self._programs[0]

    def tell(self, arrivals: Arrivals, results: Mapping[str, object]) -> None:
        """Tells ``arrivals`` of results that are all there."""
        arrivals.loss(cast(Tensor, results["loss"]))
        for name in self.dense:
            arrivals.gradient(name, cast(Tensor, results[f"{name}.grad"]))

    def improved(self, improve: Callable[[Graph], Graph]) -> Backward:
        """The same with ``improve`` applied to the graph."""
        return replace(self, graph=improve(self.graph))

    def sort(self, results: Mapping[str, object]) -> Gradients:
        """The graph's results, by what they are."""
        sparse = self.take_sparse(dict(results))
        outputs: dict[str, Structure] = {name: results[name] for name in self.outputs}
        for nested in self.nested:
            nested.gather(outputs)
        return Gradients(
            outputs,
            {name: results[f"{name}.grad"] for name in self.dense},  # type: ignore[misc]
            {table: tuple(found) for table, found in sparse.items()},
        )

    def take_sparse(self, results: dict[str, object]) -> dict[str, list[SparseRows]]:
        """Takes the lookups out of the graph's results."""
        sparse: dict[str, list[SparseRows]] = {}
        for index, (table, padding) in enumerate(self.lookups):
            ids, rows = results.pop(f"{table}.ids.{index}"), results.pop(f"{table}.rows.{index}")
            assert isinstance(ids, Tensor)
            assert isinstance(rows, Tensor)
            sparse.setdefault(table, []).append(SparseRows(ids, rows, padding))
        return sparse


class _Body:
    """The function that is traced: the user's loss, then the engine's own backward."""

    def __init__(self, model: nn.Module, loss: Loss, wrt: Sequence[str], fetch: Sequence[str]) -> None:
        self._model, self._loss, self._wrt, self._fetch = model, loss, wrt, fetch
        self.outputs: list[str] = []
        self.dense: list[str] = []
        self.lookups: list[tuple[str, int]] = []
        self.nested: list[Nested] = []

    def run(
        self, batch: Structure, state: Mapping[str, Tensor], recorder: Recorder, cut: SparseLookups
    ) -> list[object]:
        loss, extras = self._evaluate(batch)
        results = {"loss": loss, **extras, **self._fetched(recorder.outputs)}
        self.outputs = list(results)
        recorder.follow_backward(loss)
        leaves = [state[name] for name in self._wrt]
        found = list(cut.found)
        rows = [lookup.leaf for lookup in found]
        gradients = torch.autograd.grad(loss, [*leaves, *rows, *recorder.entries], allow_unused=True)
        dense = {
            name: _laid_out_as(state[name], gradient)
            for name, gradient in zip(self._wrt, gradients, strict=False)
            if gradient is not None
        }
        self.dense = list(dense)
        sparse = self._sparse(found, gradients[len(leaves) : len(leaves) + len(rows)], dense)
        return [*(_detached(value) for value in results.values()), *dense.values(), *sparse]

    def _evaluate(self, batch: Structure) -> tuple[Tensor, dict[str, Tensor]]:
        result = self._loss(self._model, batch)
        loss, extras = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
        if not isinstance(extras, Mapping):
            raise WrongType(f"beside the loss a step returns a dict of tensors, got {type(extras).__name__}")
        if not isinstance(loss, Tensor):
            raise WrongType(f"loss(model, batch) returns a scalar tensor, or (scalar, dict), got {type(loss).__name__}")
        if loss.numel() != 1:
            raise UserMistake(
                f"the loss has shape {tuple(loss.shape)}, and backward starts from one number; return loss.mean() with "
                "reduction='mean', or loss.sum() with reduction='sum'"
            )
        for name, value in extras.items():
            if not isinstance(value, Tensor):
                raise UserMistake(f"the loss returned {name!r} as a {type(value).__name__}; return tensors")
        if not loss.requires_grad:
            raise UserMistake(
                "the loss does not depend on any parameter that requires a gradient; nothing would be trained"
            )
        return loss if loss.ndim == 0 else loss.reshape(()), dict(extras)

    def _sparse(
        self, found: Sequence[Lookup], gradients: Sequence[Tensor | None], dense: Mapping[str, Tensor]
    ) -> list[Tensor]:
        flat: list[Tensor] = []
        for lookup, rows in zip(found, gradients, strict=True):
            if rows is None:
                continue
            if lookup.table in dense:
                raise CaptureError(
                    f"the table {lookup.table!r} is looked up sparsely and used densely too; make it sparse=False, or "
                    "use engine='tape'"
                )
            self.lookups.append((lookup.table, lookup.padding_idx))
            flat += [lookup.ids, rows]
        return flat

    def _fetched(self, kept: Mapping[str, object]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for name in self._fetch:
            if name not in kept:
                raise UserMistake(f"{name!r} was to be fetched, but the forward called no module of that name")
            output = kept[name]
            flat, structure = flatten(output)
            named = {f"{name}.{path}" if path else name: v for path, v in zip(paths(output), flat, strict=True)}
            if not all(isinstance(value, Tensor) for value in flat):
                raise CaptureError(f"{name!r} was to be fetched, but its output holds more than tensors")
            found.update(named)  # type: ignore[arg-type]
            if [*named] != [name]:
                self.nested.append(Nested(name, tuple(named), structure))
        return found

    def names(self) -> list[str]:
        sparse = [
            f"{table}.{part}.{index}" for index, (table, _) in enumerate(self.lookups) for part in ("ids", "rows")
        ]
        return [*self.outputs, *(f"{name}.grad" for name in self.dense), *sparse]


def capture_backward(
    model: nn.Module, loss: Loss, batch: Structure, wrt: Sequence[str], fetch: Sequence[str] = ()
) -> Backward:
    """The graph of ``loss(model, batch)`` and its gradients with respect to the parameters ``wrt``.

    Args:
        model: its parameters and buffers become bound inputs under their qualified names.
        loss: the user's function.
        batch: an example; its leaves become the inputs ``batch``, ``batch.<path>``.
        wrt: names of parameters.
        fetch: names of submodules whose outputs the graph yields too.
    """
    leaves, structure = flatten(batch)
    _refuse_unreached(batch, leaves)
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    sources = [
        Source(f"batch.{path}" if path else "batch", leaf)
        for path, leaf in zip(paths(batch), leaves, strict=True)
        if isinstance(leaf, (Tensor, float))
    ]
    batch_size = len(sources)
    sources += [Source(name, tensor, state=True) for name, tensor in state.items()]
    modules = TracedModules({"": model}).names
    python = PythonState(loss, modules)
    python.refuse_iterators()
    known = {id(tensor) for tensor in (*state.values(), *leaves)}
    for name, tensor in (*captured_tensors(loss).items(), *python.tensors.items()):
        if id(tensor) not in known:
            known.add(id(tensor))
            sources.append(Source(free_name(name, sources), tensor, state=True, within_reach=True))
    kinds: dict[str, InputKind] = dict.fromkeys(state, "buffer")
    refuse_hooks(modules, dict(model.named_parameters()))
    body = _Body(model, loss, wrt, fetch)
    names: list[str] = []
    cut = SparseLookups()

    def traced(values: Sequence[Tensor], recorder: Recorder) -> list[object]:
        given = iter(values[:batch_size])
        rebuilt = unflatten(structure, [next(given) if isinstance(v, (Tensor, float)) else v for v in leaves])
        standing = {source.name: value for source, value in zip(sources, values, strict=True)}
        cut.tables = {id(standing[name]): name for name in wrt}
        results = body.run(rebuilt, standing, recorder, cut)
        names[:] = body.names()
        return results

    try:
        graph = build(traced, sources, names, {"": model}, kinds=kinds, keep=frozenset(fetch), interceptors=[cut])
    finally:
        changed = python.undo_changes()
    if changed is not None:
        raise changed
    return Backward(graph, tuple(body.outputs), tuple(body.dense), tuple(body.lookups), tuple(body.nested))


def _refuse_unreached(batch: Structure, leaves: Sequence[object]) -> None:
    """Raises for gradients that a sweep of the tape would leave, or look at, outside of what a graph yields."""
    if torch.is_anomaly_enabled():
        raise CaptureError(
            "anomaly detection looks at every gradient, which a replay does not; the step runs on the tape"
        )
    for path, leaf in zip(paths(batch), leaves, strict=True):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            raise CaptureError(
                f"{f'batch.{path}' if path else 'the batch'} requires a gradient, which a graph of the step would not "
                "yield; detach it, or use engine='tape'"
            )


def _detached(value: Tensor) -> Tensor:
    return value.detach()


def _laid_out_as(parameter: Tensor, gradient: Tensor) -> Tensor:
    """``gradient`` with the strides of ``parameter``, as ``.grad`` has them: kernels round the two alike only so."""
    if gradient.stride() == parameter.stride() and gradient.dtype == parameter.dtype:
        return gradient
    with torch.no_grad():
        return torch.empty_like(parameter).copy_(gradient)
