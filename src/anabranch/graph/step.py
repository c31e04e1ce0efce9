"""``StepProgram``: a training step as graphs, one for everything that is baked into one.

::

    batch --> backward graph --> gradients --> between --> update graph --> state, in place
              (forward, autograd)   |          (traced)    (unmodified optimizer)
                                    +-- sparse rows ---------> optimizer.step on those rows

The three graphs are captured apart and joined into one, which is what ``run`` runs. ``backward`` and ``update`` run
them apart, for a caller that has something to do in between that cannot be traced.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from anabranch.errors import CaptureError
from anabranch.graph.backward import Arrivals, Backward, Gradients, Loss, capture_backward
from anabranch.graph.bound_state import BoundState
from anabranch.graph.buckets import bucket_collectives, sink_waits
from anabranch.graph.build import build
from anabranch.graph.codegen import Program
from anabranch.graph.duplicates import merge_duplicates
from anabranch.graph.faithful import refuse_hooks
from anabranch.graph.fused_updates import join_fused_updates, spread_fused_updates
from anabranch.graph.graph import Graph
from anabranch.graph.inductor import compiled
from anabranch.graph.join import join
from anabranch.graph.lookups import SparseRows, as_sparse_gradient
from anabranch.graph.python_values import PythonValues
from anabranch.graph.replay import Replayed, can_replay
from anabranch.graph.surroundings import Surroundings
from anabranch.graph.tracing import Recorder, Source, undisturbed
from anabranch.graph.update import GroupNumbers, LearningRates, capture_update, has_state
from anabranch.tensors import Structure, flatten, paths, unflatten

__all__ = ["Between", "Gate", "Pass", "SparseGradients", "StepProgram"]

Between: TypeAlias = Callable[
    [dict[str, Tensor], dict[str, Tensor], Structure], tuple[dict[str, Tensor], dict[str, Tensor]]
]
"""``between(outputs, gradients, extra)`` returns both dicts, changed: collectives, clipping, weights of workers."""
Pass: TypeAlias = Callable[[Graph], Graph]

Gate: TypeAlias = Callable[[object], None]
"""``gate(kind)`` is called before a kind of batch is captured, and raises ``CaptureError`` if it is not to be."""

_requires_grad = Tensor.requires_grad.__get__  # type: ignore[attr-defined]
_MOST_NUMBERS = 8
_MOST_CHANGES = 4
_MOST_GRAPHS = 64


class SparseGradients(CaptureError):
    """``between`` would have to see the rows of a table looked up sparsely, which are merged outside of the graph."""


class _Captured:
    """A backward graph and its program, which is made when the graph is run by itself."""

    __slots__ = ("_compile", "_program", "backward")

    def __init__(self, backward: Backward, compile: bool) -> None:  # noqa: A002
        self.backward, self._compile = backward, compile
        self._program: Program | None = None

    @property
    def program(self) -> Program:
        if self._program is None:
            graph = self.backward.graph
            self._program = compiled(graph) if self._compile else graph.program()
        return self._program


@dataclass(slots=True)
class _Graphs:
    """All graphs for the same Python values."""

    backwards: dict[object, _Captured] = field(default_factory=dict)
    joints: dict[object, _Joint] = field(default_factory=dict)


class StepProgram:
    """Forward, backward and optimizer of one training step, captured at the first batch of each kind.

    >>> model = nn.Linear(3, 1)
    >>> optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    >>> program = StepProgram(model, lambda model, batch: model(batch).square().mean(), [optimizer])
    >>> batch = torch.randn(8, 3)
    >>> first, second = program.run(batch)["loss"], program.run(batch)["loss"]
    >>> bool(second < first)
    True

    A graph is kept for each combination of the batch's structure, shapes, strides, dtypes and devices, the modules'
    training modes, ``requires_grad`` of the parameters, autocast, and the numbers in the parameter groups; learning
    rates may change freely. Results and state are bit for bit those of ``loss.backward(); optimizer.step()``;
    ``.grad`` is neither read nor written.

    Args:
        model: its parameters, buffers and the optimizers' state are updated in place.
        loss: ``loss(model, batch)`` returns a scalar tensor, or that and a dict of tensors.
        optimizers: torch optimizers over disjoint parameters.
        between: a function that is traced between gradients and optimizers; see ``Between``.
        passes: applied to each joint graph before it runs, after ours.
        compile: hands the graph to Inductor, which rounds differently, optimizers excepted.
        gate: asked before each capture; see ``Gate``.

    Raises:
        CaptureError: from ``run`` or ``backward``, for a step that a graph cannot represent faithfully.
        ValueError: ``passes`` together with ``compile``, which has no joint graph to apply them to.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        optimizers: Sequence[Optimizer],
        *,
        between: Between | None = None,
        passes: Sequence[Pass] = (),
        compile: bool = False,  # noqa: A002 - the executor's own word
        gate: Gate | None = None,
    ) -> None:
        if passes and compile:
            raise ValueError(
                f"compile=True runs no joint graph that {len(passes)} passes could improve; leave them out"
            )
        self._gate = gate
        self._model = model
        self._loss = loss
        self._optimizers = list(optimizers)
        self._trace_between = between
        self._passes = tuple(passes)
        self._compile = compile
        self._changes: Counter[str] = Counter()
        self._bind()

    def _bind(self) -> None:
        """Looks the state up again and forgets every graph, as at construction."""
        model, optimizers = self._model, self._optimizers
        self._modules = list(model.modules())
        self._parameters = dict(model.named_parameters())
        self._names = _names_of(optimizers, self._parameters)
        self._state = BoundState(model, optimizers)
        self._python = self._look_around()
        self._rates = LearningRates(optimizers)
        self._group_numbers = GroupNumbers(optimizers)
        self._updates: dict[object, Graph] = {}
        self._graphs = _Graphs()
        self._others: dict[object, _Graphs] = {}  # by the Python values that they are for
        self._numbers: set[object] = set()
        self._last: Graph | None = None
        self._broken: CaptureError | None = None
        self._changing: CaptureError | None = None

    def _look_around(self) -> PythonValues:
        modules = {module: name for name, module in self._model.named_modules()}
        return PythonValues(Surroundings(self._loss, modules))

    @property
    def graph(self) -> Graph:
        """The graph of the last ``run``, or of the last ``backward``."""
        if self._last is None:
            raise RuntimeError("nothing has been captured yet; run a batch first")
        return self._last

    def run(
        self,
        batch: Structure,
        extra: Structure = (),
        fetch: Sequence[str] = (),
        begin: Callable[[Sequence[str]], None] | None = None,
    ) -> dict[str, Structure]:
        """One whole step; returns ``"loss"``, the loss's further tensors, and what is fetched.

        Args:
            batch: a nested structure of tensors.
            extra: tensors and floats that ``between`` takes.
            fetch: names of submodules (their outputs) and of gradients (``<parameter>.grad``, as the optimizer sees
                it; sparse for a table looked up sparsely, ``None`` where none arrives).
            begin: called with the names of the outputs before anything runs.
        """
        leaves, key = self._situation(batch, extra, fetch)
        joint = self._graphs.joints.get(key)
        if joint is None:
            return self._first_run(key, batch, extra, tuple(fetch), begin)
        if begin is not None:
            begin(joint.backward.outputs)
        self._last = joint.graph
        self._rates.refresh()
        results: dict[str, Structure] = dict(zip(joint.graph.outputs, joint.run(leaves), strict=True))
        for optimizer in self._optimizers:
            optimizer._opt_called = True  # type: ignore[attr-defined]
        if joint.unfinished:
            return self._finish(joint.backward, results, fetch)
        return results

    def backward(self, batch: Structure, fetch: Sequence[str] = (), arrivals: Arrivals | None = None) -> Gradients:
        """Forward and backward alone, for all parameters that require a gradient: nothing is updated but buffers.

        Args:
            batch: a nested structure of tensors.
            fetch: names of submodules.
            arrivals: told of the loss and of each dense gradient the moment it is final, while backward goes on.
        """
        leaves, key = self._situation(batch, (), fetch)
        captured = self._backward(key, batch, fetch, self._trainable())
        backward = captured.backward
        self._last = backward.graph
        if arrivals is not None:
            arrivals.begin(backward.outputs)
        program = captured.program if arrivals is None or self._compile else backward.telling(arrivals)
        results = dict(zip(backward.graph.outputs, program.run(*leaves), strict=True))
        if arrivals is not None and self._compile:
            backward.tell(arrivals, results)
        return backward.sort(results)

    def update(self, dense: Mapping[str, Tensor], sparse: Mapping[str, Sequence[SparseRows]] | None = None) -> None:
        """The optimizers' step on these gradients; parameters without one are left alone."""
        self._check_bound()
        dense = {name: gradient for name, gradient in dense.items() if self._parameters[name] in self._names}
        if dense:
            key = (tuple(dense), self._group_numbers.current())
            if key not in self._updates and not has_state(self._optimizers, [self._parameters[name] for name in dense]):
                self._step_eagerly(dense, sparse or {})
                return
            self._rates.refresh()
            self._update(dense).program().run(*dense.values())
        if sparse:
            self._step_eagerly({}, sparse)
        for optimizer in self._optimizers:
            optimizer._opt_called = True  # type: ignore[attr-defined]

    # What a graph is kept for.

    def _situation(self, batch: Structure, extra: Structure, fetch: Sequence[str]) -> tuple[list[object], object]:
        self._check_bound()
        leaves, structure = flatten(batch)
        more, extra_structure = flatten(extra) if extra != () else ([], None)
        key = (
            structure,
            extra_structure,
            tuple([_look(leaf) for leaf in leaves]),
            tuple([_look(leaf) for leaf in more]),
            tuple([module.training for module in self._modules]),
            tuple(map(_requires_grad, self._parameters.values())),
            self._group_numbers.current(),
            tuple(fetch),
            _modes(),
        )
        if more:
            leaves = leaves + more
        return [leaf for leaf in leaves if isinstance(leaf, (Tensor, float))], key

    def _check_bound(self) -> None:
        if not self._state.intact():
            self._bind()
        elif not self._python.unchanged():
            self._follow_python()

    def _follow_python(self) -> None:
        """Changes to the graphs for what the Python values are now."""
        found = self._python.changed()
        if found is None:  # other objects of the same value
            self._python.accept()
            return
        name, only_value = found
        self._others[self._python.key] = self._graphs
        if only_value:
            self._python.accept()
        else:
            self._python = self._look_around()
        known = self._others.pop(self._python.key, None)
        self._graphs = known or _Graphs()
        self._changing = None
        if known is not None:
            return
        while len(self._others) > _MOST_NUMBERS:
            del self._others[next(iter(self._others))]
        self._changes[name] += 1
        if self._changes[name] > _MOST_CHANGES:
            self._changing = CaptureError(
                f"{name!r} changes from step to step, and each change makes a new graph; pass it in the batch "
                "as a float, make it a tensor that is changed in place, or use engine='tape'"
            )

    # Capture.

    def _first_run(
        self,
        key: object,
        batch: Structure,
        extra: Structure,
        fetch: tuple[str, ...],
        begin: Callable[[Sequence[str]], None] | None,
    ) -> dict[str, Structure]:
        if self._broken is not None:
            raise self._broken
        refuse_hooks({}, {}, self._optimizers)
        self._refuse_changing_numbers()
        modules = [name for name in fetch if not name.endswith(".grad")]
        asked = [name.removesuffix(".grad") for name in fetch if name.endswith(".grad")]
        self._check_fetched(asked)
        every = self._trace_between is not None
        wrt = [n for n in self._trainable() if every or n in asked or self._parameters[n] in self._names]
        captured = self._backward(key, batch, modules, wrt)
        backward = captured.backward
        if every and backward.lookups:
            raise SparseGradients(
                f"the table {backward.lookups[0][0]!r} has a sparse gradient, which between cannot see; use backward() "
                "and update(), or sparse=False"
            )
        between = self._between(backward, extra)
        pending = not has_state(self._optimizers, [self._parameters[name] for name in backward.dense])
        if not pending:
            self._graphs.joints[key] = self._join(captured, between, fetch)
            return self.run(batch, extra, fetch, begin)
        if begin is not None:
            begin(backward.outputs)
        results = self._run_apart(captured, between, batch, extra, fetch)
        # Only now is there optimizer state to capture with. The step is taken, so a refusal waits for the next one.
        try:
            self._graphs.joints[key] = self._join(captured, between, fetch)
            self._last = self._graphs.joints[key].graph
        except CaptureError as error:
            self._broken = CaptureError(str(error))  # without the frames that it was raised in
        return results

    def _trainable(self) -> list[str]:
        return [name for name, parameter in self._parameters.items() if parameter.requires_grad]

    def _refuse_changing_numbers(self) -> None:
        self._numbers.add(self._group_numbers.current())
        if len(self._numbers) > _MOST_NUMBERS:
            raise CaptureError(
                "numbers in the optimizer's parameter groups other than 'lr' (betas, momentum, ...) change from step "
                "to step, and each change makes a new graph; use engine='tape', or a scheduler that leaves them alone "
                "(cycle_momentum=False)"
            )

    def _ask_to_capture(self, key: object) -> None:
        if self._changing is not None:
            raise self._changing
        if len(self._graphs.backwards) >= _MOST_GRAPHS:
            raise CaptureError(
                f"{_MOST_GRAPHS} graphs have been captured for this step, and another batch shape, mode or fetch came; "
                "pad batches to a few shapes, or use engine='tape'"
            )
        if self._gate is not None:
            self._gate(key)

    def _check_fetched(self, asked: Collection[str]) -> None:
        for name in asked:
            if name not in self._parameters:
                raise ValueError(f"'{name}.grad' was to be fetched, but no parameter has that name")

    def _backward(self, key: object, batch: Structure, fetch: Sequence[str], wrt: Sequence[str]) -> _Captured:
        found = self._graphs.backwards.get((key, tuple(wrt)))
        if found is None:
            self._ask_to_capture(key)
            with undisturbed():
                backward = capture_backward(self._model, self._loss, batch, wrt, fetch).improved(merge_duplicates)
            found = self._graphs.backwards[key, tuple(wrt)] = _Captured(backward, self._compile)
        return found

    def _between(self, backward: Backward, extra: Structure) -> Graph | None:
        if self._trace_between is None:
            return None
        examples = dict(zip(backward.graph.outputs, backward.graph.examples(), strict=True))
        names = [*backward.outputs, *(f"{name}.grad" for name in backward.dense)]
        leaves, structure = flatten(extra)
        sources = [Source(name, examples[name]) for name in names]  # type: ignore[arg-type]
        sources += [
            Source(f"extra.{path}" if path else "extra", leaf)
            for path, leaf in zip(paths(extra), leaves, strict=True)
            if isinstance(leaf, (Tensor, float))
        ]
        between = self._trace_between
        found: list[str] = []

        def body(values: Sequence[Tensor], recorder: Recorder) -> list[object]:
            recorder.phase = "between"
            outputs = dict(zip(backward.outputs, values, strict=False))
            gradients = dict(zip(backward.dense, values[len(outputs) :], strict=False))
            given = iter(values[len(names) :])
            rebuilt = unflatten(structure, [next(given) if isinstance(v, (Tensor, float)) else v for v in leaves])
            with torch.no_grad():
                outputs, gradients = between(outputs, gradients, rebuilt)
            found[:] = [*outputs, *(f"{name}.grad" for name in gradients)]
            return [*outputs.values(), *gradients.values()]

        return build(body, sources, found)

    def _update(self, dense: Mapping[str, Tensor]) -> Graph:
        key = (tuple(dense), self._group_numbers.current())
        if key not in self._updates:
            self._state.note_optimizer_state()
            self._updates[key] = capture_update(self._optimizers, dense, self._rates, self._names)
        return self._updates[key]

    def _join(self, captured: _Captured, between: Graph | None, fetch: Sequence[str]) -> _Joint:
        with undisturbed():
            return self._joined(captured, between, fetch)

    def _joined(self, captured: _Captured, between: Graph | None, fetch: Sequence[str]) -> _Joint:
        backward = captured.backward
        keep = {*backward.outputs, *fetch}
        keep |= {name for name in backward.graph.outputs if ".ids." in name or ".rows." in name}
        graph = backward.graph
        if between is not None:
            sparse = [name for name in keep if name not in between.outputs]
            graph = sink_waits(bucket_collectives(join(graph, between, sparse)))
            keep |= {name for name in between.outputs if not name.endswith(".grad")}
        examples = dict(zip(graph.outputs, graph.examples(), strict=True))
        dense = {
            name: examples[f"{name}.grad"]
            for name in backward.dense
            if f"{name}.grad" in examples and self._parameters[name] in self._names
        }
        front = graph
        if dense:
            update = self._update(dense)  # type: ignore[arg-type]
            graph = spread_fused_updates(join_fused_updates(merge_duplicates(join(graph, update, keep))))
        for improve in self._passes:
            graph = improve(graph)
        if self._compile or (can_replay(front) and not self._passes):
            update_program = self._update(dense).program() if dense else None  # type: ignore[arg-type]
            names = [f"{name}.grad" for name in dense]
            if not self._compile:
                read_at_once = [name in names and name not in fetch for name in front.outputs]
                front_program: Program = Replayed(front.program(), front, read_at_once)
            else:
                front_program = captured.program if front is backward.graph else compiled(front)
            return _SplitJoint(graph, backward, fetch, front.outputs, front_program, update_program, names)
        return _Joint(graph, backward, fetch, graph.program())

    # Running in parts.

    def _run_apart(
        self,
        captured: _Captured,
        between: Graph | None,
        batch: Structure,
        extra: Structure,
        fetch: Sequence[str],
    ) -> dict[str, Structure]:
        backward, program = captured.backward, captured.program
        leaves = [leaf for leaf in flatten(batch)[0] if isinstance(leaf, (Tensor, float))]
        results: dict[str, Structure] = dict(zip(backward.graph.outputs, program.run(*leaves), strict=True))
        rows = {name: results.pop(name) for name in backward.rows}
        if between is not None:
            given = [results[b.name] for b in between.bindings if b.bound is None and b.name in results]
            given += [leaf for leaf in flatten(extra)[0] if isinstance(leaf, (Tensor, float))]
            results = dict(zip(between.outputs, between.program().run(*given), strict=True))
        gradients = {name: results.pop(f"{name}.grad") for name in backward.dense if f"{name}.grad" in results}
        self.update(gradients, backward.take_sparse(dict(rows)))  # type: ignore[arg-type]
        results |= {f"{name}.grad": gradient for name, gradient in gradients.items() if f"{name}.grad" in fetch}
        return self._finish(backward, results | rows, fetch, stepped=True)

    def _finish(
        self, backward: Backward, results: dict[str, Structure], fetch: Sequence[str], *, stepped: bool = False
    ) -> dict[str, Structure]:
        """Steps the optimizers on the rows that the graph yields, and puts in form what was fetched."""
        sparse = backward.take_sparse(results)
        if sparse and not stepped:
            self._step_eagerly({}, sparse)
        for name in fetch:
            if name.endswith(".grad") and name not in results:
                table = name.removesuffix(".grad")
                found = sparse.get(table)
                results[name] = as_sparse_gradient(found, self._parameters[table]) if found else None
        for nested in backward.nested:
            nested.gather(results)
        return results

    def _step_eagerly(self, dense: Mapping[str, Tensor], sparse: Mapping[str, Sequence[SparseRows]]) -> None:
        gradients = {**dense}
        for name, lookups in sparse.items():
            gradients[name] = as_sparse_gradient(lookups, self._parameters[name])
        with _gradients(self._names, gradients):
            for optimizer in self._optimizers:
                optimizer.step()


