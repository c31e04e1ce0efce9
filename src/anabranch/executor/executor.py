"""``Executor``: a program of named steps, run on every worker of a job.

The file is long because it is the whole public interface, mostly docstrings: each method delegates to a part.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Literal, Self, TypeAlias, TypeVar, cast, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn

from anabranch.checkpoint.generations import check_path
from anabranch.checkpoint.storage import Place, as_place
from anabranch.collectives import GradientBuckets, Workers
from anabranch.deadline import Deadline
from anabranch.errors import CheckpointError, PeerLost
from anabranch.executor.device_placement import home_of, placed
from anabranch.executor.engines.engine import NOTHING, Engine, Fetch, StepOutput
from anabranch.executor.engines.graph_engine import GraphEngine
from anabranch.executor.engines.pipe_engine import PipeEngine, check_pipes, join_pipelines
from anabranch.executor.evaluation import Evaluator, evaluate
from anabranch.executor.likeness import Drift, check_alike, compare_first_batches, first_ranks_buffers, share_parameters
from anabranch.executor.loaders.batches import Batches
from anabranch.executor.loaders.leaf_ids import LeafIds
from anabranch.executor.loaders.loading import BoundLoader
from anabranch.executor.observing.run_facts import RunFacts
from anabranch.executor.observing.run_trace import RunTrace
from anabranch.executor.observing.sinks import Sink, check_sinks
from anabranch.executor.observing.tracking import Progress
from anabranch.executor.observing.watching import (
    MembershipRecord,
    PeerLostRecord,
    RestartRecord,
    SaveRecord,
    StepRecord,
    Subscription,
    Watching,
    rates_of,
)
from anabranch.executor.own_state import OwnState
from anabranch.executor.plan import Plan, plan_step
from anabranch.executor.routes import Routes
from anabranch.executor.running.redo import ENDS, Redo, Runs, why_fixed
from anabranch.executor.running.remote import RemotePart
from anabranch.executor.running.runner import ShareOf, StepRunner, is_share, rows_of
from anabranch.executor.running.window import HEADER_SIZE, RemoteWindow
from anabranch.executor.saving.saving import Saver
from anabranch.executor.spec import Served, check_arguments, check_log_path, spec_of
from anabranch.executor.statistics import Statistics, TableLoads
from anabranch.executor.steps import EvalStep, Step, StepDescription, TrainStep, model_of
from anabranch.graph import Graph
from anabranch.job import job
from anabranch.liveness.membership import own_place
from anabranch.parameter_server.messages import Compression
from anabranch.pipeline import Pipe
from anabranch.pipeline.pipe import PipeRanks
from anabranch.record import spans
from anabranch.record.process import PLAN_VARIABLE, process_record
from anabranch.tables import Cache
from anabranch.tensors import Structure, as_tensors, map_structure

__all__ = ["Executor"]

_T = TypeVar("_T")
_log = logging.getLogger("anabranch")

_Took: TypeAlias = tuple[float, tuple[float, ...], Mapping[str, Tensor]]
"""An optimizer step that was taken: the batch's rows, the learning rates, and its numbers for sinks."""


