"""Are the workers alike? ``check_alike`` asks before the first step, ``compare_first_batches`` in it, ``Drift``
later on.

Before the first step each worker describes its models and loaders in lines of text, which are exchanged and compared.
Every worker steps its own optimizers with the averaged gradients, so the parameters stay equal only if the optimizers
are. So every 100 steps, and before a save, an export and ``state_dict``, they exchange a checksum of each all-reduced
or frozen parameter::

    all equal ──> nothing
    some differ ─┬─ by rounding, as on processors of different kinds ──> rank 0's are sent
                 └─ by more ──> WorkersDiffer, on all workers
"""

from __future__ import annotations

import logging
import math
import warnings
import zlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from itertools import zip_longest
from types import MappingProxyType, NoneType

import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from anabranch.autodiff.moved_parameter import Switch, parameters_here
from anabranch.choices import listed
from anabranch.collectives import Workers
from anabranch.errors import WorkersDiffer
from anabranch.executor.exchange import exchange
from anabranch.executor.loaders.loading import BoundLoader
from anabranch.executor.observing.watching import rates_of
from anabranch.executor.routes import CommMode, Place, Routes
from anabranch.executor.spec import Spec
from anabranch.executor.steps import Step, TrainStep
from anabranch.liveness.group import rank_names
from anabranch.tensors import Structure, flatten
from anabranch.tensors.dtypes import as_bytes

_log = logging.getLogger("anabranch.executor")

_ROUNDING = 1e-6  # of a tensor's largest number: processors of different kinds round differently
_COMPARISON = "comparison of parameters"


def check_alike(
    workers: Workers,
    mode: CommMode,
    steps: Mapping[str, Step],
    loaders: Mapping[str, BoundLoader] = MappingProxyType({}),
) -> None:
    """Exchange descriptions of every worker's steps and loaders, and compare them with rank 0's.

    Raises:
        ValueError: on every worker, if parameters differ (sums of unlike buckets crash), or orders of
            ``GlobalBatches``, or if a forward writes each worker's own rows.
    """
    trains = [name for name in loaders if isinstance(steps.get(name), TrainStep)]
    whole = [line for name in trains for line in _read_whole(name, loaders[name].source)]
    orders = [f"loader of {name!r}: {loader.facts() or 'no GlobalBatches'}" for name, loader in loaders.items()]
    mine = [f"comm_mode={mode!r}", *_model_lines(steps), *sorted(orders)], whole
    programs, reads = zip(*exchange(workers, mine, tuple[list[str], list[str]], "meet"), strict=True)
    _check_tables(steps)  # once all have met: one that leaves before would be lost to the others
    for rank, lines in enumerate(programs):
        for here, there in zip_longest(programs[0], lines, fillvalue="nothing"):
            if here != there:
                raise ValueError(
                    f"the models of rank 0 and rank {rank} of the group differ: {here!r} and {there!r}; every worker "
                    "makes the same steps, models and loaders of the same data, and freezes the same parameters"
                )
    for line in set.intersection(*map(set, reads)) if workers.rank == 0 else ():
        warnings.warn(
            f"each of the {len(reads)} workers reads {line} in whole: if they are the same, an epoch is {len(reads)} "
            "passes over them; share them out by ab.loaders.GlobalBatches or a DistributedSampler",
            stacklevel=3,  # where the script makes the Executor
        )


def _read_whole(name: str, loader: object) -> Iterator[str]:
    """Describe a ``DataLoader`` that reads all samples of a dataset."""
    if isinstance(loader, DataLoader) and type(loader.batch_sampler) in (BatchSampler, NoneType):
        sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
        if isinstance(sampler, RandomSampler | SequentialSampler):
            yield f"the {len(sampler)} samples of the DataLoader of step {name!r}"


def share_parameters(workers: Workers, steps: Mapping[str, Step], routes: Routes) -> None:
    """Copy rank 0's parameters to all workers, except for tables, whose rows come from the servers."""
    rows = {route.tensor for route in routes.at(Place.ROWS)}
    unique = dict.fromkeys(p for step in steps.values() for p in parameters_here(step.model).values() if p not in rows)
    _send_first(workers, unique)