class _Joint:
    """A joint graph, the backward it was made of, and how it runs."""

    __slots__ = ("backward", "graph", "program", "unfinished")

    def __init__(self, graph: Graph, backward: Backward, fetch: Sequence[str], program: Program) -> None:
        self.graph, self.backward, self.program = graph, backward, program
        absent = any(name.endswith(".grad") and name not in graph.outputs for name in fetch)
        self.unfinished = bool(backward.lookups or backward.nested or absent)

    def run(self, leaves: Sequence[object]) -> tuple[object, ...]:
        return self.program.run(*leaves)


class _SplitJoint(_Joint):
    """A joint graph that runs as two: what is before the update, by Inductor or as a CUDA graph, and the update."""

    __slots__ = ("_gradients", "_outputs", "_update")

    def __init__(
        self,
        graph: Graph,
        backward: Backward,
        fetch: Sequence[str],
        outputs: Sequence[str],
        front: Program,
        update: Program | None,
        gradients: Sequence[str],
    ) -> None:
        super().__init__(graph, backward, fetch, front)
        self._outputs, self._update, self._gradients = list(outputs), update, list(gradients)

    def run(self, leaves: Sequence[object]) -> tuple[object, ...]:
        results = dict(zip(self._outputs, self.program.run(*leaves), strict=True))
        if self._update is not None:
            self._update.run(*(results[name] for name in self._gradients))
        return tuple(results[name] for name in self.graph.outputs)


