"""An executor's side of the servers: what a step reads and pushes, and what is seen of the model between two runs.

::

    begin ──> forward: lookups pull rows ──> backward ──> RemoteWindow ──> push, held ──> vote ──> release ──> copies
      └ whose turn it is: bsp, ssp, asp                      └ sums over accumulated runs                        read

Under ``bsp`` a step is one step: servers hold what is pushed, and the workers vote before anything is applied. The
result is that each has all its sums and that all servers have all pushes; then each updates what it has itself and
releases the servers' half, at once. Where gradients wait in a cache, and under ``ssp`` and ``asp``, pushes are applied
as they come.

Between two runs, lookups and copies are those of the state after the last step; a look at them changes nothing. The
clock counts pushes, over all training steps of the executor: every worker makes the same ones in the same order.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from anabranch.autodiff.hooks import before_load, before_state, hooks_of_step
from anabranch.autodiff.moved_parameter import Move, MovedState, Ways, is_within
from anabranch.choices import listed
from anabranch.collectives import Workers
from anabranch.deadline import Deadline
from anabranch.errors import BoundaryError, LostUpdate
from anabranch.executor.exchange import exchange
from anabranch.executor.routes import Place, ServedParameter
from anabranch.executor.spec import Served, Spec
from anabranch.executor.statistics import TableLoads
from anabranch.executor.steps import TrainStep, model_of
from anabranch.interrupts import hold_interrupts
from anabranch.job import job
from anabranch.liveness.group import rank_names
from anabranch.liveness.membership import APART, own_place, published
from anabranch.parameter_server import (
    ParameterClient,
    RemoteEmbedding,
    RemoteTables,
    WholeParameters,
    Worker,
)
from anabranch.parameter_server.client.cache_group import compile_cache_kernels
from anabranch.parameter_server.client.parameter_client import REFUSALS
from anabranch.parameter_server.client.remote_tables import spec_of
from anabranch.parameter_server.client.saved_tables import restore_some, write_dense, write_rows
from anabranch.tables import Family, ParameterState, TableSpec, to_torch
from anabranch.tables.row_block import Group

_log = logging.getLogger("anabranch.executor")

_Left = dict[tuple[tuple[str, ...], str], tuple[str, int]]
"""Parameters that an Executor of this process has left on servers and given back, by endpoints and name: the client
that had joined last, as another one may since have trained others as far, and their step."""
_left: MutableMapping[Tensor, _Left] = WeakTensorKeyDictionary()  # by the parameters


_PATIENCE = 10.0  # heartbeats for a server to answer, where an error ends the Executor


class RemotePart:
    """The parameters of an executor that live on the servers.

    They move there at once if the servers hold nothing under their names, else by ``open``. Until then, and for an
    executor without a ``TrainStep`` always, a bare client reads each ``RemoteEmbedding`` as it stands, and changes
    nothing.

    Args:
        spec: of the executor.
        workers: those whose steps are ordered with this one's, all ranks of parallel pipelines; ``None`` for a single
            worker.
        stages: the number of ranks that hold one model between them; those with neighbouring numbers do.

    Attributes:
        is_open: the parameters are on the servers.
        clock: the number of pushes so far.
        unconfirmed: the number of a push that the servers may have applied, and this worker does not know: without
            votes, from its start until all servers have answered it, and after a run that failed behind it; else while
            the workers vote. -1 while the parameters move to the servers.
        votes: the servers hold what is pushed until all workers have agreed that it is whole.
        moved: the parameters of the models on this rank that belong on the servers.
        there: those of them that are there.
        embeddings: the tables of ``RemoteEmbedding``s, on all ranks.
        served: the names of all that is on servers, on all ranks.
        stages: as given.
        place: this worker's in a job that goes on without those that are lost, where all run apart; else ``None``.

    Raises:
        ValueError: several workers and no servers; clipping, a cache or stages on several ranks that do not go with
            the consistency.
    """

    def __init__(self, spec: Spec, workers: Workers | None, stages: int = 1) -> None:
        self._spec, self._steps, self._models = spec, spec.steps, spec.models
        self._trains, self._served_choice, self.consistency = bool(spec.training), spec.served, spec.consistency
        self._workers = workers if workers is not None and workers.several else None
        self.stages, world = stages, 1 if self._workers is None else self._workers.size
        self.moved = [route.served for route in spec.routes if route.served is not None]
        self._optimizers = list(dict.fromkeys(moved.optimizer for moved in self.moved))
        self.embeddings = [route.parameter for route in spec.routes if route.place.served and route.tensor is None]
        self.is_open, self.clock = False, 0
        delays = spec.cache is not None and spec.cache.push_bound > 0
        self.votes = self.consistency.merges and not delays
        self.there: Sequence[ServedParameter] = ()
        self.unconfirmed: int | None = None
        self._undecided = False  # something is pushed that is neither released nor dropped
        self._failure: Exception | None = None  # of this worker's part of it
        self._failed = "push"
        self._read_at = self._as_of = 0  # this worker's pushes, and those of all workers, before the copies were read
        self._edges: dict[str, tuple[int, int]] = {}  # ids without a row and evicted rows, by table
        self._full: set[str] = set()  # tables without room for an id, of which a warning was given
        self._before = ""  # the client that had joined the servers last
        self._replaced_later: set[str] = set()
        self._hooks = ExitStack()
        self.place = None
        if (
            self._workers is not None
            and not spec.run_together(spec.routes)
            and (place := own_place(spec.heartbeat)) is not None
        ):
            self.place = place if published(place.meeting).least < self._workers.size else None
        self._lost, self._look_at = set[int](), 0.0
        spec.check_served()
        self._refuse_step_hooks()
        if stages > 1 and not self.consistency.merges:
            raise ValueError(
                f"consistency={self.consistency.name!r} lets workers run apart, but the ranks of a Pipe make each step "
                "together; use consistency='bsp', or a Pipe in one process"
            )
        if world > 1 and not job().servers:
            raise ValueError(
                f"{world} workers share parameters on servers, but this job has no servers; start it with `anabranch "
                f"run --workers {world} --servers 1`, or name running ones in ANABRANCH_SERVERS"
            )
        self._worker = self._as_worker()
        self.client = ParameterClient(
            timeout=spec.timeout,
            heartbeat=spec.heartbeat,
            compression=spec.row_compression,
            watch=None if self._workers is None else self._look,
        )
        self.tables = RemoteTables(self.client)
        try:
            self.client.wait_until_served()
            self.whole = WholeParameters(self.client)
            everyone = self.gather([[moved.name for moved in self.moved], self.embeddings])
            self.embeddings = sorted({name for _, embeddings in everyone for name in embeddings})
            self.served = {*self.embeddings, *(name for names, _ in everyone for name in names)}
            steps_there = self._on_servers() if self._trains else {}
            self._replaced_later = steps_there.keys() & set(self.embeddings)
            if self._trains and not steps_there:
                self._open(())
            else:
                for model in self._models.values():
                    self.tables.read_modules(model)
        except BaseException as error:
            if self.there:
                self.close(error)  # gives back what has moved
            for model in self._models.values():
                with suppress(Exception):
                    self.tables.release_modules(model)
            self.client.close()
            raise

    def _look(self) -> None:
        """Raise ``PeerLost`` if another worker is lost; where all run apart, wait for it no longer."""
        assert self._workers is not None
        if self.place is not None and self.is_open:
            self.client.leave(self._look_for_lost())  # again and again: a server that was restarted does not know it
        else:
            self._workers.check_present()

    def end_run(self, step: int) -> int:
        """Return how many workers were lost, where all run apart, at the last look of this heartbeat."""
        if self.place is not None:
            if step:
                self.place.write_progress(step, APART)  # so that workers may be lost from now on
            if time.monotonic() >= self._look_at:
                self._look_for_lost()
        return len(self._lost)

    def _look_for_lost(self) -> list[int]:
        workers = self._workers
        assert workers is not None
        self._look_at, gone = time.monotonic() + self._spec.heartbeat, list(workers.lost())
        store = workers.store
        lost = {rank for rank in gone if rank not in self._lost and not (store and store.check([f"closed/{rank}"]))}
        if lost:
            self._lost |= lost
            _log.warning("%s is lost; the job goes on without its rows", rank_names(sorted(lost)))
        return gone

    def _as_worker(self) -> Worker:
        if (workers := self._workers) is None:
            return Worker(0, 1, self.consistency.name, leads=True)
        leads = workers.rank < self.stages
        return Worker(workers.rank, workers.size, self.consistency.name, leads, workers.membership)

    def _on_servers(self) -> dict[str, int]:
        """Return what the servers hold under this executor's names, and its steps; every worker calls it."""
        self._before = self.client.joined()
        steps = self.client.steps() if self._worker.rank == 0 else {}
        mine = [[name, str(step)] for name, step in steps.items() if name in self.served]
        return {name: int(step) for name, step in self.gather(mine)[0]}

    def _given_back(self, steps: Mapping[str, int]) -> set[str]:
        """Return those parameters on the servers that an earlier Executor gave back to these models as they are there.

        Rows of a ``RemoteEmbedding`` are never among them. Every worker calls it.
        """
        where = self.client.endpoints
        known = {one.name: _left.get(one.parameter, {}).get((where, one.name)) for one in self.moved}
        mine = [name for name, last in known.items() if last == (self._before, steps.get(name))]
        return {name for (names,) in self.gather([mine if self._worker.leads else []]) for name in names}

    def check_free(self) -> dict[str, int]:
        """Return what the servers hold, to be adopted or replaced; every worker calls it.

        Raises:
            ValueError: it is to be neither.
        """
        if self.is_open or not self._trains:
            return {}
        steps = self._on_servers()
        unknown = steps.keys() - self._given_back(steps) if steps and self._served_choice == "refuse" else ()
        if unknown:
            names = [f"{name} (step {steps[name]})" for name in sorted(unknown)]
            raise ValueError(
                f"the servers already hold {listed(names)}, which this Executor was to make; load or "
                "resume a checkpoint first, which replaces them, or give served='adopt' to train on what is there, or "
                "served='replace' to begin anew"
            )
        return steps

    def open(self, served: Served | None = None) -> None:
        """Move the parameters to the servers if they have not; every worker calls it.

        Raises:
            ValueError: the servers hold some already, and are to keep them.
        """
        if not self.is_open and self._trains:
            self._served_choice = served or self._served_choice
            self._open(self.check_free())

    def _open(self, present: Collection[str]) -> None:
        adopted = present if self._served_choice == "adopt" else ()
        if adopted:
            if self._worker.rank == 0:
                self.client.settle()
            self._meet()
        self.client.join(0, self._worker)
        if self._worker.rank == 0:
            self.client.drop_some(self.served.difference(adopted))
        self._meet()
        self._move_in(adopted)
        if adopted:
            self.whole.refresh(None)
        self.unconfirmed = None

    def _move_in(self, adopted: Collection[str]) -> None:
        self.tables.abandon()
        self.tables, self.is_open, self.unconfirmed = RemoteTables(self.client, cache=self._spec.cache), True, -1
        self.tables.trains = True
        self._take_over(adopted)
        if self._spec.cache is not None:
            for spec, table_rule in self.client.made:
                compile_cache_kernels(self._spec.cache, table_rule, spec.dtype)
        if self._workers is None or not self._workers.joins:  # what a newcomer takes over is there
            self._meet()
        self._move()

    def _take_over(self, adopted: Collection[str]) -> None:
        everyone = list(self._models.values())
        for step in sorted(self._steps.values(), key=lambda step: not isinstance(step, TrainStep)):
            optimizers = step.optimizers if isinstance(step, TrainStep) else []
            self.tables.adopt_modules(step.model, optimizers[0] if len(optimizers) == 1 else None)
        for moved in self.moved:
            adopt, sparse = moved.name in adopted, moved.sparse
            state = moved.optimizer.state.get(moved.parameter, {})
            if moved.place is Place.ROWS:
                self.tables.take_over(moved.name, moved.parameter, moved.rule, state, sparse=sparse, adopt=adopt)
                continue
            table = sparse if moved.place is Place.WHOLE_TABLE else None
            # Another one in its place is trained by nobody: in the plain loop too, if all workers have it.
            ways = None if self.alone else Ways(moved.parameter, everyone)
            self.whole.take_over(moved.name, moved.parameter, moved.rule, state, sparse=table, adopt=adopt, ways=ways)

    def _move(self) -> None:
        """Leave placeholders in the models and no state in the optimizers, once the servers have both."""
        self.there = self.moved
        self.tables.move(list(self._models.values()))
        handles = [
            before_load(module, partial(_refuse_load, move))
            for move in self.tables.moves
            for module, holds in move.holders.items()
            if holds
        ]
        for optimizer in self._optimizers:
            handles += before_state(optimizer, partial(_refuse_state, self._names_of(optimizer)))
        for handle in handles:
            self._hooks.callback(handle.remove)
        self._mark_states()

    def _names_of(self, optimizer: torch.optim.Optimizer) -> list[str]:
        return [moved.name for moved in self.moved if moved.optimizer is optimizer]

    def _mark_states(self) -> None:
        """Leave in the optimizers what refuses to be used as the state that the servers have."""
        for moved in self.there:
            refuse = partial(_refuse_state, [moved.name], moved.optimizer)
            moved.optimizer.state[moved.parameter] = MovedState(moved.name, refuse)

    def _refuse_step_hooks(self) -> None:
        """Raise ``ValueError`` for Python code around an optimizer's step that would not see what the servers do."""
        for optimizer in self._optimizers:
            for hook in hooks_of_step(optimizer):
                names = self._names_of(optimizer)
                raise ValueError(
                    f"{getattr(hook, '__qualname__', hook)} is a hook of {type(optimizer).__name__}'s step, or in its "
                    f"place, and would not see {', '.join(names)}, whose gradients and step are on the servers; remove "
                    "it (on_gradients= sees the gradients of what is on the workers), or keep them on the workers: "
                    f"routes={{{names[0]!r}: 'AllReduce'}}"
                )

    @property
    def alone(self) -> bool:
        """True if there are no other workers: the ranks of one pipeline are one."""
        return self._workers is None or self._workers.size == self.stages

    def gather(self, names: list[list[str]]) -> list[list[list[str]]]:
        """Gather the ranks' values, in the order of ranks."""
        return exchange(self._workers, names, list[list[str]], "meet at the servers")

    def _meet(self) -> None:
        self.gather([])

    @property
    def rows(self) -> set[str]:
        """The tables of this rank's models whose rows are looked up on the servers."""
        modules = [module for model in self._models.values() for module in model.modules()]
        embeddings = {module.name for module in modules if isinstance(module, RemoteEmbedding)}
        return embeddings | {moved.name for moved in self.moved if moved.place is Place.ROWS}

    @property
    def whole_parameters(self) -> dict[Tensor, str]:
        """The parameters of which a copy is here, and their names."""
        return {moved.parameter: moved.name for moved in self.moved if moved.place is not Place.ROWS}

    def begin(
        self,
        *,
        training: bool,
        fresh: bool = True,
        expected: Mapping[str, Tensor] | None = None,
        between: Callable[[], None] | None = None,
        keeps_reads: bool = False,
        watches: bool = False,
    ) -> None:
        """Begin a run or an evaluation, with the copies read again if they are not recent enough for it.

        Args:
            training: else nothing is changed, and no ids are admitted.
            fresh: the first run of a window; the others continue with the same copies.
            expected: ids by table that the run is expected to look up.
            between: called when the step has read as often as the previous one did.
            keeps_reads: keep the rows for a second forward.
            watches: note what is looked up.

        Raises:
            LostUpdate: a local copy of a parameter on the servers was changed.
            ValueError: tables that it would read are to be replaced.
        """
        if not self.is_open and self._served_choice == "replace" and self._replaced_later:
            raise ValueError(
                f"the servers hold {', '.join(sorted(self._replaced_later))} of an earlier Executor, which the first "
                "training run or save replaces; evaluate after it"
            )
        if training:
            self._refuse_step_hooks()
        else:
            self.client.check_whole()  # a training run has
        lag = self.consistency.lag
        recent = lag is None or self._as_of >= self.clock - lag  # although other workers may have pushed since
        apart = fresh and not self.consistency.merges and not (training and recent)
        due = self._read_at != self.clock or apart
        if due or (training and fresh):
            self.check_unchanged()
        else:
            for move in self.tables.moves:
                move.check()
        self.tables.keeps_reads = keeps_reads
        self.tables.begin(self.clock, training=training, between=between)
        self.tables.lookups = [] if watches else None
        if due:
            self._refresh(waits=training)
            if training and not self.whole.names and not self.consistency.merges and lag is not None:
                self.client.wait_for_turn(self.clock)  # all that the step reads may be cached
        if expected:
            self.tables.expect(expected)

    def read_applied(self) -> None:
        """After a run, read the copies that its step has changed, so that the model shows the state after the step.

        Raises:
            LostUpdate: the run itself has changed a copy.
        """
        try:
            if self._read_at != self.clock:
                self.check_unchanged()
                self._refresh(waits=False)
        finally:
            self.client.tell()  # or others' reads would wait for this worker's next run
        if len(self._full) < len(self.client.full):
            self._warn_of_full_tables()

    def _warn_of_full_tables(self) -> None:
        """Warn of each table once, on one worker."""
        full, self._full = self.client.full - self._full, set(self.client.full)
        limits = {spec.name: spec.capacity for spec, _ in self.client.made}
        for name in sorted(full) if self.client.rank == 0 else ():
            warnings.warn(
                f"table {name} has no room for all ids of a step: capacity={limits.get(name)}, of which each server "
                f"(there are {self.client.shards}) has its share. Ids without a row read as first values, and their "
                f"gradients are dropped; raise capacity. executor.statistics().tables[{name!r}].unadmitted counts them",
                RuntimeWarning,
                stacklevel=7,
            )

    def _refresh(self, *, waits: bool) -> None:
        """Read the copies as of the clock; under ssp and asp only a step waits for workers that are behind."""
        self.whole.refresh(self.clock if waits or self.consistency.merges else 0)
        self._read_at, self._as_of = self.clock, self.client.pushed

    def check_unchanged(self) -> None:
        """Raise ``ValueError`` if something was written here that counts on the servers only."""
        if not self.is_open:
            return
        for move in self.tables.moves:
            move.check()
        for moved in self.there:
            if type(moved.optimizer.state.get(moved.parameter)) is not MovedState:
                _refuse_state([moved.name], moved.optimizer)
        if changed := self.whole.changed():
            raise LostUpdate(
                f"{', '.join(changed)} was changed by hand and lives on the servers, whose values would overwrite the "
                f"change; put the old values back before the next step, change it before the Executor is made, or keep "
                f"it on the workers: routes={{{changed[0]!r}: 'AllReduce'}}"
            )

    # A step that is voted for.

    def begin_push(self) -> None:
        """Begin a push that is to be decided about."""
        self._undecided = True

    def refuse(self, error: Exception, failed: str = "push") -> None:
        """Drop this worker's part of the step: the vote raises the error on all workers."""
        if self._workers is None:
            raise error
        if self._failure is None:
            self._failure, self._failed = error, failed
            self.client.decide(self.clock, None)  # others may wait for this push
            self.client.tell()

    def vote(self) -> bool:
        """Agree with the other workers on the step; return False if it is dropped, on all.

        Else interrupts are held from the result on, so that what follows is done as a whole.
        """
        if not self.votes or not self._undecided:
            return True
        if self._workers is not None:
            self.unconfirmed = self.clock
            failed = torch.tensor([float(self._failure is not None)], dtype=torch.float64, device="cpu")
            self._workers.all_reduce(failed, operation="vote on a step", step=self.clock)
            if failed.item():
                self.unconfirmed = None
                return False
        hold_interrupts()
        self.unconfirmed = None
        return True

    def refusal(self) -> Exception:
        """Return the error of a push that was refused, on its own worker as it is; or of a norm that nobody could tell,
        which may only be what follows on the others.
        """
        error, self._failure = self._failure, None
        self.client.tell()  # as others may look at the servers before this worker's next run
        mine = [] if error is None else [self._failed, type(error).__name__, str(error)]
        everyone = [[str(rank), *one] for rank, (one,) in enumerate(self.gather([mine])) if one]
        rank, _, name, text = next((one for one in everyone if one[1] == "push"), everyone[0])
        if error is not None and rank == str(self._worker.rank):
            return error
        return refusal_of(name, f"{text}; this was the push of rank {rank}, and nothing was applied")

    def decide(self, scale: float | None) -> None:
        """Release the step, to be applied times ``scale`` or dropped: with the next message to each server."""
        if self._undecided:
            self.client.decide(self.clock, scale)
            self.clock, self._undecided = self.clock + 1, False

    def end_failed(self, clock: int, *, counted: bool) -> None:
        """End a run that has failed, and began when ``clock`` pushes were made."""
        if not self.votes:
            if self.clock != clock and not counted:
                self.unconfirmed = clock
        elif self._workers is None:
            self.decide(None)

    def check_whole(self) -> None:
        """Raise ``BoundaryError`` if the servers may be at another step than this worker."""
        self.client.check_whole()
        if self.unconfirmed is not None:
            raise BoundaryError(self._ahead(), peer="the servers", operation="push", step=self.unconfirmed)

    def _ahead(self) -> str:
        assert self.unconfirmed is not None
        return (
            f"the push of step {self.unconfirmed + 1} was interrupted or not answered, or the run failed behind it, so "
            f"{listed([*(moved.name for moved in self.moved), *self.embeddings])} may be a step ahead of the rest of "
            "the model; go on from the last checkpoint with executor.load, or restart the job from it"
        )

    def check_fetch(self, names: Collection[str], model: nn.Module) -> None:
        """Raise ``ValueError`` for the gradient of a parameter on the servers: they alone have the workers' sum."""
        if not names:
            return
        prefix = next(prefix for prefix, other in self._models.items() if other is model_of(model))
        served = {f"{name.removeprefix(prefix)}.grad": name for moved in self.moved for name in moved.names}
        for name in served.keys() & names:
            raise ValueError(
                f"fetch names {name!r}, but the workers' gradients of {served[name]} are combined only on the "
                f"servers; keep it on the workers to fetch its gradient: routes={{{served[name]!r}: 'AllReduce'}}"
            )

    def count_at_the_edge(self) -> None:
        """Ask the servers what the capacity of tables has cost; the last answer stays if they are gone."""
        limited = {spec.name for spec, _ in self.client.made if spec.capacity is not None}
        with suppress(BoundaryError):
            shards = self.client.statistics() if limited else []
            for name in limited:
                found = [shard.tables[name] for shard in shards if name in shard.tables]
                self._edges[name] = sum(one.unadmitted for one in found), sum(one.evictions for one in found)

    def loads(self) -> dict[str, TableLoads]:
        """Count of this worker's requests so far."""
        caches = {name: (one.hits, one.misses, one.evictions) for name, one in self.tables.statistics().items()}
        loads = {}
        for name, one in self.client.traffic().items():
            cached, edges = caches.get(name, (0, 0, 0)), self._edges.get(name, (0, 0))
            loads[name] = TableLoads(one.pulls, one.pushes, one.bytes, *cached, one.wait_seconds, *edges)
        return loads

    # Saving and loading; every worker calls these.

    def settle(self) -> None:
        """Flush pending gradients; once all workers have, the servers have the state after the last step.

        Raises:
            SchemaError: another Executor has taken over the servers.
            LostUpdate: the servers' values differ from the local ones, and would be saved in place of them.
        """
        if self.is_open:
            self.check_unchanged()
            self.tables.flush()
            self.client.wait_for_turn(self.clock if self.votes else 0)  # also raises if another client has joined

    def spec(self, moved: ServedParameter) -> TableSpec | None:
        """Return what the servers keep of a parameter as a table; ``None`` of one that is no table there."""
        if moved.place is Place.WHOLE:
            return None
        if self.is_open:
            return (self.tables if moved.place is Place.ROWS else self.whole).spec(moved.name)
        return spec_of(moved.name, moved.parameter, moved.rule(), sparse=moved.sparse)

    def replace(
        self,
        kept: Mapping[Tensor, ParameterState],
        state: Mapping[str, object] | None,
        groups: Mapping[str, Group],
        names: Collection[str],
    ) -> None:
        """Put a checkpoint on the servers, which hold nothing: ``names`` as saved from servers, the other parameters as
        ``kept``; one rank of each stage does so.
        """
        if names:
            assert state is not None
            restore_some(self.client, state, groups, names)
        for moved in self.moved:
            if moved.name in names:
                continue
            if (spec := self.spec(moved)) is None:
                write_dense(self.client, moved.name, kept[moved.parameter], moved.rule())
            else:
                self.client.init_table(spec, moved.rule())
                write_rows(self.client, moved.name, kept[moved.parameter], moved.rule())

    def continue_from(self, clock: int) -> None:
        """Continue after ``clock`` pushes with the servers' current state."""
        self.tables.drop_caches()
        self.client.forget()
        self._mark_states()
        self.clock, self.unconfirmed, self._undecided, self._failure = clock, None, False, None
        if self.is_open:
            self.client.join(clock)
        self._meet()
        self.tables.end(clock)
        self.whole.refresh(None)
        self._read_at = clock

    # Another membership of the workers.

    def progress(self) -> tuple[int, int, float, int]:
        """Return what all workers know alike: the pushes so far, and what ``ParameterClient.decided`` does."""
        return self.clock, *self.client.decided()

    def begin_again(self, clock: int, last: int, scale: float, joins: int) -> None:
        """Go back to between two steps, or on to there, as a worker of another membership; of a newcomer, its first.

        What was read ahead or is on its way is of the last one. The word to the shards goes first: some of it may wait
        for those that are lost.
        """
        self._worker = self._as_worker()
        self._lost.clear()  # others have its rows now
        if joins >= 0:  # else the others have nothing on the servers yet
            self.client.begin_again(self._worker, clock, last, scale, joins)
            if self.is_open:
                self.tables.begin_again()
            else:
                self._move_in(self.served)
            self.tables.end(clock)
            self._mark_states()
            self._read_at = -1  # the copies may be of a step before
        self.clock, self.unconfirmed, self._undecided, self._failure = clock, None, False, None

    # The end.

    def close(self, failed: BaseException | None = None) -> None:
        """Flush, give back to the model what the servers have applied last, and close.

        Args:
            failed: the error that ends the Executor: then nothing waits for the other workers, and nothing is raised.

        Raises:
            LostUpdate: at the end, if copies were changed after the last step; they are as trained, too.
        """
        errors: list[Exception] = []
        if self.unconfirmed is not None and self.unconfirmed >= 0:
            (_log.warning if failed is None else failed.add_note)(self._ahead())
        try:
            if failed is None:
                for part in (self.check_unchanged, self.tables.close, self.count_at_the_edge, self.wait_for_pushes):
                    with _collecting(errors):
                        part()
                    if errors and isinstance(errors[-1], BoundaryError):
                        break
            with _collecting(errors):
                if self.is_open:
                    self._give_back(in_haste=failed is not None or any(isinstance(e, BoundaryError) for e in errors))
            for model in self._models.values():
                with _collecting(errors):
                    self.tables.release_modules(model)
        finally:
            self._hooks.close()
            self.client.close()  # which ends pending prefetches
            self.tables.abandon()
        for error in errors:
            if failed is not None:
                failed.add_note(f"as the Executor was closed: {type(error).__name__}: {error}")
                continue
            if not isinstance(error, BoundaryError):
                error.add_note("this was seen as the Executor was closed: the model has the values of the servers")
            raise error

    def _note_given_back(self, steps: Mapping[str, int], last: str) -> None:
        """Let the next Executor of these models replace what they have again, unless it changes meanwhile."""
        where = self.client.endpoints
        for left in list(_left.values()):  # of other models: as they were there before this one joined
            for (at, name), (client, step) in left.items():
                if (at, client, step) == (where, self._before, steps.get(name)) and name not in self.served:
                    left[at, name] = last, step
        for moved in self.moved:
            if moved.name in steps:
                _left.setdefault(moved.parameter, {})[where, moved.name] = last, steps[moved.name]

    def wait_for_pushes(self) -> None:
        """Wait until the servers have applied what all workers have pushed in the steps that this one has run."""
        if self.is_open and self.consistency.merges and self.unconfirmed is None:
            if self.tables.delays:
                self._meet()  # everyone has flushed
            self.client.wait_for_turn(self.clock)

    def _give_back(self, *, in_haste: bool) -> None:
        """Give parameters and optimizers the servers' values and states; what cannot be read says so."""
        for moved in self.there:
            moved.optimizer.state.pop(moved.parameter, None)
        moves = {move.parameter: move for move in self.tables.moves}
        until = Deadline.after(self.client.timeout)
        try:
            # The values may be another Executor's by now. A job whose servers are gone is to end soon.
            patience = min(self.client.timeout, _PATIENCE * self._spec.heartbeat)
            self.client.end_by(Deadline.after(patience) if in_haste else until)
            self.client.wait_for_turn(0)
            if not self.consistency.merges:
                self.client.leave([self._worker.rank])  # as its last word: others may be at later steps
            if self.place is not None and self._workers is not None and self._workers.store is not None:
                self._workers.store.set(f"closed/{self._worker.rank}", "yes")
            if in_haste:
                with suppress(Exception):
                    self.client.end_by(until)
                    self.tables.close()
                if self.consistency.merges and self.unconfirmed is None:
                    self.client.end_by(Deadline.after(patience))
                    try:
                        self.client.wait_for_turn(self.clock)
                    except BoundaryError:  # another worker is lost, and may not have released the last step
                        with suppress(BoundaryError):
                            self.client.settle()
            notes = self._worker.leads and not self.client.in_process
            read_at = (self.client.steps(), self.client.joined()) if notes else None  # before any of the values
            for moved in sorted(self.there, key=lambda moved: moved.parameter not in moves):
                rule = self.client.entry(moved.name).rule or moved.rule()
                saved = self.client.read_state(moved.name, rule, until=until)
                if state := to_torch(rule, saved):
                    moved.optimizer.state[moved.parameter] = _as_kept_here(state, moved)
                values = saved.values.to(moved.parameter.device)
                if (move := moves.pop(moved.parameter, None)) is not None:
                    move.give_back(values)
                else:
                    with torch.no_grad():
                        moved.parameter.copy_(values)
            if read_at is not None:
                self._note_given_back(*read_at)
        except BaseException as error:
            for move in moves.values():
                move.lose(f"{type(error).__name__}: {error}")
            raise


