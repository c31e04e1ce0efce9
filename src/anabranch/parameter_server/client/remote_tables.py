"""``RemoteTables``: the tables on the servers that a model's steps read and update, as one worker sees them.

::

    begin(step) ──> forward: lookups read rows, through the cache ──> backward: gradients are collected
                ──> push(weight): all of the step's gradients, one message a shard ──> end

Outside of a step, lookups read the state after the last one: they admit no ids, and a gradient is an error.

With a cache whose gradients may wait (``push_bound``), a step waits for the servers only if it must: its push
is sent while the next step runs, and the next step's rows are requested while this one runs::

    step 5    read ─ forward ─ backward ─ push ┐      read ─ forward ─ backward ─ push ┐      step 6
                  └ ahead of 6 ─────────────── │ ─────┘   └ ahead of 7 ─────           └ 6 ──────
                                               └ 5 ──────────────

All of it is one state machine, so it is one file: every call first handles the messages still in flight.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from msgspec.structs import replace
from torch import Tensor, nn

from anabranch.autodiff.moved_parameter import Move
from anabranch.errors import NotFound, SchemaError
from anabranch.liveness.meeting import begin_call
from anabranch.parameter_server.client.cache_group import CacheGroup, CacheQuery
from anabranch.parameter_server.client.parameter_client import ParameterClient
from anabranch.parameter_server.client.remote_embedding import RemoteEmbedding
from anabranch.parameter_server.client.remote_weight import (
    Distinct,
    RemoteLookups,
    WeightSource,
    distinct_ids,
    unique_of,
)
from anabranch.parameter_server.client.row_messages import Pulled
from anabranch.parameter_server.client.saved_tables import write_rows
from anabranch.parameter_server.messages import Merging, acceptable
from anabranch.record.spans import mark
from anabranch.tables.cache import Cache, CacheStatistics, Due
from anabranch.tables.optimizers.row_optimizers import Family, RowOptimizer, from_torch
from anabranch.tables.table_spec import TableSpec

_T = TypeVar("_T")
# A push ends by its own deadline; on a busy machine its thread may be late by seconds.
_LAST_WAIT = 30.0
_ALONE = Merging()
Beside = Mapping[str, tuple[Tensor, Tensor, RowOptimizer]]
"""Ids (none for a dense parameter), gradients and optimizers that a push carries beside the looked-up tables."""


class RemoteTables:
    """Moves a model's embedding tables to the servers, and runs its steps' lookups and updates there.

    >>> model = nn.Sequential(nn.Embedding(10, 2), nn.Flatten(), nn.Linear(4, 1))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with ParameterClient() as client:
    ...     tables = RemoteTables(client)
    ...     tables.adopt(model, ["0.weight"], optimizer)
    ...     for step in range(2):
    ...         tables.begin(step)
    ...         model(torch.tensor([[1, 2]])).sum().backward()
    ...         tables.push()
    ...         optimizer.step()  # moves what stayed here
    ...     client.statistics()[0].tables["0.weight"].pushes
    2

    Args:
        client: with a worker, whose steps are ordered with the other workers'; a bare client's are applied at once.
        cache: how each table is cached here; ``None`` reads every row from the servers.

    Attributes:
        lookups: a list to which each lookup adds its table and its ids, flat and on the CPU; or ``None``.
        unexpected: tables of which this step has looked up ids that it was not expected to look up.
        trains: they are an executor's that is open, and are not only read.
        moves: the parameters of models that are placeholders now.
        delays: gradients may wait in a cache.
        keeps_reads: a step's lookups read the rows of the same ids once: for layers that run again before their
            backward, which are to see the rows that they saw.

    Lookups may be made by several threads at once.
    """

    def __init__(self, client: ParameterClient, *, cache: Cache | None = None) -> None:
        self.keeps_reads = False
        self.trains = False
        self.delays = cache is not None and cache.push_bound > 0
        self._client = client
        self._reading = threading.RLock()  # the caches and the messages in flight are one state
        self._cache = cache
        self._sources: dict[str, _Source] = {}
        self._caches: list[CacheGroup] = []
        self._uncached: list[_Source] = []
        self._ahead: dict[str, Distinct] = {}  # of the next step
        self._taken: dict[str, nn.Parameter] = {}
        self.moves: list[Move] = []
        self._step = 0
        self._merging = Merging()  # of the last push that had rows
        self._training = False  # in a step, between ``begin`` and ``end``
        self.lookups: list[tuple[str, Tensor]] | None = None
        self.unexpected: set[str] = set()
        self._reads = self._usual_reads = 0
        self._between: Callable[[], None] | None = None
        self._coming: tuple[list[CacheQuery[Due]], _Aside[dict[str, Pulled]]] | None = None
        self._leaves: _Aside[None] | None = None  # the push that is in flight, or has failed

    def spec(self, name: str) -> TableSpec:
        """Return the servers' spec of one table."""
        return self._sources[name].spec

    # --- adopting parameters ----------------------------------------------------------------------------------------

    def adopt(self, model: nn.Module, names: Iterable[str], optimizer: torch.optim.Optimizer) -> None:
        """Move parameters of ``model`` to the servers, by their qualified names; placeholders stay in their place.

        Each stays the object that it is, a ``MovedParameter`` from now on. Rank 0's values are taken; the memory here
        is freed. The optimizer, which must have the parameters, determines how the servers update them, with the
        hyperparameters that it has when a step is pushed; its own step skips them, because they have no gradient here.
        A table whose lookups are dense (``sparse=False``) is updated in every step as by a dense optimizer.

        Raises:
            NotFound: no such parameter.
            ValueError: not a table of two dimensions, or an optimizer that tables cannot run.
        """
        parameters = dict(model.named_parameters())
        moving: dict[str, tuple[nn.Parameter, Callable[[], RowOptimizer]]] = {}
        for name in names:
            parameter = parameters.get(name)
            if parameter is None:
                raise NotFound(f"the model has no parameter {name!r}; it has: {', '.join(parameters)}")
            if parameter.ndim != 2:
                raise ValueError(f"{name} has shape {tuple(parameter.shape)}; a table has rows and columns")
            moving[name] = (parameter, rule_of(optimizer, parameter, name))
        for name, (parameter, rule) in moving.items():
            self.take_over(name, parameter, rule, sparse=is_sparse(parameter, [model]))
        self._client.barrier()
        self.move([model])
        for move in self.moves:
            vars(move.parameter)["stepped_elsewhere"] = True  # the caller steps the optimizer by hand

    def take_over(
        self,
        name: str,
        parameter: nn.Parameter,
        rule: Callable[[], RowOptimizer],
        state: Mapping[str, object] | None = None,
        *,
        sparse: bool,
        adopt: bool = False,
    ) -> None:
        """Copy one parameter to the servers, under ``name``: the leading worker's values, available after a barrier.

        Args:
            name: of the table.
            parameter: two-dimensional; stays as it is until ``move``.
            rule: its optimizer, with the hyperparameters that it has at the time of the call.
            state: its optimizer's state so far, as torch names it.
            sparse: whether its lookups have sparse gradients.
            adopt: the servers hold it, and their values and state count.
        """
        self._add(spec_of(name, parameter, rule(), sparse=sparse), rule)
        if self._client.leads and not adopt:
            write_rows(self._client, name, from_torch(rule(), parameter.detach(), state or {}), rule())
        self._taken[name] = parameter

    def move(self, models: Sequence[nn.Module]) -> None:
        """Make placeholders of the parameters taken over, in all ``models``; nothing can fail any more."""
        for name, parameter in self._taken.items():
            source = self._sources[name]
            move = Move(parameter, RemoteLookups(source, source.spec), models)
            self.moves.append(move)  # first: an interrupt in the middle of the move is to find it here
            move.begin()
        self._taken.clear()

    def adopt_modules(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Connect all ``RemoteEmbedding`` in ``model`` to these tables; ``optimizer`` updates those without their
        own.
        """
        modules = [module for module in model.modules() if isinstance(module, RemoteEmbedding)]
        rules: dict[str, Callable[[], RowOptimizer]] = {}
        for module in modules:  # before any of them is connected
            if self.is_trained_elsewhere(module):
                raise ValueError(
                    f"RemoteEmbedding {module.name} is trained by another Executor that is open; close that one "
                    "before this one trains it"
                )
            rule = module.rule or (None if optimizer is None else _first_numbers_of(optimizer))
            if rule is not None:
                rules.setdefault(module.name, rule)
            elif module.name not in self._sources:
                raise ValueError(f"RemoteEmbedding {module.name} has no optimizer; give it one with optimizer=")
            module.check_new(self._client)
        for module in modules:
            source = self._sources.get(module.name)
            if source is None:
                rule = rules[module.name]
                self._attach(module, self._add(module.spec, rule), rule())
            elif source.spec != module.spec:
                raise SchemaError(f"table {module.name} is {source.spec} in this model, and {module.spec}")
            elif source is not module.source:
                self._attach(module, source)

    def _attach(self, module: RemoteEmbedding, source: _Source, rule: RowOptimizer | None = None) -> None:
        """Connect it to its table, with ``rule`` with the rows that it has; they stay there if this fails."""
        before = module.source
        if isinstance(before, _Source) and before.tables._client is not self._client:  # of one that only reads
            module.leave(before.tables._client, None)
        module.close()
        if rule is not None:
            module.put_back(self._client, rule)
        module.attach(source)

    def release_modules(self, model: nn.Module) -> None:
        """Disconnect all ``RemoteEmbedding`` in ``model`` from these tables, before the client is closed."""
        for module in model.modules():
            if isinstance(module, RemoteEmbedding) and module.source is self._sources.get(module.name):
                rule, known = self._sources[module.name].rule, self._client.entries.get(module.name)
                made = None if known is None else known.rule  # with which the rows are there
                module.leave(self._client, None if rule is _no_rule else made or rule())

    def read_modules(self, model: nn.Module) -> None:
        """Let all ``RemoteEmbedding`` in ``model`` that nothing trains read their tables.

        None is created, but those that live in this process, of an optimizer that is known.
        """
        for module in model.modules():
            if isinstance(module, RemoteEmbedding) and not self.is_trained_elsewhere(module):
                self._training = False  # admits no ids
                self._client.expect_table(module.spec)
                rule = module.last_rule if self._client.in_process else None
                if rule is not None:
                    module.check_new(self._client)
                    self._client.init_table(module.spec, rule)
                new = _Source(module.name, self, _no_rule, module.spec)
                self._attach(module, self._sources.setdefault(module.name, new), rule)

    def is_trained_elsewhere(self, module: RemoteEmbedding) -> bool:
        """Return True for a module that an open executor with other tables trains."""
        source = module.source
        return isinstance(source, _Source) and source.tables is not self and source.tables.trains

    def _add(self, spec: TableSpec, rule: Callable[[], RowOptimizer]) -> _Source:
        if spec.dtype == torch.float16 and self._cache is not None and self._cache.push_bound:
            raise ValueError(
                f"table {spec.name} is float16, and a cache with push_bound={self._cache.push_bound} would round its "
                "rows here at different steps than the servers; use push_bound=0, or another dtype"
            )
        self._client.init_table(spec, rule())
        source = self._sources[spec.name] = _Source(spec.name, self, rule, spec)
        if self._cache is not None:
            self._uncached.append(source)
        return source

    def _all_caches(self) -> list[CacheGroup]:
        """Return the caches of all tables; tables new since the last call get theirs. Empty without a cache."""
        if (cache := self._cache) is None:
            return []
        coming, self._uncached = self._uncached, []
        alike: dict[tuple[object, ...], list[_Source]] = {}
        for source in coming:
            rule, spec = source.rule(), source.spec
            kind = (rule.number, rule.state_names) if cache.push_bound else None
            alike.setdefault((spec.width, spec.dtype, kind), []).append(source)
        for some in alike.values():
            names, rules = [source.name for source in some], [source.rule for source in some]
            self._caches.append(CacheGroup(names, cache, some[0].spec.width, some[0].spec.dtype, rules))
        return self._caches

    # --- a step -----------------------------------------------------------------------------------------------------

    def begin(self, step: int, *, training: bool = True, between: Callable[[], None] | None = None) -> None:
        """Begin ``step``.

        Args:
            step: counts pushes.
            training: false if it only reads, and admits no ids.
            between: called once the step has read as often as the previous one: a good time to ``prefetch``.
        """
        self._collect()
        self.end(step)
        if training:
            self._reads = 0
        self._training = training
        self._between = between
        self.unexpected.clear()

    def end(self, step: int) -> None:
        """End the step, if one has begun, and forget what it has read: from now on lookups read as of ``step``.

        The last part of a step calls it: ``push``, or ``release`` of one that was held. Call it after a step that
        failed.
        """
        self._step = step
        if self._training:
            self._usual_reads, self._reads = self._reads, 0
        self._training, self._between = False, None
        self.forget()

    def forget(self) -> None:
        """Forget the rows that lookups have read or were expected to read, and gradients that were not pushed."""
        for source in self._sources.values():
            source.expected = None
            source.seen.clear()
            source.gradients.clear()

    def expect(self, ids_by_table: Mapping[str, Tensor], *, certain: bool = False) -> None:
        """Read the rows that this step's lookups are expected to need, of all tables together: one message per shard.

        A lookup of other ids reads those itself, so a wrong guess only costs time.

        Args:
            ids_by_table: of any shape; ids outside a table are left to the lookup that names them.
            certain: the lookups follow at once. Otherwise ids of dynamic vocabularies are left to them, because reading
                admits them.
        """
        distinct, some = self._distinct(ids_by_table), dict[str, Tensor]()
        for name, one in distinct.items():
            if certain or self._sources[name].spec.rows is not None:
                some[name] = one.ids
        rows = self._read(some) if some else {}
        for name, one in distinct.items():
            self._sources[name].expected = one, rows.get(name)

    def _distinct(self, ids_by_table: Mapping[str, Tensor]) -> dict[str, Distinct]:
        """Return the distinct ids of each table, of those that were requested ahead as they are known."""
        ahead, self._ahead = self._ahead, {}
        distinct: dict[str, Distinct] = {}
        fixed: dict[str, Tensor] = {}
        limits: dict[str, int] = {}
        for name, ids in ids_by_table.items():
            rows = self._sources[name].spec.rows
            if name in ahead and ahead[name].is_of(ids):
                distinct[name] = ahead[name]
            elif rows is None:
                flat = ids.detach().cpu().long().reshape(-1).clone()
                distinct[name] = Distinct(flat, *unique_of(flat))
            else:
                fixed[name], limits[name] = ids, rows
        return distinct | distinct_ids(fixed, limits) if fixed else distinct

    def _read(self, ids: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the rows of distinct ids of several tables, through the caches: one message per shard."""
        rows: dict[str, Tensor] = {}
        if self._cache is None:
            for name, one in self._pull_many(ids, None).items():
                rows[name] = one.rows
            return rows
        left = {name: _all_due(self._sources[name].leaving) for name in ids if self._sources[name].leaving}
        queries, requested, known = self._ask(ids, CacheGroup.ask)
        # A row evicted by an earlier read of this step comes back with the gradients evicted with it.
        back = [name for name, due in left.items() if name in requested and torch.isin(requested[name], due[0]).any()]
        self._push_at_once({name: _all_due(self._sources[name].leaving) for name in back})
        pulled = self._pull_many(requested, known) if requested else {}
        for query in queries:
            rows |= query.answer(pulled)
        return rows

    def _ask(
        self, ids: Mapping[str, Tensor], ask: Callable[..., CacheQuery[_T]]
    ) -> tuple[list[CacheQuery[_T]], dict[str, Tensor], dict[str, Tensor]]:
        """Ask the caches; return their queries, by table the ids to request of the servers, and the known versions."""
        queries, requested, known = list[CacheQuery[_T]](), dict[str, Tensor](), dict[str, Tensor]()
        for caches in self._all_caches():
            if some := {name: ids[name] for name in caches.names if name in ids}:
                queries.append(query := ask(caches, some, self._step, training=self._training))
                requested |= query.ids
                known |= query.known
                self._leave(query.leaving)
        return queries, requested, known

    def _leave(self, leaving: Mapping[str, Due]) -> None:
        """Send gradients evicted from the caches with the rest of the step, so that a step stays one message."""
        for name, due in leaving.items():
            self._sources[name].leaving.append(due)

    def prefetch(self, ids_by_table: Mapping[str, Tensor]) -> None:
        """Request the rows that the next step's lookups will miss, while this step runs; needs a cache.

        They are read as of this step, before its pushes, and are in the cache when the next step begins: with a
        ``pull_bound`` of 0 they are then checked by version, and sent again if they changed. With a larger bound,
        cached rows that will be too old by then are requested as well.

        Args:
            ids_by_table: of any shape; ids outside a table are left to the lookup that names them.

        Raises:
            ValueError: there is no cache.
        """
        if self._cache is None:
            raise ValueError("prefetching needs a cache; give RemoteTables a cache")
        self._collect()
        self._ahead = self._distinct(ids_by_table)
        distinct = {name: some.ids for name, some in self._ahead.items()}
        queries, requested, known = self._ask(distinct, CacheGroup.prefetch)
        if requested:
            self._coming = (queries, _Aside(partial(self._fetch, requested, known, self._step), "anabranch-prefetch"))

    def _fetch(self, requested: Mapping[str, Tensor], known: Mapping[str, Tensor], step: int) -> dict[str, Pulled]:
        mark("tables.prefetch", tables=list(requested))
        return self._pull_many(requested, known, ahead_of=step)

    def _collect(self) -> None:
        """Put prefetched rows into the caches."""
        if self._coming is None:
            return
        (queries, coming), self._coming = self._coming, None
        came = self._wait_for(coming, "pull")
        for query in queries:
            self._leave(query.answer(came))
        # Evicted rows may be read again this step: push their gradients now.
        self._push_at_once({name: _all_due(source.leaving) for name, source in self._sources.items() if source.leaving})

    def close(self) -> None:
        """Pushes waiting gradients, and ends the thread that prefetches."""
        try:
            self._collect()
            self.flush()
        finally:
            self.abandon()

    def abandon(self) -> None:
        """End the threads that prefetch and push, and drop waiting gradients: after a failure."""
        self.trains = False
        for aside in self._in_flight():
            aside.end(max(self._client.timeout, _LAST_WAIT))
        self._leaves = self._coming = None

    def _in_flight(self) -> list[_Aside[Any]]:
        asides = self._leaves, None if self._coming is None else self._coming[1]
        return [aside for aside in asides if aside is not None]

    def __enter__(self) -> RemoteTables:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()

    def take(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return the gradients left by backward since ``begin``: by table, distinct ids and their gradients; empty if
        none.
        """
        taken = {}
        for name, source in self._sources.items():
            parts, source.gradients = source.gradients, []
            if parts:
                taken[name] = merge_rows(parts)
        return taken

    def push(
        self,
        merging: Merging = _ALONE,
        *,
        gradients: Mapping[str, tuple[Tensor, Tensor]] | None = None,
        beside: Beside | None = None,
    ) -> None:
        """Send the step's gradients to the servers, in one message for each.

        With a cache whose gradients wait it returns while they are on their way; if they do not arrive, the next call
        that needs them there raises the error.

        Args:
            merging: of the workers' gradients; those that are held wait for ``release``, so that ``squared_norm`` can
                be taken first.
            gradients: the result of ``take``, if it has been called.
            beside: ids, gradients and the optimizer of other parameters on the servers.

        Raises:
            ValueError: they are held under another consistency than ``bsp``, or with a cache whose gradients wait.
        """
        if merging.hold and self._cache is not None and self._cache.push_bound:
            raise ValueError(f"push_bound={self._cache.push_bound} delays gradients, so a step has no norm; use 0")
        self._merging = replace(merging, weight=merging.weight or self._merging.weight, hold=False)
        gradients = self.take() if gradients is None else gradients
        self._arrive()
        due: dict[str, Due] = {}
        waits, rounding, beside = self.delays, self._client.compression, beside or {}
        if waits:
            dense = [grads for _, grads, _ in beside.values()]
            if not (acceptable([grads for _, grads in gradients.values()], rounding) and acceptable(dense)):
                refused: dict[str, Due] = {name: (*some, None) for name, some in gradients.items()}
                self._sender(refused, merging, beside)()  # and the cache stays unchanged
                return
        if self._cache is None:
            for name, (ids, grads) in gradients.items():
                due[name] = (ids, grads, None)
        for caches in self._all_caches():
            due |= caches.write({name: gradients[name] for name in caches.names if name in gradients}, self._step)
        for name in due:
            source = self._sources[name]
            if source.leaving:
                due[name] = _all_due([due[name], *source.leaving])
                source.leaving.clear()
        if (
            waits and merging.mean and not merging.weight
        ):  # waiting gradients have weight even if this step's batch has none
            waited = {name: some for name, some in due.items() if some[2] is not None and len(some[0])}
            self._push_at_once(waited)
            due |= {name: (ids[:0], grads[:0], None) for name, (ids, grads, _) in waited.items()}
        # A sum may be too large although no gradient is: if it were refused a step late, this worker would wait for
        # the others in that step, and they for its push.
        leaves = waits and not beside and acceptable([grads for _, grads, _ in due.values()], rounding)
        send = self._sender(due, merging, beside, awaited=not leaves)
        if leaves:
            self._leaves = _Aside(send, "anabranch-push")
        else:
            send()
        if not merging.hold:
            self.end(self._step + 1)

    def _arrive(self) -> None:
        """Wait until the last step's push has arrived, or raise its error."""
        if self._leaves is not None:
            self._wait_for(self._leaves, "push")

    def _wait_for(self, aside: _Aside[_T], operation: str) -> _T:
        try:
            answer = self._client.calls.wait_for(aside.answer, operation, step=self._step)
        except BaseException as error:
            if not isinstance(error, Exception):  # Ctrl-C: the process does not wait for it either when it ends
                aside.leave()
            raise
        aside.end(_LAST_WAIT)
        return answer

    def flush(self) -> None:
        """Push gradients waiting in the caches, at once and outside the order of steps: before saving and closing."""
        self._arrive()
        waiting: dict[str, Due] = {}
        for caches in self._caches:
            waiting |= caches.waiting()
        for name, source in self._sources.items():
            parts = [waiting[name]] if name in waiting else []
            if parts or source.leaving:
                waiting[name] = _all_due([*parts, *source.leaving])
        self._push_at_once({name: due for name, due in waiting.items() if len(due[0])})

    def _push_at_once(self, due: Mapping[str, Due]) -> None:
        if due:
            self._arrive()
            # Under bsp the push waits for the other workers, which may be lost meanwhile: await it like any other.
            self._leaves = _Aside(self._sender(due, self._merging, {}, unordered=True), "anabranch-push")
            self._arrive()
        for name in due:
            self._sources[name].leaving.clear()

    def begin_again(self) -> None:
        """Forget what is cached or on its way, as the workers are others now; gradients that wait are pushed."""
        self.wait_until_quiet()
        self._leaves = self._coming = None
        self.flush()
        self.drop_caches()

    def drop_caches(self) -> None:
        """Forget all cached and prefetched rows and messages in flight: the servers' rows have been replaced."""
        self.wait_until_quiet()
        self._leaves = self._coming = None
        for caches in self._caches:
            caches.drop()
        self.forget()
        for source in self._sources.values():
            source.leaving.clear()

    def wait_until_quiet(self) -> None:
        """Wait until no message is in flight, whatever its outcome: before the servers' rows are replaced."""
        for aside in self._in_flight():
            with suppress(Exception):  # raised again where the result is needed
                self._wait_for(aside, "become quiet")

    def statistics(self) -> dict[str, CacheStatistics]:
        """Statistics of each table's cache; empty without caches."""
        return {name: counts for caches in self._caches for name, counts in caches.statistics().items()}

    def _sender(
        self, due: Mapping[str, Due], merging: Merging, beside: Beside, *, awaited: bool = True, unordered: bool = False
    ) -> Callable[[], None]:
        """Return a function that sends the gradients, with the optimizers' hyperparameters of this moment."""
        step = None if unordered or self._client.worker is None else self._step
        gradients, rules, squares = {}, {}, {}
        for name, (ids, grads, own) in due.items():
            gradients[name], rules[name] = (ids, grads), self._sources[name].rule()
            if own is not None:
                squares[name] = own
        for name, (ids, grads, rule) in beside.items():
            gradients[name], rules[name] = (ids, grads), rule
        for name, rule in rules.items():
            made = self._client.entry(name).rule
            if made is not None and not (rule is made or made.same_layout(rule)):
                raise ValueError(
                    f"the servers keep {made.state_names or 'no state'} for {name}, and {rule.family} with its present "
                    f"settings has {rule.state_names or 'none'}: momentum, amsgrad or centered cannot be switched on "
                    "or off while an Executor is open; put it back, or change it before the Executor is made"
                )
        return partial(
            self._client.push_many, gradients, rules=rules, squares=squares, step=step, merging=merging,
            unordered=unordered, awaited=awaited,
        )  # fmt: skip

    def _pull_many(
        self, ids: Mapping[str, Tensor], known: Mapping[str, Tensor] | None, *, ahead_of: int | None = None
    ) -> dict[str, Pulled]:
        """Read rows for a step or between two, or for the step after ``ahead_of``, which admits its ids itself."""
        worker, ahead, step = self._client.worker, ahead_of is not None, None
        bsp = worker is not None and worker.consistency == "bsp"
        if not ahead or not bsp:
            self._arrive()  # own writes must be read; bsp's servers ensure it for reads ahead of a step
        if worker is not None:
            step = self._step if ahead_of is None else ahead_of
            if not (bsp or self._training or ahead):
                step = 0  # what is there now: only a step waits for workers that are behind
        training, with_state = self._training and not ahead, self.delays  # which a cache with own writes needs
        return self._client.pull_many(
            ids, training=training, step=step, known=known, with_state=with_state, ahead=ahead
        )  # fmt: skip


@dataclass(slots=True, eq=False)
class _Source:
    """One table: the source of lookups' rows, and the receiver of their gradients."""

    name: str
    tables: RemoteTables
    rule: Callable[[], RowOptimizer]
    spec: TableSpec
    gradients: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    leaving: list[Due] = field(default_factory=list)
    expected: tuple[Distinct, Tensor | None] | None = None  # the ids that this step is to look up, and their rows
    seen: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # what lookups of this step have read

    def distinct(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        if self.tables.lookups is not None:
            flat = ids.detach().reshape(-1).to("cpu", torch.int64, copy=True)  # as the step may change them in place
            self.tables.lookups.append((self.name, flat))
        if self.expected is not None and ids.device.type == "cpu":
            inverse = self.expected[0].of(ids)
            if inverse is not None:
                return self.expected[0].ids, inverse
        return unique_of(ids)

    def read(self, ids: Tensor) -> Tensor:
        with self.tables._reading:
            for known, rows in self.seen:
                if torch.equal(known, ids):
                    return rows
            rows = self._rows_of(ids)
            if self.tables.keeps_reads and self.tables._training:
                self.seen.append((ids, rows))
            tables = self.tables
            tables._reads += 1
            if tables._between is not None and tables._reads == tables._usual_reads:
                tables._between()
            return rows

    def _rows_of(self, ids: Tensor) -> Tensor:
        """Return the rows of ``ids``; those that the step has not read yet are read now."""
        known, rows = (ids[:0], None) if self.expected is None else (self.expected[0].ids, self.expected[1])
        if rows is not None and ids is known:
            return rows
        positions, there = self._positions(ids)
        if rows is None or (len(ids) and not there.any()):
            return self.tables._read({self.name: ids})[self.name]
        rows = rows[positions]
        if not there.all():
            rows[~there] = self.tables._read({self.name: ids[~there]})[self.name]
        return rows

    def _positions(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the position of each of ``ids`` among the expected ones, and whether it is there."""
        known = ids[:0] if self.expected is None else self.expected[0].ids
        positions = torch.searchsorted(known, ids).clamp(max=max(len(known) - 1, 0))
        there = known[positions] == ids if len(known) else torch.zeros_like(ids, dtype=torch.bool)
        if not there.all():
            self.tables.unexpected.add(self.name)
        return positions, there

    def is_read(self, ids: Tensor) -> bool:
        """Return True if the step has read the rows of all ``ids``, of any shape."""
        there = self._positions(ids.detach().cpu().long().reshape(-1))[1]
        return bool(there.all()) and self.expected is not None and self.expected[1] is not None

    def take_gradient(self, ids: Tensor, grads: Tensor) -> None:
        if not self.tables._training:
            cure = f"; or keep it on the workers: routes={{{self.name!r}: 'AllReduce'}}"
            raise ValueError(
                f"a gradient reached table {self.name} outside of a training step, where the servers take none; train "
                "with executor.run, and look rows up under torch.no_grad() elsewhere"
                + (cure if any(move.name == self.name for move in self.tables.moves) else "")
            )
        self.gradients.append((ids, grads))


_awaited: set[threading.Thread] = set()


@atexit.register
def _await_asides() -> None:
    for thread in list(_awaited):
        while thread.is_alive():  # its call has a deadline of its own
            thread.join(timeout=1.0)


class _Aside(Generic[_T]):
    """A call on a thread that ends with it: so tables that are never closed leave no thread behind.

    The process ends after the call, as after any other thread's, unless ``leave`` was called: Python can be told so
    only of a daemon.
    """

    def __init__(self, call: Callable[[], _T], name: str) -> None:
        thread, self.answer = begin_call(call, name)
        self._thread = thread
        _awaited.add(thread)
        self.answer.add_done_callback(lambda _: _awaited.discard(thread))

    def leave(self) -> None:
        """Wait for it no more, neither in ``end`` nor as the process ends."""
        _awaited.discard(self._thread)

    def end(self, seconds: float) -> None:
        """Wait until the thread has ended, whatever the call's outcome; it has its own deadline."""
        if not self.answer.done() and self._thread not in _awaited:
            return
        self._thread.join(timeout=seconds)


@contextmanager
def read_together(lookups: Sequence[tuple[WeightSource | None, Tensor]]) -> Iterator[None]:
    """Read the rows of the block's lookups; for the tables of one ``RemoteTables``, in one message per shard.

    Sources of other kinds are left to the lookups.
    """
    alike: dict[RemoteTables, dict[str, list[Tensor]]] = {}
    for source, ids in lookups:
        if isinstance(source, _Source):
            alike.setdefault(source.tables, {}).setdefault(source.name, []).append(ids)
    for tables, ids_by_table in alike.items():
        lookups_of = {name: torch.cat(parts) for name, parts in ids_by_table.items()}
        missing = {name: ids for name, ids in lookups_of.items() if not tables._sources[name].is_read(ids)}
        if len(missing) > 1:
            tables.expect(missing, certain=True)
    try:
        yield
    finally:
        for tables in alike:
            if not tables._training:
                tables.forget()


def merge_rows(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Distinct ids and the sums of their gradients; those of each part are distinct."""
    if len(parts) == 1:
        return parts[0]
    ids, grads = map(torch.cat, zip(*parts, strict=True))
    distinct, inverse = torch.unique(ids, return_inverse=True)
    return distinct, grads.new_zeros(len(distinct), grads.shape[1]).index_add_(0, inverse, grads)


def _all_due(parts: Sequence[Due]) -> Due:
    if len(parts) == 1:
        return parts[0]
    known = [torch.ones(len(ids), device="cpu") if own is None else own for ids, _, own in parts]
    return torch.cat([ids for ids, _, _ in parts]), torch.cat([grads for _, grads, _ in parts]), torch.cat(known)


def is_sparse(parameter: nn.Parameter, models: Iterable[nn.Module]) -> bool:
    """Return True for a table whose lookups have sparse gradients, in every module that holds it."""
    modules = (module for model in models for module in model.modules())
    users = (module for module in modules if any(one is parameter for one in module._parameters.values()))
    return all(getattr(module, "sparse", False) is True for module in users)


def rule_of(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, name: str) -> Callable[[], RowOptimizer]:
    """Return the hyperparameters with which ``optimizer`` updates ``parameter``, read again at each call.

    Raises:
        ValueError: it does not have the parameter, or servers cannot run it.
    """

    def rule() -> RowOptimizer:
        for number, group in enumerate(optimizer.param_groups):
            for one in group["params"]:
                if one is parameter:
                    return RowOptimizer.from_torch(optimizer, number)
        raise ValueError(
            f"the optimizer does not have {name}; give it the parameters before they move to the servers, and "
            "freeze one with requires_grad_(False)"
        )

    rule()
    return rule


def spec_of(name: str, parameter: Tensor, rule: RowOptimizer, *, sparse: bool) -> TableSpec:
    """Return the table that holds a parameter under ``name`` on the servers.

    ``torch.optim`` moves rows without a gradient, too; so does the momentum of sparse gradients.
    """
    rows, width = parameter.shape
    moves = rule.family is not Family.SPARSE_ADAM and (not sparse or (rule.family is Family.SGD and rule.momentum != 0))
    return TableSpec(name, rows, width, parameter.dtype, every_row_moves=moves)


def _no_rule() -> RowOptimizer:
    raise AssertionError("a table that is only read is pushed nothing")


def _first_numbers_of(optimizer: torch.optim.Optimizer) -> Callable[[], RowOptimizer]:
    RowOptimizer.from_torch(optimizer)
    return lambda: RowOptimizer.from_torch(optimizer)