def _names_of(optimizers: Sequence[Optimizer], parameters: Mapping[str, Tensor]) -> dict[Tensor, str]:
    known = {tensor: name for name, tensor in parameters.items()}
    names: dict[Tensor, str] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter not in known and not parameter.numel():
                    continue  # lives on the servers, which move it
                if parameter not in known:
                    raise ValueError(
                        f"{type(optimizer).__name__} holds a parameter of shape {tuple(parameter.shape)} that the "
                        "model has not; give the step the module that owns it"
                    )
                if parameter in names:
                    raise ValueError(f"{known[parameter]!r} is in two parameter groups; optimizers must be disjoint")
                names[parameter] = known[parameter]
    return names


def _modes() -> object:
    """The modes of the process that are baked into a graph."""
    cpu, cuda = torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")
    return (
        torch.is_grad_enabled(),
        torch.is_anomaly_enabled(),
        torch.get_default_dtype(),
        torch.get_autocast_dtype("cpu") if cpu else None,
        torch.get_autocast_dtype("cuda") if cuda else None,
    )


def _look(leaf: object) -> object:
    """What of a leaf is baked into a graph."""
    if isinstance(leaf, Tensor):
        if leaf.layout is not torch.strided:
            return leaf.shape, leaf.layout, leaf.dtype, leaf.device, leaf._nnz()
        return leaf.shape, leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad
    return type(leaf) if isinstance(leaf, float) else leaf


@contextmanager
def _gradients(names: Mapping[Tensor, str], gradients: Mapping[str, Tensor]):  # type: ignore[no-untyped-def]
    """The parameters' ``.grad`` set to these, or to ``None``, until the block ends."""
    kept = [(parameter, parameter.grad) for parameter in names]
    try:
        for parameter, name in names.items():
            parameter.grad = gradients.get(name)
        yield
    finally:
        for parameter, gradient in kept:
            parameter.grad = gradient