@contextmanager
def first_ranks_buffers(workers: Workers | None, model: nn.Module) -> Iterator[None]:
    """Give all workers the buffers of rank 0, which a state dict has, too, while the block runs."""
    buffers = [] if workers is None or workers.size == 1 else [one for one in model.buffers() if not one.is_meta]
    own = [buffer.detach().clone() for buffer in buffers]
    try:
        if workers is not None:  # copies: gloo may still write to them after the wait was given up
            _send_first(workers, sent := [value.clone() for value in own], "broadcast of buffers")
            for buffer, value in zip(buffers, sent, strict=True):
                buffer.detach().copy_(value)
        yield
    finally:
        with torch.no_grad():
            for buffer, value in zip(buffers, own, strict=True):
                buffer.copy_(value)


def _send_first(workers: Workers, tensors: Collection[Tensor], operation: str = "broadcast of parameters") -> None:
    """Copy rank 0's tensors over everyone's."""
    with torch.no_grad():
        # Memory is sent, so a tensor with gaps, or in another order, is sent as a copy.
        sent = [tensor.detach().contiguous() for tensor in tensors]
        workers.broadcast(sent, operation=operation)
        for tensor, value in zip(tensors, sent, strict=True):
            if value.data_ptr() != tensor.data_ptr():
                tensor.copy_(value)


def compare_first_batches(workers: Workers, name: str, rows: float, batch: Structure | None) -> Tensor | None:
    """Return the rows of each worker's batch, unless all are 0; warn where the batches are the same.

    Args:
        workers: several, each of which calls this in its first run of the step.
        name: of the step.
        rows: of this worker's batch.
        batch: the same on all workers where nobody shares the data out.
    """
    mine = torch.tensor([rows, digest_of(batch) if rows > 0 else 0], dtype=torch.float64, device="cpu")
    everyone = workers.all_gather(mine, operation="all_gather of rows")
    counts, size = everyone[:, 0], len(everyone)
    if not counts.any():
        return None
    each = f"{counts[0]:g}" if bool((counts == counts[0]).all()) else "/".join(f"{count:g}" for count in counts)
    if workers.rank == 0:
        _log.info("%s: %d workers x %s rows = %g rows a step", name, size, each, counts.sum())
    if size > 1 and counts.all() and everyone[0, 1] and bool((everyone == everyone[0]).all()):
        warnings.warn(
            f"all {size} workers run {name!r} on the same batch, so every row counts {size} times; let "
            "ab.loaders.GlobalBatches share the data out, or give each worker rows of its own",
            stacklevel=9,  # where the script calls Executor.run
        )
    return counts


def digest_of(batch: Structure) -> int:
    """Return the checksum of the batch's dense tensors, which float64 holds exactly; 0 without any."""
    digest = 0
    for leaf in flatten(batch)[0]:
        if isinstance(leaf, Tensor) and not leaf.is_meta:
            digest = checksum(leaf, digest)
    return digest


def _check_tables(steps: Mapping[str, Step]) -> None:
    for step in steps.values():
        for name, module in step.model.named_modules():
            if not isinstance(module, nn.Embedding | nn.EmbeddingBag):
                continue
            refused = (
                f"max_norm={module.max_norm} shrinks rows in place whenever a worker looks them up, which it does for "
                "its own batch's; leave it None and shrink the looked-up rows in the forward, or all after each step"
            )
            if module.scale_grad_by_freq:
                refused = "scale_grad_by_freq=True counts how often an id is in a worker's own shard; leave it False"
            if module.scale_grad_by_freq or module.max_norm is not None:
                raise ValueError(f"{name}: several workers would not train the table that one would, as {refused}")


def _model_lines(steps: Mapping[str, Step]) -> Iterator[str]:
    for step_name, step in steps.items():
        for name, parameter in step.model.named_parameters():
            shape = "" if type(parameter) is Switch else tuple(parameter.shape)
            yield f"{step_name}: {name} {shape} {parameter.dtype} requires_grad={parameter.requires_grad}"


