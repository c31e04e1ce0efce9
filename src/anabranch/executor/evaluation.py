"""``Evaluator``: runs an ``EvalStep`` on a batch, eagerly or as a graph; ``evaluate``: on a loader, for all workers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Literal, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.utils.data import DistributedSampler

from anabranch.collectives import Workers
from anabranch.executor.engines.engine import NOTHING, Fetch
from anabranch.executor.engines.graph_engine import Check, Trials, check_results
from anabranch.executor.exchange import pack, together, unpack
from anabranch.executor.likeness import digest_of
from anabranch.executor.loaders.loading import BoundLoader, samplers_of
from anabranch.executor.steps import EvalStep
from anabranch.graph import Graph, StepProgram
from anabranch.pipeline import Pipe
from anabranch.pipeline.pipe import PipeRanks
from anabranch.tensors import Structure


class Evaluator:
    """Runs one ``EvalStep``.

    Args:
        step: the step to run.
        engine: ``"tape"`` runs eagerly.
        compile: compile the graph with Inductor.
    """

    def __init__(self, step: EvalStep, engine: Literal["graph", "tape"], *, compile: bool = False) -> None:  # noqa: A002
        self._step = step
        self._program: StepProgram | None = None
        if engine == "graph" and not any(isinstance(module, Pipe) for module in step.model.modules()):
            self._program = StepProgram(step.model, step.outputs, compile=compile, differentiates=False)
            reason = "compile=True rounds differently" if compile else None
            self._trials = Trials(self._program, step.model, "an evaluation", reason)

    @property
    def name(self) -> str:
        """The engine of the last run."""
        if self._program is None:
            return "tape"
        return "graph+inductor" if self._program.compile else "graph"

    @property
    def graph(self) -> Graph | None:
        """The graph of the last run, if it was one."""
        return None if self._program is None else self._program.graph

    def run(self, batch: Structure, fetch: Fetch) -> Mapping[str, Tensor]:
        """Return the result of the step's ``outputs``, in eval mode and without gradients; modes are restored after.

        Raises:
            ValueError: ``fetch`` names a submodule of a pipe, which sees microbatches one at a time.
        """
        model = self._step.model
        layers = [name for name in fetch.names or () if isinstance(model, Pipe) and name in PipeRanks(model).submodules]
        if layers:
            raise ValueError(
                f"fetch names {layers}, layers of a Pipe, which run one microbatch at a time; return the values "
                "from outputs(model, batch)"
            )
        parts = [PipeRanks(part).modules() if isinstance(part, Pipe) else [part] for part in model.modules()]
        modes = [(module, module.training) for modules in parts for module in modules]
        with _output_on_all_ranks(model), torch.no_grad():
            model.eval()
            try:
                return self._run(batch, fetch)
            finally:
                for module, training in modes:
                    module.training = training

    def _run(self, batch: Structure, fetch: Fetch) -> Mapping[str, Tensor]:
        program = self._program
        if program is None:
            return self._eagerly(batch, fetch)

        def as_graph(may_trace: bool) -> Mapping[str, Tensor]:
            returned, outputs = program.evaluate(batch, fetch.modules, may_trace=may_trace)
            fetch.record(outputs)
            return _checked(returned, fetch)

        def on_tape(compare: Callable[[Check], None]) -> Mapping[str, Tensor]:
            returned = self._eagerly(batch, fetch)
            compare(lambda results, *_: check_results(results, returned))
            return returned

        return self._trials.run(as_graph, partial(program.prepare, batch, fetch.modules, whole=False), on_tape)

    def _eagerly(self, batch: Structure, fetch: Fetch) -> Mapping[str, Tensor]:
        with fetch.recording() if fetch.modules else NOTHING:
            returned = self._step.outputs(self._step.model, batch)
        return _checked(returned, fetch)


@contextmanager
def _output_on_all_ranks(model: nn.Module) -> Iterator[None]:
    if not isinstance(model, Pipe):
        yield
        return
    before, model.output = model.output, "all"
    try:
        yield
    finally:
        model.output = before


def _checked(returned: object, fetch: Fetch) -> Mapping[str, Tensor]:
    if not isinstance(returned, Mapping):
        raise TypeError(f"outputs(model, batch) returns a dict of tensors, got {type(returned).__name__}")
    fetch.check(returned)
    return cast("Mapping[str, Tensor]", returned)


# A whole loader.


_Tensors: TypeAlias = dict[str, Tensor]
_Result: TypeAlias = tuple[list[float], float, _Tensors, _Tensors]
"""One worker's: rows of its batches, a digest of the first, outputs with a row for each row, and a mean a batch."""


