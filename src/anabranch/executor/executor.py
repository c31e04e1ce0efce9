"""``Executor``: a program of named steps, run on every worker of a job."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Literal, Self, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from anabranch.collectives import Workers
from anabranch.executor.fetching import Fetch
from anabranch.executor.loading import BoundLoader
from anabranch.executor.saving import Saver
from anabranch.executor.statistics import Statistics
from anabranch.executor.steps import EvalStep, Step, TrainStep, named_steps
from anabranch.executor.tape import TapeEngine
from anabranch.job import job
from anabranch.tensors import Structure, as_tensors, count_rows, map_structure

__all__ = ["CommMode", "Executor"]

CommMode = Literal["AllReduce"]
_COMM_MODES: dict[str, CommMode] = {"allreduce": "AllReduce"}
_ENGINES = ("auto", "tape")


class Executor:
    """Runs named training and evaluation steps, alone or with the other workers of a ``torch.distributed`` job.

    >>> model = nn.Linear(2, 1)
    >>> def loss(model, batch):
    ...     return nn.functional.mse_loss(model(batch["x"]), batch["y"])
    >>> step = TrainStep(model, loss, torch.optim.SGD(model.parameters(), lr=0.1))
    >>> with Executor({"train": step}) as executor:
    ...     result = executor.run("train", {"x": torch.ones(4, 2), "y": torch.zeros(4, 1)})
    >>> result["loss"].shape
    torch.Size([])

    With ``comm_mode="AllReduce"`` every worker passes its own shard of the batch, of any number of rows, and all end
    with the parameters that one worker would have got from the whole batch. Rank 0's parameters are everyone's from the
    start; buffers stay each worker's own.

    Args:
        steps: steps by name, or a lone one, called ``"default"``.
        comm_mode: ``None``: no communication, each process trains alone; ``"AllReduce"`` (in any case): gradients are
            averaged over the rows of all workers.
        engine: how steps are run: ``"tape"`` is PyTorch's autograd; ``"auto"`` picks.
        dataloaders: an iterable of batches for each step that ``run`` may be called for without a batch.
        prefetch: fetch the next batch of a bound loader while a step runs.
        process_group: the workers; the job's by default, initialised here when nobody has.
        seed: seeds torch's generators with ``seed + rank``, once.
        log_path: where ``record_loads`` appends its lines.
        timeout: seconds that a wait for other workers may last.
        heartbeat: seconds between two looks at whether they are still there.

    Raises:
        ValueError, TypeError: an argument that is none of the above; names it and what would do.
        PeerLost, DeadlineExceeded: the other workers did not come.
    """

    def __init__(
        self,
        steps: Step | Mapping[str, Step],
        comm_mode: str | None = None,
        *,
        engine: Literal["auto", "tape"] = "auto",
        dataloaders: Mapping[str, Iterable[Structure]] | None = None,
        prefetch: bool = True,
        process_group: dist.ProcessGroup | None = None,
        seed: int | None = None,
        log_path: str | os.PathLike[str] | None = None,
        timeout: float = 600.0,
        heartbeat: float = 1.0,
    ) -> None:
        self._steps = named_steps(steps)
        self.comm_mode = _comm_mode(comm_mode)
        if engine not in _ENGINES:
            raise ValueError(f"engine is one of {_ENGINES}, got {engine!r}")
        self._check_loaders(dataloaders or {})
        self._log_path = None if log_path is None else Path(log_path)
        self._closed = False
        self._started = time.monotonic()
        self._workers = self._join_workers(process_group, timeout, heartbeat)
        try:
            if seed is not None:
                torch.manual_seed(seed + (self._workers.rank if self._workers else job().rank))
            self._devices = {name: _device_of(step.model) for name, step in self._steps.items()}
            self._engines = {
                name: TapeEngine(step, self._workers)
                for name, step in self._steps.items()
                if isinstance(step, TrainStep)
            }
            self._share_parameters()
            self._loaders = self._bind(dataloaders or {}, prefetch)
            for step in self._steps.values():
                if isinstance(step, TrainStep):
                    step.model.train()
        except BaseException:
            self.close()
            raise
        self._runs = dict.fromkeys(self._steps, 0)
        self._rows = 0.0
        self._run_seconds = 0.0
        self._load_seconds = 0.0
        self._reported = Statistics(runs=dict.fromkeys(self._steps, 0))
        self._saver = Saver(self._steps, self._engines, self._loaders, self._workers)

    # Construction.

    def _check_loaders(self, dataloaders: Mapping[str, Iterable[Structure]]) -> None:
        for name in dataloaders:
            self._step(name)

    def _join_workers(self, group: dist.ProcessGroup | None, timeout: float, heartbeat: float) -> Workers | None:
        if self.comm_mode is None:
            return None
        if group is None and not dist.is_initialized() and job().world_size == 1:
            return None
        devices = {_device_of(step.model) for step in self._steps.values()}
        return Workers(group, device=next(iter(devices)), timeout=timeout, heartbeat=heartbeat)

    def _share_parameters(self) -> None:
        if self._workers is None or self._workers.size == 1:
            return
        unique = dict.fromkeys(p for step in self._steps.values() for p in step.model.parameters())
        with torch.no_grad():
            self._workers.broadcast([parameter.data for parameter in unique], operation="broadcast of parameters")

    def _bind(self, dataloaders: Mapping[str, Iterable[Structure]], prefetch: bool) -> dict[str, BoundLoader]:
        rank, size = (self._workers.rank, self._workers.size) if self._workers else (0, 1)
        bound: dict[str, BoundLoader] = {}
        self._loaders = bound
        for name, loader in dataloaders.items():
            bound[name] = BoundLoader(loader, rank=rank, world_size=size, prefetch=prefetch)
        self._lengths = {name: loader.length() for name, loader in bound.items()}
        if self._workers is not None and size > 1 and bound:
            mine = torch.tensor([-1 if length is None else length for length in self._lengths.values()])
            everyone = self._workers.all_gather(mine.to(self._workers.device), operation="all_gather of batch_num")
            for name, lengths in zip(bound, everyone.t().tolist(), strict=True):
                self._lengths[name] = None if -1 in lengths else max(lengths)
        return bound

    # Running.

    def run(
        self,
        name: str = "default",
        batch: Structure | None = None,
        *,
        fetch: Sequence[str] | None = None,
        as_numpy: bool = False,
    ) -> dict[str, Tensor]:
        """Runs the step ``name`` once.

        Args:
            name: one of the steps.
            batch: this worker's shard: a nested structure of tensors that agree in rows (dim 0), numpy arrays or
                scipy.sparse matrices; ``None`` takes the next batch of the step's loader.
            fetch: what to return: ``"loss"``, keys that the step returns, qualified names of submodules (their
                output), ``"<parameter>.grad"`` (as the optimizer got it); by default all that the step returns.
            as_numpy: return numpy arrays.

        Returns:
            The values by name. A ``TrainStep``'s ``"loss"`` is always among them: a tensor of no dimensions, the loss
            of the whole batch over all workers; everything else is this worker's own.

        Raises:
            ValueError: an unknown step or name to fetch, a batch whose tensors disagree in rows, a loss that is no
                scalar; the model is as it was.
            PeerLost, DeadlineExceeded: another worker died, froze or did not come.
        """
        self._check_open()
        step = self._step(name)
        wanted = Fetch(fetch, step.model)
        began = time.monotonic()
        try:
            if isinstance(step, TrainStep):
                values = self._train(name, step, batch, wanted)
            else:
                values = self._evaluate(name, step, batch, wanted)
        finally:
            self._run_seconds += time.monotonic() - began
        self._runs[name] += 1
        return {key: _as_numpy(value) for key, value in values.items()} if as_numpy else values  # type: ignore[misc]

    def _train(self, name: str, step: TrainStep, batch: Structure | None, fetch: Fetch) -> dict[str, Tensor]:
        engine = self._engines[name]
        if not step.model.training:
            step.model.train()
        ran = None
        while ran is None:
            found = self._next_batch(name) if batch is None else batch
            if found is None:
                ran = engine.run_idle()
                if ran is None:
                    self._start_epoch(name)
                continue
            found = as_tensors(found, self._devices[name])
            rows = float(count_rows(found) if step.rows is None else step.rows(found))
            if not 0 <= rows < float("inf"):
                raise ValueError(f"rows(batch) gave {rows!r}; the weight of a batch is a finite number of at least 0")
            ran = engine.run(found, rows, fetch)
            self._rows += rows
        values = {"loss": ran.loss}
        values.update(fetch.collect(ran.returned))  # type: ignore[arg-type]
        values["loss"] = ran.loss
        return values

    def _evaluate(self, name: str, step: EvalStep, batch: Structure | None, fetch: Fetch) -> dict[str, Tensor]:
        found = self._next_eval_batch(name) if batch is None else batch
        found = as_tensors(found, self._devices[name])
        with _eval_mode(step.model), torch.no_grad(), fetch.recording():
            returned = step.outputs(step.model, found)
        if not isinstance(returned, Mapping):
            raise TypeError(f"outputs(model, batch) returns a dict of tensors, got {type(returned).__name__}")
        fetch.check(returned)
        return cast("dict[str, Tensor]", fetch.collect(returned))

    # Batches.

    def _loader(self, name: str) -> BoundLoader:
        if name not in self._loaders:
            raise ValueError(
                f"run({name!r}) was given no batch and the step has no loader; pass one, or dataloaders={{{name!r}: ...}}"
            )
        return self._loaders[name]