class Drift:
    """Compares the parameters that are the same on all workers, unless something writes them on one of them.

    Args:
        spec: of the executor; says how often to compare, and which parameters are all-reduced or frozen.
        workers: those that have the same parameters.
        everyone: they, or all ranks of parallel pipelines, each of whose stages has parameters of its own.
    """

    def __init__(self, spec: Spec, workers: Workers, everyone: Workers) -> None:
        self._workers, self._everyone, self._spec, self.every = workers, everyone, spec, spec.check_workers
        self._routes = spec.routes.at(Place.WORKERS) if spec.routes.all_reduces else []
        self._warned = False

    def find(self, first: int, last: int) -> WorkersDiffer | None:
        """Return the error of all workers if they differ; every worker calls it.

        Args:
            first: the step at which they were last known to be equal.
            last: the present step.
        """
        names, ranks = self._differing()
        if self._everyone is not self._workers:
            stages = exchange(self._everyone, [names, ranks], tuple[list[str], list[int]], _COMPARISON)
            names = list(dict.fromkeys(name for stage, _ in stages for name in stage))
            ranks = sorted({rank for _, stage in stages for rank in stage})
        if not names:
            return None
        return WorkersDiffer(
            f"{listed(names)} on {rank_names(ranks)} differ from rank 0's at step {last}, and did not at step {first}. "
            "A forward, a hook, load_state_dict, a learning rate or on_gradients writes other numbers on one of them; "
            "do the same on all, or make what each worker owns a buffer, and continue from the last checkpoint",
            parameters=tuple(names),
            ranks=tuple(ranks),
            steps=(first, last),
        )

    def _parameters(self) -> dict[str, Tensor]:
        trained = {parameter for step in self._spec.training.values() for parameter in step.model.parameters()}
        return {r.parameter: r.tensor for r in self._routes if r.tensor is not None and r.tensor in trained}

    def _differing(self) -> tuple[list[str], list[int]]:
        """Return the parameters that differ by more than rounding from rank 0's, and on which ranks."""
        parameters = self._parameters()
        mine = [(name, f"{tuple(p.shape)} {p.dtype}", checksum(p)) for name, p in parameters.items()]
        if self._spec.routes.served and self._spec.consistency.merges:  # pushes that rank 0's rates move
            for name, step in self._spec.training.items():
                rates = [f"{rate:.6g}" for rate in rates_of(step.optimizers)]
                mine.append((f"the learning rate of step {name!r}", str(rates), 0))
        everyone = exchange(self._workers, mine, list[tuple[str, str, int]], _COMPARISON)
        kinds = [[(name, kind) for name, kind, _ in lines] for lines in everyone]
        if any(other != kinds[0] for other in kinds):  # a worker may have another parameter in place of one
            names = sorted({name for other in kinds for name, _ in {*other} ^ {*kinds[0]}})
            return names, [rank for rank, other in zip(self._workers.ranks, kinds, strict=True) if other != kinds[0]]
        differing = [name for (name, *_), *lines in zip(mine, *everyone, strict=True) if len({*lines}) > 1]
        apart, close = [], []  # of a model that differs everywhere no second copy is made
        for tensor in (parameters[name].detach() for name in differing):
            first = tensor.clone(memory_format=torch.contiguous_format)
            self._workers.broadcast([first], operation=_COMPARISON)
            apart.append(_are_far_apart(tensor, first))
            close += [] if apart[-1] else [(tensor, first)]
        table = exchange(self._workers, apart, list[bool], _COMPARISON)
        if differing and not any(map(any, table)):
            for tensor, first in close:
                tensor.copy_(first)
            if not self._warned and self._workers.rank == 0:
                _log.warning(
                    "the workers' parameters differed by rounding, as on processors of different kinds; rank 0's were "
                    "sent again, as they will be from now on without a word"
                )
            self._warned = True
        names = [name for name, *far in zip(differing, *table, strict=True) if any(far)]
        return names, [rank for rank, far in zip(self._workers.ranks, table, strict=True) if any(far)]


def _are_far_apart(one: Tensor, other: Tensor) -> bool:
    """Return True if two tensors differ by more than rounding."""
    largest = max(float(tensor.abs().max()) for tensor in (one, other))
    rounding = _ROUNDING * largest if math.isfinite(largest) else 0.0
    return not torch.allclose(one, other, rtol=0.0, atol=rounding, equal_nan=True)


def checksum(tensor: Tensor, before: int = 0) -> int:
    """Return the CRC-32 of a tensor's numbers in the order of its dimensions, behind others; of a sparse one theirs."""
    if tensor.layout is not torch.strided:
        return before
    numbers = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return zlib.crc32(as_bytes(numbers).numpy(), before)  # type: ignore[arg-type]