def refusal_of(kind: str, text: str) -> Exception:
    """Return the error of a step that was dropped, by its class's name and its text."""
    return {one.__name__: one for one in REFUSALS}.get(kind, BoundaryError)(text)


@contextmanager
def _collecting(errors: list[Exception]) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # noqa: BLE001 - what follows is to be done all the same
        errors.append(error)


def _refuse_load(move: Move, module: nn.Module, state: Mapping[str, object], prefix: str, *_: object) -> None:
    """Refuse to load numbers of a table that is on the servers, before anything was copied."""
    names = [
        name for name, held in module.named_parameters(prefix[:-1], remove_duplicate=False) if held is move.parameter
    ]
    if any(name in state for name in names) and not is_within():
        move.refuse("load_state_dict")


def _refuse_state(names: Sequence[str], optimizer: torch.optim.Optimizer) -> None:
    """Refuse to use the state of parameters that the servers have."""
    if not is_within():
        raise ValueError(
            f"the state of {type(optimizer).__name__} for {', '.join(names)} is on the servers while its Executor is "
            "open, where a change of it here would not arrive; executor.save(path) and executor.load(path) save and "
            "load it, or change it before the Executor is made or after it is closed, or keep them on the workers: "
            f"routes={{{names[0]!r}: 'AllReduce'}}"
        )


def _as_kept_here(state: Mapping[str, object], moved: ServedParameter) -> dict[str, object]:
    """Return an optimizer's state as after its ``load_state_dict``: servers keep float32 state for float16."""
    if moved.sparse and isinstance(buffer := state.get("momentum_buffer"), Tensor):
        state = {**state, "momentum_buffer": buffer.to_sparse(1)}  # as torch's; Nesterov fails to add a dense one
    half = moved.dtype == torch.float16 and moved.rule().family is not Family.ROW_WISE_ADAGRAD
    dtype, device = moved.dtype if half else None, moved.parameter.device
    return {
        key: value.to(device, dtype) if isinstance(value, Tensor) and key != "step" else value
        for key, value in state.items()
    }