class Executor:
    """Runs named training and evaluation steps, in one process or with the other workers of a ``torch.distributed``
    job.

    >>> from torch import nn
    >>> model = nn.Linear(2, 1)
    >>> def loss(model, batch):
    ...     return nn.functional.mse_loss(model(batch["x"]), batch["y"])
    >>> step = TrainStep(model, loss, torch.optim.SGD(model.parameters(), lr=0.1))
    >>> with Executor({"train": step}) as executor:
    ...     result = executor.run("train", {"x": torch.ones(4, 2), "y": torch.zeros(4, 1)})
    >>> result["loss"].shape
    torch.Size([])

    In a job of several workers each passes its own shard of the batch, with any number of rows, and all get the
    parameters that one worker would get from the whole batch. At the start, rank 0's parameters are broadcast; buffers
    stay separate on each worker.

    The servers are those of the job (``anabranch run --servers N``, ``ANABRANCH_SERVERS``); a single worker needs none,
    and does the same in its own process. While the executor is open, a table that is only looked up is replaced by a
    placeholder without memory, and is not a parameter of the model; a dense parameter on the servers has a local copy.

    Args:
        steps: steps by name, or a single one, called ``"default"``.
        comm_mode: in any case. ``"auto"``: what the job says, ``"Hybrid"`` where it has servers, else ``"AllReduce"``
            with several workers, else ``None``. ``None``: no communication, each process trains alone;
            ``"AllReduce"``: gradients are averaged over the rows of all workers; ``"PS"``: every parameter is on the
            servers; ``"Hybrid"``: embedding tables are, everything else is all-reduced. Where ``"auto"`` is ``None``,
            ``routes``, ``cache``, ``consistency`` and ``use_sparse_pull`` are checked and have no effect.
        engine: how steps are run: ``"tape"`` is PyTorch's autograd; ``"graph"`` captures each kind of batch at its
            first run, compares it there with the tape bit for bit, and runs it as generated code from then on, or
            raises ``CaptureError``.
        compile: compile the captured graph with Inductor, which rounds differently; needs ``engine="graph"``.
        dataloaders: an iterable of batches for each step that ``run`` may be called for without a batch.
        consistency: how the workers' pushes to the servers are ordered. ``"bsp"``: merged, one optimizer step for all;
            ``"ssp:K"``: each is applied on arrival, and no worker is more than K steps ahead of the slowest; ``"asp"``:
            each is applied on arrival. If nothing is all-reduced, workers under the last two also do not wait for each
            other: the loss returned is the worker's own, and its epochs end independently.
        cache: how the rows of tables are cached here; ``None`` reads them from the servers.
        row_compression: how rows of tables, and their gradients, are rounded when sent from and to the servers:
            ``None`` not at all, ``"bfloat16"`` to half their bytes, ``"int8"`` to 17 bytes for 16 numbers, where one
            above 4.5e18 raises ``NonFinite``. Ids and dense parameters are never rounded.
        prefetch: with a cache, request the rows of a bound loader's next batch while a step runs, if looking at it
            draws nothing here: in a list, or a loader with ``num_workers``.
        use_sparse_pull: ``False`` keeps whole tables on the workers and refreshes all of them after each step.
        routes: exceptions from ``comm_mode``, by a parameter's name: ``"PS"``, ``"AllReduce"`` or ``"Hybrid"``.
        process_group: the workers; the job's by default, initialised if it is not yet.
        devices: places modules, by their qualified names, on devices until the executor is closed:
            ``{"encoder": "cuda:1"}``. Tensors are transferred at each edge; the rest of the model stays where it is.
        seed: seeds torch's generators with ``seed + rank``, once; the ranks of one pipeline alike; a worker that joins
            a job with the rank that the lost one was started with.
        log_path: where ``record_loads`` appends its lines.
        timeout: seconds that a wait for other workers may last.
        heartbeat: seconds between two checks that they are alive.
        served: what becomes of tables and parameters that running servers hold under this executor's names. It is
            decided at the first training run, plan or save, so that ``load`` and ``resume``, which replace them, may
            come first, also a ``resume`` that finds nothing. Otherwise ``"refuse"`` is a ``ValueError`` with the names
            and their steps; ``"adopt"`` trains on their values and optimizer state, ``"replace"`` drops them. Until
            then the model is unchanged, and evaluations read each ``RemoteEmbedding`` as it stands. An executor without
            a ``TrainStep`` reads only: it drops, creates and admits nothing.
        state: your own objects by name, saved with every checkpoint (with rank 0's state) and loaded on every worker:
            anything with ``state_dict`` and ``load_state_dict`` whose state is nested plain values and tensors, such as
            a ``torch.optim.swa_utils.AveragedModel``, or such values themselves: ``executor.state["best"]`` reads and
            sets them, and dicts and lists are filled again in place.
        sinks: receivers of the metrics of each optimizer step: ``anabranch.observe.TensorBoardSink``,
            ``PrometheusSink``, or any ``anabranch.observe.Sink``. Closed with the executor.
        check_workers: after so many optimizer steps the workers compare their all-reduced and frozen parameters, and
            before each save, export and ``state_dict``; 0: never.

    Raises:
        ValueError, TypeError: an invalid argument, models that differ between the workers, or something that
            servers do not support: an optimizer, a dtype, ``max_norm``; the error names it and the fix.
        PeerLost, DeadlineExceeded: the other workers did not arrive.
    """

    def __init__(
        self,
        steps: StepDescription | Mapping[str, StepDescription],
        comm_mode: str | None = "auto",
        *,
        engine: Literal["tape", "graph"] = "tape",
        compile: bool = False,  # noqa: A002 - the field's own word
        dataloaders: Mapping[str, Iterable[Structure]] | None = None,
        consistency: str = "bsp",
        cache: Cache | None = None,
        row_compression: Compression | None = None,
        prefetch: bool = True,
        use_sparse_pull: bool = True,
        routes: Mapping[str, str] | None = None,
        process_group: dist.ProcessGroup | None = None,
        devices: Mapping[str, str | torch.device] | None = None,
        seed: int | None = None,
        log_path: str | os.PathLike[str] | None = None,
        timeout: float = 600.0,
        heartbeat: float = 1.0,
        state: Mapping[str, object] | None = None,
        sinks: Iterable[Sink] = (),
        served: Served = "refuse",
        check_workers: int = 100,
    ) -> None:
        record = process_record()
        self._spec = spec = spec_of(
            steps,
            comm_mode,
            process_group,
            routes,
            use_sparse_pull=use_sparse_pull,
            consistency=consistency,
            engine=engine,
            compile=compile,
            cache=cache,
            row_compression=row_compression,
            prefetch=prefetch,
            timeout=timeout,
            heartbeat=heartbeat,
            served=served,
            check_workers=check_workers,
        )
        check_arguments(spec.steps, seed=seed, dataloaders=dataloaders, state=state)
        pipe = check_pipes(spec.steps, process_group, spec.comm_mode)
        self._steps, self.comm_mode, self.state = spec.steps, spec.comm_mode, OwnState(state or {})
        self._log_path = check_log_path(log_path)
        self._process, self._started = os.getpid(), time.monotonic()
        self._inside: str | None = None  # the step that runs
        self._trace: RunTrace | None = None
        self._closed = False
        self._failed: BaseException | None = None
        self._fetch_all = {name: Fetch(None, step.model) for name, step in spec.steps.items()}
        self._runs = dict.fromkeys(spec.steps, 0)
        self._rows, self._dropped, self._run_seconds = 0.0, 0.0, 0.0
        self._reported = Statistics(runs=dict.fromkeys(spec.steps, 0))
        self._only_plans = PLAN_VARIABLE in os.environ
        self._watching = Watching(check_sinks(sinks), prefixed=len(spec.training) > 1)
        self._parts = ExitStack()  # closed in reverse order, also where one of them fails
        self._parts.callback(self._watching.close)
        self._redo: Redo | None = None
        self._parts.callback(lambda: None if self._redo is None else self._redo.close(self._failed))
        try:
            self._workers, self._everyone, stages = self._meet(process_group, pipe)
            if seed is not None:
                number = job().rank if self._workers is None else self._workers.rank
                if self._workers is None and pipe is not None:  # its stages read the same batches
                    number = dist.get_process_group_ranks(cast(dist.ProcessGroup, pipe.process_group))[0]
                if self._workers is not None and self._workers.joins and (place := own_place()) is not None:
                    number = place.process  # with its rank it would draw what a living process draws
                torch.manual_seed(seed + number)
                for model in spec.models.values():
                    if isinstance(model, Pipe):
                        model.seed = seed + number
            self._devices = {name: home_of(one.model, devices or {}) for name, one in spec.steps.items()}
            if devices:
                optimizers = [one for step in spec.training.values() for one in step.optimizers]
                models = list(dict.fromkeys(step.model for step in spec.steps.values()))
                self._parts.enter_context(placed(models, devices, optimizers))
            self._bind = partial(BoundLoader, worker=partial(_place_among, self._workers), looks_ahead=prefetch)
            loaders = {name: self._bind(loader) for name, loader in (dataloaders or {}).items()}
            if self._workers is not None and self._workers.size > 1:
                assert spec.comm_mode is not None
                check_alike(self._workers, spec.comm_mode, spec.steps, loaders)
                share_parameters(self._workers, spec.steps, spec.routes)
            self._remote = self._remote_part(stages)
            acting = self._workers if spec.run_together(spec.routes) else None
            self._batches = Batches(loaders, self._workers, together=acting is not None)
            self._parts.callback(self._batches.close)
            self._evaluators = {
                name: Evaluator(step, spec.engine, compile=compile)
                for name, step in spec.steps.items()
                if isinstance(step, EvalStep)
            }
            drift = None
            if acting is not None and check_workers and acting.several:
                drift = Drift(spec, acting, self._everyone or acting)
            self._runners = {
                name: self._runner(name, number, step, acting, drift)
                for number, (name, step) in enumerate(spec.training.items())
            }
            self._saver = Saver(spec, self._runners, self._everyone, stages, loaders, self._remote, self.state)
            self._redo = self._make_redo(acting)
            self._parts.callback(self._wait_for_pushes)
            self._parts.callback(self._close_save)
            self._parts.callback(lambda: self._end_trace(clean=self._failed is None))
            for step in spec.training.values():
                if not step.model.training:
                    step.model.train()
        except BaseException as error:
            self._end(error)
            raise
        self._progress = Progress(shown=self._rank == 0)
        facts = None
        if record is not None:
            losses = {"loss", *(f"{name}/loss" for name in spec.training)}
            facts = RunFacts(record, self._crossed, self._loops, losses)
        self._watching.begin(self._rank, facts)

    # Construction.

    def _meet(self, group: dist.ProcessGroup | None, pipe: Pipe | None) -> tuple[Workers | None, Workers | None, int]:
        """Return the workers that average gradients, all ranks of their pipelines, and the ranks of one of them."""
        timeout, heartbeat, workers, stages = self._spec.timeout, self._spec.heartbeat, None, 1
        alone = group is None and not dist.is_initialized() and job().world_size == 1
        if self.comm_mode is not None and not alone:
            device = home_of(next(iter(self._steps.values())).model, {})
            workers = Workers(group, device=device, timeout=timeout, heartbeat=heartbeat)
            self._parts.callback(workers.close)
        everyone = workers
        if pipe is not None:
            stages = dist.get_world_size(pipe.process_group)
            everyone = join_pipelines(pipe, workers, timeout, heartbeat)
            self._parts.callback(everyone.close)
        return workers, everyone, stages

    @property
    def _rank(self) -> int:
        return job().rank if self._everyone is None or self._everyone.joins else self._everyone.rank

    @property
    def _joins(self) -> bool:
        """True of a newcomer that has not joined yet."""
        return self._redo is not None and self._everyone is not None and self._everyone.joins

    def _remote_part(self, stages: int) -> RemotePart | None:
        """Return the servers' side, if any part of the model is there, also if it is on another stage's rank."""
        serves = self._spec.routes.served
        if self._everyone is not None and self._everyone is not self._workers:
            serves = any(self._everyone.all_gather_bytes(b"served" if serves else b"", operation="meet"))
        if not serves:
            return None
        remote = RemotePart(self._spec, self._everyone, stages)
        self._parts.callback(lambda: remote.close(self._failed))
        return remote

    def _runner(
        self, name: str, number: int, step: TrainStep, workers: Workers | None, drift: Drift | None
    ) -> StepRunner:
        spec, remote = self._spec, self._remote
        engine: Callable[..., Engine] = Engine
        workers = workers if workers is not None and workers.several else None
        buckets = GradientBuckets({}, workers, header=HEADER_SIZE)
        windows = () if remote is None else (RemoteWindow(remote, step),)
        sinks = (*windows, buckets)
        if isinstance(step.model, Pipe):
            engine = partial(PipeEngine, columns=1 if workers is None else workers.size)
            if spec.engine == "graph":
                _log.warning("step %r trains a Pipe, which runs its own schedule: its engine is the tape", name)
        elif spec.engine == "graph":
            engine = partial(GraphEngine, compile=spec.compile, name=name)
        asks_ahead = spec.prefetch and spec.cache is not None and remote is not None and name in self._batches.loaders
        known = [route.parameter for route in spec.routes]
        for prefix, model in spec.models.items():
            known += [prefix + other for other in model.elsewhere] if isinstance(model, Pipe) else []
        return StepRunner(
            step,
            engine(step, sinks),
            workers,
            buckets,
            windows,
            None if workers is None else partial(compare_first_batches, workers, name),
            drift,
            number=number,
            ids=None if remote is None else LeafIds(step.ids, known, remote.rows),
            between=partial(self._ask_for_next, name) if asks_ahead else None,
        )

    def _make_redo(self, acting: Workers | None) -> Redo | None:
        """Return what goes on with those that are left, in a job that may lose workers."""
        workers, place = self._workers, own_place(self._spec.heartbeat)
        apart = self._remote if acting is None else None
        if workers is None or not workers.several:
            return None
        if acting is None and workers.joins:
            _log.warning("the other workers run apart, so that this one cannot join them, and ends")
            raise SystemExit(0)
        fixed = why_fixed(self._spec, workers) if apart is None else workers.why_fixed
        if apart is not None and apart.place is None:
            place, name = None, self._spec.consistency.name
            fixed = fixed or f"under {name!r} they run apart; with --min-workers the others go on, and nobody joins"
        if place is None:
            if workers.rank == 0:
                _log.info("%s: %s", ENDS, fixed)
            return None
        loaders, names = self._batches.loaders, [route.parameter for route in self._spec.routes]
        form = f"{list(self._steps)} {names} {[(name, one.facts()) for name, one in loaders.items()]}"
        return Redo(workers, place, lambda: self.epoch, self._runners, self._saver, form, fixed, apart)

    def _ask_for_next(self, name: str) -> None:
        runner, batch = self._runners[name], self._batches.loaders[name].peek()
        if batch is not None and runner.ids is not None and self._remote is not None:
            try:
                ids = runner.ids.of(as_tensors(batch, self._devices[name]))
            except Exception:  # noqa: BLE001 - of ``TrainStep(ids=)``: it is that batch's step's to raise
                return
            self._remote.tables.prefetch(ids)

    # Plans.

    def plan(self, name: str | None = None, batch: Structure | None = None) -> Plan:
        """Return the plan of a step: its traffic across each boundary and its estimated time; every worker calls it.

        ::

            print(executor.plan())  # a table of at most 80 columns

        Bytes are exact. Seconds come from three kinds of numbers, measured at the call by all workers: forward and
        backward of the batch, tried a few times without training, and the latency and bandwidth of the links. The
        servers are only read: parameters, buffers, generators, servers and experts are unchanged. If your loss or model
        counts or prints, it does so in these runs too. Row caches are ignored: they can only save bytes.

        Args:
            name: of a training step; by default the first one.
            batch: this worker's shard of a usual batch; by default the next one of the step's loader, without consuming
                it; at the end of an epoch there is none. Without a batch, compute time and lookups are not included,
                and ``plan.notes`` says so.

        Returns:
            The plan: ``str`` of it is a table, ``step_seconds``, ``bytes`` by boundary, and ``rows``.

        Raises:
            ValueError: no such training step, or a ``Pipe``'s.
            PeerLost, DeadlineExceeded: the other workers did not arrive.
        """
        self._check_open()
        if name is None:
            name = next((one for one, step in self._steps.items() if isinstance(step, TrainStep)), "default")
        step = self._step(name)
        if not isinstance(step, TrainStep):
            raise ValueError(f"step {name!r} trains nothing; plans are of training steps")
        if isinstance(step.model, Pipe):
            raise ValueError(
                f"step {name!r} trains a Pipe, whose stages compute while others do: after a run pipe.describe() shows "
                "their times and bytes, and executor.trace how they waited; plan its module without the Pipe"
            )
        if self._remote is not None:
            self._remote.check_free()
        if batch is None and name in self._batches.loaders:
            batch = self._batches.loaders[name].first()
        batch = None if batch is None else as_tensors(batch, self._devices[name])
        with self._reporting_failures():
            return plan_step(self._spec, self._workers, name, batch, self._remote)

    def _leave_plan(self, name: str, batch: Structure | None) -> None:
        """Leave the plan of the first training run's batch for ``anabranch plan``, and end."""
        plan = self.plan(name, batch)
        if self._rank == 0:
            Path(os.environ[PLAN_VARIABLE]).write_text(f"{plan}\n")
        raise SystemExit(0)

    # Running.

    def run(
        self,
        name: str = "default",
        batch: Structure | ShareOf | None = None,
        *,
        fetch: Sequence[str] | None = None,
        as_numpy: bool = False,
    ) -> dict[str, Tensor]:
        """Run the step ``name`` once.

        Under ``anabranch run`` a training step that is interrupted by the loss of a worker is done again before this
        returns, by the others and the process that replaces it, or with ``--min-workers`` by the others.

        Args:
            name: one of the steps.
            batch: this worker's shard: a nested structure of tensors that agree in rows (dim 0), numpy arrays or
                scipy.sparse matrices; a function of ``ab.job()`` that returns it, called each time that the run is
                done; ``None`` takes the next batch of the step's loader.
            fetch: what to return: ``"loss"``, keys that the step returns, qualified names of submodules (their
                output), ``"<parameter>.grad"`` (as the optimizer got it; not of parameters on servers),
                ``"grad_norm"`` (of all gradients before clipping; ``None`` where no window ended or a step was
                skipped); by default everything that the step returns. A result of the step or a submodule called
                ``grad_norm`` takes precedence.
            as_numpy: return numpy arrays.

        Returns:
            The values by name. A ``TrainStep``'s ``"loss"`` is always among them: a tensor of no dimensions, the loss
            of the whole batch over all workers; everything else is this worker's own.

        Raises:
            ValueError: an unknown step or name to fetch, a batch whose tensors disagree in rows, a loss that is not a
                scalar; no parameter has changed.
            NonFinite: a gradient holds NaN or an infinity, and the step does not skip it
                (``TrainStep(skip_nonfinite=True)``); it has changed no parameter, on any worker. On a GPU perhaps a
                gradient of the run before, and this run's step has been taken.
            PeerLost, DeadlineExceeded: another worker died, froze or did not arrive.
            BoundaryError: a worker had no rows, and the model or the loss of the others waits for all workers.
            WorkersDiffer: parameters that are the same on all workers are not; see ``check_workers``.
        """
        self._check_open()
        step = self._step(name)
        if self._inside is not None:
            raise RuntimeError(f"run({name!r}) was called inside a run of {self._inside!r}; call it between two runs")
        request = self._fetch_all[name] if fetch is None else Fetch(fetch, step.model)
        if self._remote is not None:
            self._remote.check_fetch(request.names or (), step.model)
        span, began, differentiates = spans.begin(), time.monotonic(), torch.is_grad_enabled()
        try:
            self._inside = name
            if isinstance(step, TrainStep):
                values, took = self._train(name, step, batch, request)
            else:
                values, took = self._evaluate(name, step, batch, request), None
            self._inside = None  # not below, where Ctrl-C may come before it
        except BaseException as error:
            self._inside = None
            # Ctrl-C may come after a context switched gradients off, and before the block that switches them on again.
            torch.set_grad_enabled(differentiates)
            self._watching.failed(error, self.step)
            raise
        finally:
            self._run_seconds += time.monotonic() - began
            if span:
                spans.complete(span, name, "step", facts={"step": self.step})
        self._runs[name] += 1
        if took is not None:
            rows, rates, numbers = took
            self._watching.stepped(StepRecord(self.step, name, rows, time.monotonic() - began, rates, values), numbers)
        if self._trace is not None and self._trace.over(self.step):
            self._end_trace(clean=True)
        return {key: _as_numpy(value) for key, value in values.items()} if as_numpy else values  # type: ignore[misc]

    def _train(
        self, name: str, step: TrainStep, batch: Structure | ShareOf | None, fetch: Fetch
    ) -> tuple[dict[str, Tensor], _Took | None]:
        """Return the values of a run, and what sinks get of the optimizer step that it took, if they get any."""
        if self._remote is not None and not self._only_plans and not self._joins:
            self._remote.open()  # before a batch is taken: it may be refused
        runner, redo = self._runners[name], self._redo_of_runs
        if redo is not None and (record := redo.admit(name)) is not None:
            self._goes_on(record)
        watched, steps_before = self._watching.active and self._watching.of_steps, runner.steps
        rates = rates_of(step.optimizers) if watched else ()
        fetch.norm = None
        ran, rows = self._do(name, step, [batch], fetch)
        self._rows += rows
        if redo is not None and self._workers is not None:
            self._dropped += runner.sums[1] / self._workers.size * redo.dropped
        self._dropped += 0.0 if self._remote is None else rows * self._remote.end_run(self.step)
        values = {"loss": ran.loss}
        if ran.returned or fetch.names is not None:
            values = values | fetch.collect(ran.returned) | values
        if runner.steps == steps_before:
            return values, None
        if self._watching.facts is not None:
            self._watching.facts.counted(self.step)
        if not watched:
            return values, None
        numbers = {"loss": ran.loss} if fetch.norm is None else {"loss": ran.loss, "grad_norm": fetch.norm}
        return values, (rows, rates, {**numbers, **ran.returned, "loss": ran.loss})

    @property
    def _redo_of_runs(self) -> Redo | None:
        return None if self._redo is None or self._redo.apart else self._redo

    def _do(self, name: str, step: TrainStep, runs: Runs, fetch: Fetch) -> tuple[StepOutput, float]:
        """Do the runs of these batches, again where that is necessary; return what the last one gave, and its rows."""
        runner, redo = self._runners[name], self._redo_of_runs
        if not step.model.training:
            step.model.train()
        ran, rows, over = None, 0.0, False  # over: behind the end of an epoch, which may have to be seen again
        try:
            while runs:  # several where the window of the run is done again, else one
                batch, ran, rows, ending = runs[0], None, 0.0, False
                if redo is not None and not over:
                    redo.begin(name, batch)
                try:
                    if redo is not None and not over:
                        redo.agree(name)
                    bound = batch is None
                    taken = batch(job()) if is_share(batch) else batch
                    if taken is None and not bound:
                        raise ValueError(f"the function given to run({name!r}, ...) returned None, not a batch")
                    if bound:
                        next_batch = partial(self._batches.next, name, runner.end_epoch)
                        taken = next_batch() if redo is None else redo.take(next_batch)
                    length = self._batches.length(name) if bound else None
                    if bound and (before := self._batches.runs_before(name)) is not None:
                        runner.epoch_runs = before
                    if self._only_plans:
                        self._leave_plan(name, taken)
                    if taken is None:
                        with runner.in_epoch(length):
                            ran = runner.run_idle()
                        if ran is None:
                            decided, ending = runner.decided, True
                            runner.end_epoch()
                            if redo is None or redo.takes_anew:  # else its loader is in the next epoch already
                                self._batches.start_epoch(name)
                            over = runner.decided == decided  # else that was a step, and the run begins a window
                    else:
                        taken = as_tensors(taken, self._devices[name])
                        rows = rows_of(step, taken)
                        with runner.in_epoch(length) if bound else NOTHING:
                            ran = runner.run(taken, rows, fetch)
                except PeerLost as error:
                    if redo is None:
                        raise
                    counts, again, met = redo.meet(error, name)
                    runs, over = [*again, *runs], False
                    self._goes_on(met)
                    if counts and ending:  # the step at the end of the epoch, behind which the run is to be done
                        self._batches.start_epoch(name)
                    ran = runner.last_result() if counts and not ending else None
                    # With runs to be done before it, this call would be several of a newcomer's.
                    if ran is None and len(runs) == 1 and (record := redo.admit(name)) is not None:
                        self._goes_on(record)
                if ran is not None:
                    runs.pop(0)
                    over = False
                    if redo is not None:
                        redo.ended(name, batch)
        finally:
            if self._remote is not None:
                self._remote.tables.end(self._remote.clock)
                self._remote.tables.lookups = None
        if self._remote is not None:
            self._read_applied(self._remote, runner)
        assert ran is not None
        return ran, rows

    def _read_applied(self, remote: RemotePart, runner: StepRunner) -> None:
        while not runner.in_window:  # inside a window nothing was applied
            try:
                remote.read_applied()
                return
            except PeerLost as error:  # one that has died behind the vote: the servers wait for its word
                self._meet_outside(error)

    def _meet_outside(self, error: PeerLost) -> None:
        if self._redo is None or self._redo.calls:
            raise error
        self._catch_up(*self._redo.meet_outside(error))

    def _catch_up(self, record: MembershipRecord, name: str, runs: Runs) -> None:
        """Do the runs of the open window again, which another worker may not have seen end."""
        self._goes_on(record)
        if runs:
            with torch.inference_mode(False), torch.enable_grad():  # whatever the evaluation was called in
                self._do(name, self._spec.training[name], runs, self._fetch_all[name])

    def _goes_on(self, record: MembershipRecord) -> None:
        self._progress.shown = record.rank == 0
        self._batches.met()
        self._watching.met(record)

    def _together(self, name: str, act: Callable[[], _T]) -> _T:
        """Return ``act()``, which all workers call and which changes nothing; with those left if one is lost."""
        with self._reporting_failures():
            return act() if self._redo is None else self._redo.call(name, act, self._catch_up)

    def _evaluate(self, name: str, step: EvalStep, batch: Structure | None, fetch: Fetch) -> dict[str, Tensor]:
        self._check_late()
        taken = as_tensors(self._batches.next_to_evaluate(name) if batch is None else batch, self._devices[name])
        while True:
            try:
                if self._remote is not None:
                    self._remote.begin(training=False)
                return cast("dict[str, Tensor]", fetch.collect(self._evaluators[name].run(taken, fetch)))
            except PeerLost as error:  # the servers wait for the word of one that has died behind the last step
                self._meet_outside(error)
            finally:
                if self._remote is not None:
                    self._remote.tables.end(self._remote.clock)

    def evaluate(self, name: str = "default", loader: Iterable[Structure] | None = None) -> dict[str, Tensor]:
        """Run the ``EvalStep`` ``name`` on a whole loader, from the start, on all workers; every worker calls it.

        ::

            scores = executor.evaluate("validate")  # the same on every worker
            print(scores["loss"], scores["probability"].shape)

        Args:
            name: of an ``EvalStep``.
            loader: any iterable of batches; by default the step's own, whose position stays.

        Returns:
            The results of all batches, on the CPU. An output whose dim 0 is the rows of the batch, in every batch, is
            joined: of ``GlobalBatches`` in their global order (``shuffle=False``: the dataset's), of any other loader
            batch by batch in the order of ranks. An output of no dims is averaged by rows, in float64. All workers
            evaluate with rank 0's buffers, such as BatchNorm's statistics, which ``state_dict`` has, too.

        Raises:
            ValueError: no such ``EvalStep``, no loader, no batches, an output of neither kind, or a
                ``DistributedSampler``, which repeats samples to make the shares equal; on every worker.
        """
        self._check_open()
        step = self._step(name)
        if not isinstance(step, EvalStep):
            raise ValueError(f"step {name!r} trains; evaluate runs an EvalStep")
        if loader is None:
            bound = self._batches.bound(name)
        else:
            bound = self._bind(loader)
        self._batches.check_free(bound)
        rows = partial(self._rows_of, name, step)

        def act() -> dict[str, Tensor]:
            with first_ranks_buffers(self._workers, step.model):
                return evaluate(bound, rows, partial(self.run, name), self._workers)

        self._check_late()  # before the loader is begun
        if isinstance(bound.source, Iterator):  # which is not read again
            with self._reporting_failures():
                return act()
        return self._together(f"evaluate({name!r})", act)

    def _check_late(self) -> None:
        for runner in self._runners.values():
            runner.check_late()

    def _rows_of(self, name: str, step: EvalStep, batch: Structure) -> float:
        return rows_of(step, as_tensors(batch, self._devices[name]))

    def batch_num(self, name: str = "default") -> int:
        """Return the number of batches in an epoch of the step's loader: the maximum over all workers.

        Raises:
            ValueError: the step has no loader, or it has no length.
        """
        self._step(name)
        return self._batches.batch_num(name)

    # Reports.

    def __repr__(self) -> str:
        """Return the steps with their models, the mode and the number of optimizer steps taken."""
        steps = ", ".join(f"{name!r}: {step!r}" for name, step in self._steps.items())
        return f"Executor({{{steps}}}, comm_mode={self.comm_mode!r}, step={self.step})"

    def _step(self, name: str) -> Step:
        if not isinstance(name, str):
            raise TypeError(
                f"run's first argument is the name of a step, such as {next(iter(self._steps))!r}, got a "
                f"{type(name).__name__}; give the batch after it, or as batch="
            )
        if name not in self._steps:
            raise ValueError(f"no step is called {name!r}; the steps are {sorted(self._steps)}")
        return self._steps[name]

    def engine(self, name: str = "default") -> str:
        """Return the engine of the step's last run: ``"tape"``, ``"graph"`` or ``"graph+inductor"``."""
        return self._engine(name).name

    def _engine(self, name: str) -> Engine | Evaluator:
        self._step(name)
        return self._evaluators[name] if name in self._evaluators else self._runners[name].engine

    def graph(self, name: str = "default") -> Graph:
        """Return the graph of the step's last run, from forward to optimizers.

        Raises:
            RuntimeError: it has not run as one graph.
        """
        if (graph := self._engine(name).graph) is None:
            raise RuntimeError(f"step {name!r} has not run as a graph; make the Executor with engine='graph'")
        return graph

    @property
    def epoch(self) -> int:
        """Whole epochs behind the next run, of the first training step with a loader; 0 without one.

        ::

            while executor.epoch < 3:  # three epochs, resumed or not
                executor.run("train")

        An epoch is behind once its last batch was run; of a loader without a length, once the next one has begun. A
        process that joins a job (``ab.job().joined``) sees the others' until its first training run, as of ``step``; to
        be told the one in which it joins, it waits here until they let it in, and they wait for its run.
        """
        if self._joins:
            assert self._redo is not None
            return self._redo.members_progress(invited=True)[1]
        name = next((name for name in self._runners if name in self._batches.loaders), None)
        if name is None:
            return 0
        runs, length, loader = self._runners[name].epoch_runs, self._batches.length(name), self._batches.loaders[name]
        if (left := loader.left()) is not None:
            return loader.epoch + (left == 0)
        return loader.epoch + (length is not None and runs is not None and runs >= length > 0)

    @property
    def step(self) -> int:
        """The number of optimizer steps taken, those of a loaded checkpoint included."""
        if self._joins:
            assert self._redo is not None
            return self._redo.members_progress(invited=False)[0]
        return sum(runner.steps for runner in self._runners.values())

    def routes(self) -> Routes:
        """Return where every parameter is kept, and the reason; ``print`` shows a table.

        ``ids`` of a table on servers is how the ids of a step are known before it begins: the part of the batch that
        they are, ``"ids="`` (``TrainStep(ids=...)``) or ``"when looked up"``. It is learned from the first two steps.
        """
        learned = [runner.ids.describe() for runner in self._runners.values() if runner.ids is not None]
        return self._spec.routes.with_ids(ChainMap(*learned))

    def statistics(self) -> Statistics:
        """Return the counts since this executor was created."""
        workers = self._workers
        if self._remote is not None and not self._closed:
            self._remote.count_at_the_edge()
        tables = {} if self._remote is None else self._remote.loads()
        return Statistics(
            steps=self.step,
            skipped_steps=sum(runner.skipped for runner in self._runners.values()),
            runs=dict(self._runs),
            rows=self._rows,
            bytes=(0 if workers is None else workers.bytes_sent) + sum(loads.bytes for loads in tables.values()),
            run_seconds=self._run_seconds,
            wait_seconds=0.0 if workers is None else workers.wait_seconds,
            load_seconds=self._batches.load_seconds,
            memberships=1 if self._redo is None else self._redo.memberships,
            repeated_steps=0 if self._redo is None else self._redo.repeated,
            dropped_rows=self._dropped,
            tables=tables,
        )

    def _loops(self) -> list[dict[str, object]]:
        return (self._progress.loops() or self._batches.loops()) if self._rank == 0 else []

    def _crossed(self) -> tuple[dict[str, int], dict[str, TableLoads]]:
        """Count the bytes of each boundary, and the loads of each table."""
        counts = {} if self._workers is None else {"workers": self._workers.bytes_sent}
        tables = {} if self._remote is None else self._remote.loads()
        if sent := sum(PipeRanks(model).bytes_sent for model in self._spec.models.values() if isinstance(model, Pipe)):
            counts["pipeline"] = sent
        return counts | {f"table {name}": loads.bytes for name, loads in tables.items()}, tables

    def record_loads(self) -> Statistics:
        """Return the counts since the last call, print them, and append them to ``log_path`` as a line of JSON."""
        now = self.statistics()
        difference = now.since(self._reported)
        self._reported = now
        line = json.dumps({"seconds": time.monotonic() - self._started, **difference.as_dict()})
        print(line)
        if self._log_path is not None:
            with self._log_path.open("a") as file:
                file.write(line + "\n")
        return difference

    # Stopping together.

    def request_stop(self) -> None:
        """Request that all workers stop after the same optimizer step; may be called from a signal handler.

        The request is sent with the next training run, so that ``stopping`` becomes true on every worker behind the
        same optimizer step and all can save together::

            signal.signal(signal.SIGTERM, lambda *_: executor.request_stop())
            while not executor.stopping:
                executor.run("train")
            executor.save(path)
        """
        for runner in self._runners.values():
            runner.engine.ask_to_stop()

    @property
    def stopping(self) -> bool:
        """True behind the optimizer step after which all workers stop, if one had asked; the same on all workers."""
        runners = self._runners.values()
        return any(runner.stop_seen for runner in runners) and not any(runner.in_window for runner in runners)

    # Checkpoints.

    def save(self, path: str | os.PathLike[str], wait: bool = True) -> None:
        """Save the state of training, completely or not at all; every worker calls it.

        Models, optimizers, schedulers, the runs and steps done, every worker's random
        number generators, the positions of the loaders, and the objects given as ``state``.
        The previous checkpoint in ``path`` is kept. ``path`` is a folder, or the URL of storage that fsspec reaches
        (extra ``storage``), such as ``s3://bucket/run``.

        With ``wait=False`` the state is copied in memory and written while training continues; the next save waits for
        it. A failure is raised by the next ``save``, ``finish_saves``, ``load``, ``resume`` or ``close``, which also
        call the ``"save"`` callbacks.

        Raises:
            RuntimeError: a step is between two runs of an accumulation window; says how many are left.
            CheckpointError: it could not be written, or one before it; raised on every worker.
            WorkersDiffer: as for ``run``; nothing is written.
            DeadlineExceeded: the one before it is still being written after ``timeout`` seconds.
        """
        self._check_open()
        folder, began = as_place(path), time.monotonic()
        if not isinstance(wait, bool):
            raise TypeError(f"wait is True or False, got {wait!r}")
        if self._joins:
            return
        earlier, before = self._settle_save()
        try:
            self._together("save", partial(self._saver.save, folder, wait=wait))
        except BaseException as error:
            if earlier:
                error.add_note(f"and before it {earlier}")
            raise
        now = SaveRecord(self.step, folder, time.monotonic() - began) if wait else None
        for record in (before, now):  # behind what all workers do together: a callback may raise on one of them
            if record is not None:
                self._watching.saved(record)
        if earlier:
            raise CheckpointError(f"{earlier}; step {self.step} {'has been' if wait else 'is being'} saved")

    def finish_saves(self) -> None:
        """Wait until what ``save(wait=False)`` has started is written; every worker calls it.

        Raises:
            CheckpointError: it could not be written; raised on every worker.
            DeadlineExceeded: it takes longer than ``timeout`` seconds.
        """
        self._check_open()
        self._finish_save()

    def _finish_save(self) -> None:
        failure, record = self._settle_save()
        if record is not None:
            self._watching.saved(record)
        if failure:
            raise CheckpointError(failure)

    def _settle_save(self) -> tuple[str, SaveRecord | None]:
        """Wait for the save in the background, and return its failure, or what it has written."""
        saver, failure = self._saver, ""
        if saver.saving is not None:
            failure = self._together("finish_saves", partial(saver.settle, Deadline.after(self._spec.timeout)))
        save, saver.saving = saver.saving, None
        if save is None or failure:
            return failure, None
        return "", SaveRecord(save.step, save.path, time.monotonic() - save.began)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Load the newest complete checkpoint in ``path``, with any number of workers. Every worker calls it.

        Random number generators are restored if the number of workers is the one that saved.

        Raises:
            CheckpointError: there is none, none is complete, or it does not fit: names every tensor that is missing,
                unexpected, or has another shape or dtype. Nothing has been changed.
        """
        self._load(as_place(path), search=False)

    def _load(self, folder: Place, *, search: bool) -> bool:
        self._check_open()
        if self._joins:
            return True  # it takes the members' state, in its first training run
        self._finish_save()
        with self._reporting_failures():
            loaded = self._saver.load(folder, search=search)
            if self._remote is not None:
                self._remote.open("replace")
        if loaded:
            self._watching.loaded(self.step, folder)
        return loaded

    def state_dict(self, name: str | None = None) -> dict[str, Tensor]:
        """Return a copy of the model's state as plain PyTorch has it, tables on servers included.

        ::

            state = executor.state_dict()  # every worker calls it
            if state:
                torch.save(state, "model.pt")

        Every worker calls it; rank 0 gets the state, the others ``{}`` (with ``comm_mode=None`` each process its own).
        A tied parameter has all its names. A ``RemoteEmbedding`` of fixed size is ``<module>.weight``, one with a
        dynamic vocabulary ``<module>.ids`` and ``<module>.weight``. Parameters of a loss that is a module, and experts,
        are not in it.

        Args:
            name: of a step with the model; ``None`` where all steps have the same.

        Raises:
            ValueError: no such step, or several models and no name.
            CheckpointError: it could not be read; on every worker.
            WorkersDiffer: as for ``run``; so it is for ``export``.
        """
        model, state = self._model_of(name), dict[str, Tensor]()
        if not self._joins:
            self._together("state_dict", lambda: self._saver.model_state(model, whole=True, into=state))
        return state

    def _model_of(self, name: str | None) -> nn.Module:
        self._check_open()
        steps = [self._step(name)] if name is not None else list(self._steps.values())
        models = {model_of(step.model) for step in steps}
        if len(models) > 1:
            raise ValueError(f"the steps have {len(models)} models; name one of the steps {sorted(self._steps)}")
        return models.pop()

    def export(self, folder: str | os.PathLike[str], name: str | None = None) -> None:
        """Write the model as plain PyTorch has it to ``model.safetensors`` in ``folder``; every worker calls it.

        ::

            executor.export("trained")
            # elsewhere, in plain PyTorch:
            model.load_state_dict(safetensors.torch.load_file("trained/model.safetensors"))

        The names and tensors are those of ``state_dict()``; a tied parameter is under each of its names. Above 5 GB
        there are several files, and ``model.safetensors.index.json`` beside them, as Hugging Face has it: after
        ``model.config.save_pretrained(folder)`` its ``from_pretrained(folder)`` reads them. Rank 0 writes, tables on
        servers a few rows at a time. An older export in the folder is replaced.

        Args:
            folder: a directory, made if it is not there.
            name: of a step with the model; ``None`` where all steps have the same.

        Raises:
            ValueError: no such step, several models and no name, or state that is no tensor (``get_extra_state``).
            CheckpointError: it could not be read or written; on every worker.
        """
        model, path = self._model_of(name), check_path(folder, "folder")
        if not self._joins:
            self._together("export", lambda: self._saver.export(model, path))

    def resume(self, path: str | os.PathLike[str]) -> bool:
        """Load the newest complete checkpoint in or under ``path``; ``False`` if there is none. Every worker calls it.

        Checkpoints under ``path`` that no Executor has saved, such as a server's own, are passed over.

        Raises:
            CheckpointError: none of the checkpoints is complete, or the newest does not fit.
        """
        return self._load(as_place(path), search=True)

    # Sinks, callbacks and reports.

    def log(self, values: Mapping[str, float | Tensor]) -> None:
        """Pass your own numbers to this rank's sinks, as of ``executor.step``.

        ::

            executor.log({"validation/loss": scores["loss"]})

        Raises:
            TypeError: no dict, or a value that is neither a number nor a tensor of one element.
            ValueError: a name that the step reports itself.
        """
        self._check_open()
        self._watching.log(self.step, values)

    @overload
    def track(self, over: int, label: str | None = None) -> Iterator[int]: ...

    @overload
    def track(self, over: Iterable[_T], label: str | None = None) -> Iterator[_T]: ...

    def track(self, over: int | Iterable[_T], label: str | None = None) -> Iterator[int] | Iterator[_T]:
        """Return an iterator over ``over`` that shows its progress, speed and remaining time on rank 0's stderr.

        ::

            for _ in executor.track(range(800), "training"):
                executor.run("train")

        On a terminal, also under ``anabranch run``, one line is redrawn in place, at most four times a second, and
        output of the script goes above it; elsewhere a line is written every five seconds. Tracked loops may be nested.

        Args:
            over: anything to iterate over, with a total if it has a length, or a number of rounds.
            label: a word before the count.

        Raises:
            TypeError, ValueError: neither.
        """
        self._check_open()
        return self._progress.track(over, label)

    @overload
    def on(self, event: Literal["step"], fn: Callable[[StepRecord], object]) -> Subscription: ...

    @overload
    def on(self, event: Literal["save"], fn: Callable[[SaveRecord], object]) -> Subscription: ...

    @overload
    def on(self, event: Literal["peer_lost"], fn: Callable[[PeerLostRecord], object]) -> Subscription: ...

    @overload
    def on(self, event: Literal["membership"], fn: Callable[[MembershipRecord], object]) -> Subscription: ...

    @overload
    def on(self, event: Literal["restart"], fn: Callable[[RestartRecord], object]) -> Subscription: ...

    def on(self, event: str, fn: Callable[..., object]) -> Subscription:
        """Call ``fn(record)`` at each ``event`` from now on, on this worker, on the training thread.

        ::

            executor.on("step", lambda record: print(record.step, record.values["loss"].item()))

        - ``"step"``: an optimizer step was taken (``StepRecord``), before ``run`` returns.
        - ``"save"``: ``save`` has written a checkpoint (``SaveRecord``).
        - ``"peer_lost"``: ``PeerLost`` is about to be raised here (``PeerLostRecord``).
        - ``"restart"``: ``resume`` or ``load`` has loaded a checkpoint in a restarted job, or a server has lost
          acknowledged changes and ``RolledBack`` is about to be raised (``RestartRecord``).
        - ``"membership"``: workers have left or joined the job (``MembershipRecord``: ``rank``, ``world_size``,
          ``left``, ``joined``); the step that this interrupted is done next, by ``run``.

        An exception in ``fn`` is raised by ``run`` or ``save``, with a note that names ``fn``; the step has been taken.

        Returns:
            A subscription; ``remove()`` removes ``fn``.

        Raises:
            ValueError: no such event.
            TypeError: ``fn`` cannot be called.
        """
        self._check_open()
        return self._watching.on(event, fn)

    def trace(self, path: str | os.PathLike[str], steps: int | None = None) -> AbstractContextManager[None]:
        """Record the next optimizer steps of all workers, and write them to ``path`` on rank 0; every worker calls it.

        ::

            with executor.trace("out.json"):  # open it at https://ui.perfetto.dev
                for _ in range(20):
                    executor.run("train")

            executor.trace("out.json", steps=20)  # the next 20 steps of a loop elsewhere

        The file has the steps of each worker with their forward, backward and optimizers, the traffic across each
        boundary with its peer and bytes, and the waits. It is written after the last of ``steps``, at the end of the
        ``with``, or when the executor is closed, where the workers wait for each other. It does not contain servers in
        other processes: see ``anabranch run --trace``.

        Args:
            path: the file, on the machine of rank 0; an existing file is replaced.
            steps: the number of optimizer steps; ``None``: all until the end of the ``with``, or until ``close``. The
                first 250,000 spans of a worker are kept.

        Returns:
            A context manager that ends the recording if it has not ended; recording starts before it is entered.

        Raises:
            ValueError: fewer than 1 step, numbers that differ between the workers, or a path that cannot be written;
                on every worker.
            RuntimeError: a trace is already being recorded.
        """
        self._check_open()
        if self._trace is not None:
            raise RuntimeError("this executor is already recording a trace; start the next one after its last step")
        if self._joins:
            return nullcontext()
        with self._reporting_failures():
            self._trace = RunTrace(path, steps, first=self.step, everyone=self._everyone)
        self._traced = 0 if self._redo is None else self._redo.memberships
        return self._recording(self._trace)

    @contextmanager
    def _recording(self, trace: RunTrace) -> Iterator[None]:
        clean = False
        try:
            yield
            clean = True
        finally:
            if self._trace is trace:
                self._end_trace(clean=clean)

    def _end_trace(self, *, clean: bool) -> None:
        trace, self._trace = self._trace, None
        if trace is not None:
            clean = clean and self._traced == (0 if self._redo is None else self._redo.memberships)
            with self._reporting_failures():
                trace.finish(self.step, alone=not clean)

    @contextmanager
    def _reporting_failures(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._watching.failed(error, self.step)
            raise

    # The end.

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("this executor is closed")

    def close(self) -> None:
        """Stop everything started by this executor: monitoring of the other workers, its process group.

        Then the model is plain PyTorch again: every worker reads the parameters on servers back, in blocks, with their
        optimizers' state. Every worker calls it. Leaving the ``with`` block by an exception does the same, with the
        state that was last applied, and lets the exception pass; in a forked child neither does anything. If the
        servers are gone, tables stay placeholders, whose errors say so.
        """
        self._end(None)

    def _end(self, failed: BaseException | None) -> None:
        if self._closed:
            return
        self._closed = True
        if os.getpid() != self._process:
            return  # everything here is the parent's
        self._failed = failed
        try:
            self._parts.close()
        except Exception as error:
            if failed is None:
                raise
            failed.add_note(f"as the Executor was closed: {type(error).__name__}: {error}")

    def _wait_for_pushes(self) -> None:
        """Wait until the servers have applied the last step, with those that are left."""
        if self._failed is None and self._redo is not None and self._remote is not None:
            self._together("close", self._remote.wait_for_pushes)

    def _close_save(self) -> None:
        if self._failed is None:
            self._finish_save()
            self._check_late()
        else:
            self._saver.abandon(Deadline.after(self._spec.timeout))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end(error)


def _place_among(workers: Workers | None) -> tuple[int, int]:
    """Return this worker's rank and the number of workers; a loader that outlives the executor holds no more of it."""
    return (0, 1) if workers is None else (workers.rank, workers.size)


def _as_numpy(value: object) -> object:
    def convert(leaf: object) -> object:
        if not isinstance(leaf, Tensor):
            return leaf
        leaf = leaf.detach().cpu()
        if leaf.layout is not torch.strided:
            leaf = leaf.to_dense()
        return leaf.float().numpy() if leaf.dtype is torch.bfloat16 else leaf.numpy()

    return map_structure(convert, value)