def evaluate(
    loader: BoundLoader,
    rows_of: Callable[[Structure], float],
    run: Callable[[Structure], dict[str, Tensor]],
    workers: Workers | None,
) -> dict[str, Tensor]:
    """Return the results of ``run`` for one pass over ``loader``, joined; as ``Executor.evaluate`` does."""
    collect = partial(_collect, loader, rows_of, run)
    mine = together(workers, collect, "failed to evaluate", "evaluate", ValueError)
    everyone = [mine]
    if workers is not None:
        everyone = [unpack(data) for data in workers.all_gather_bytes(pack(list(mine)), operation="evaluate")]
    rows = [own for own, *_ in everyone]
    if len(everyone) > 1 and mine[1] and all(first == mine[1] for _, first, *_ in everyone):
        warnings.warn(
            f"all {len(everyone)} workers evaluate the same batches, so every row counts {len(everyone)} times; "
            "evaluate by ab.loaders.GlobalBatches(dataset, batch_size, shuffle=False)",
            stacklevel=3,  # where the script calls Executor.evaluate
        )
    known = {rank: outputs for rank, (own, _, *outputs) in enumerate(everyone) if own}
    if not known:
        raise ValueError("the loader yields no batches on any worker")
    forms = {rank: _forms(*outputs) for rank, outputs in known.items()}
    first = min(known)
    for rank, others in forms.items():
        if others != forms[first]:
            raise ValueError(
                f"the outputs are {forms[first]} on rank {first} and {others} on rank {rank} (dtype and shape of a "
                "row), and only the same can be joined"
            )
    joined: _Tensors = {}
    outputs, means = known[first]
    places = _places(rows, loader.samples() if len(everyone) > 1 else None) if outputs else []
    for name, one in outputs.items():
        joined[name] = one.new_empty(sum(map(len, places)), *one.shape[1:])
        for rank, (shares, _) in known.items():
            joined[name][places[rank]] = shares[name]
    weights = torch.tensor([count for own in rows for count in own], dtype=torch.float64, device="cpu")
    for name in means:
        values = torch.cat([theirs[name] for _, theirs in known.values()])[weights > 0]  # that of no rows may be NaN
        joined[name] = (values * weights[weights > 0]).sum() / weights.sum()
    return joined


def _forms(outputs: _Tensors, means: _Tensors) -> dict[str, tuple[torch.dtype, list[int] | None]]:
    forms: dict[str, tuple[torch.dtype, list[int] | None]] = {name: (one.dtype, None) for name, one in means.items()}
    return forms | {name: (one.dtype, list(one.shape[1:])) for name, one in outputs.items()}


def _collect(
    loader: BoundLoader, rows_of: Callable[[Structure], float], run: Callable[[Structure], dict[str, Tensor]]
) -> _Result:
    """Run this worker's batches."""
    rows, first, outputs, means = list[float](), 0.0, _Tensors(), _Tensors()
    parts: dict[str, list[Tensor]] = {}
    for sampler in samplers_of(loader.source):
        if isinstance(sampler, DistributedSampler):
            raise ValueError(
                "a DistributedSampler repeats samples to make the workers' shares equal, and they would count twice; "
                "evaluate by ab.loaders.GlobalBatches(dataset, batch_size, shuffle=False)"
            )
    shapes: dict[str, list[tuple[int, ...]]] = {}
    for batch in loader.one_pass():
        rows.append(rows_of(batch))
        first = first or digest_of(batch)
        for name, value in run(batch).items():
            if not isinstance(value, Tensor):
                raise TypeError(f"output {name!r} is a {type(value).__name__}; evaluate joins tensors")
            if not value.ndim and not (value.is_floating_point() or value.is_complex()):
                raise ValueError(
                    f"output {name!r} is a count, {value.item()!r}, and evaluate averages what has no dims; return one "
                    "for each row, or a mean as a float"
                )
            shapes.setdefault(name, []).append(tuple(value.shape))
            wide = torch.complex128 if value.is_complex() else torch.float64
            parts.setdefault(name, []).append(value.detach().cpu() if value.ndim else value.to(wide).reshape(1).cpu())
    for name, sizes in shapes.items():
        is_mean = not any(sizes) and len(sizes) == len(rows)
        alike = len({size[1:] for size in sizes}) == 1 and [size[:1] for size in sizes] == [(n,) for n in rows]
        if not is_mean and not alike:
            raise ValueError(
                f"output {name!r} has the shapes {sizes[:4]} for batches of {rows[:4]} rows: evaluate joins what "
                "has a row for each row of its batch, and averages what has no dims; return one of the two"
            )
        (means if is_mean else outputs)[name] = torch.cat(parts[name])
    return rows, first, outputs, means


def _places(rows: Sequence[Sequence[float]], samples: Sequence[int] | None) -> list[Tensor]:
    """Return for each worker where its rows are in the whole.

    ``samples``: of each of ``GlobalBatches``' batches, in which the workers' rows take turns; of other loaders one
    worker's follow another's.
    """
    places: list[list[int]] = [[] for _ in rows]
    start, size = 0, len(rows)
    for batch in range(max(map(len, rows))):
        counts = [int(own[batch]) if batch < len(own) else 0 for own in rows]
        if samples is not None and counts != [len(range(rank, samples[batch], size)) for rank in range(size)]:
            raise ValueError(
                f"the workers have {counts} rows of a batch of {samples[batch]} samples: let collate_fn make one row "
                "of each sample of GlobalBatches"
            )
        before = 0
        for rank, count in enumerate(counts):
            first, step = (before, 1) if samples is None else (rank, size)
            places[rank] += range(start + first, start + first + count * step, step)
            before += count
        start += before
    return [torch.tensor(place, dtype=torch.int64, device="cpu") for place in places]
