"""Tables and parameters of servers as checkpoints: one moment of each shard, written to any number of shards."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from itertools import count
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from anabranch.checkpoint.generations import Replaced
from anabranch.deadline import Deadline
from anabranch.errors import CheckpointError, NotFound, Overloaded, SchemaError
from anabranch.parameter_server.client.row_messages import Routed
from anabranch.parameter_server.client.shards import LONGEST, KnownTables
from anabranch.parameter_server.messages import RestoreMessage, SnapshotMessage, SnapshotPart
from anabranch.periodic import periodic
from anabranch.tables.dense_parameter import DenseParameter
from anabranch.tables.optimizers.row_optimizers import CONSTANTS, Family, ParameterState, RowOptimizer
from anabranch.tables.row_block import Group, Piece, RowBlock, files, parts_of, pieces, rows_of
from anabranch.tables.table import Table
from anabranch.tables.table_spec import TableSpec
from anabranch.transport import Request, pack, unpack

CHUNK = 1 << 16  # rows of a whole table in one message
_FORMAT = "rows as weights and states"
_PAUSE = 0.02  # seconds between two looks whether others have read a shard


class SavedTables:
    """One moment of each shard, in the form of a checkpoint; a context manager, which ends it.

    The shards go on meanwhile. Parts are requested from each in turn. A shard ends what it has
    heard nothing about for long, so a thread says a word while the reader is busy.

    Args:
        client: of the shards.
        names: those that are read; ``None``: all.

    Attributes:
        state: plain values.
    """

    def __init__(self, client: KnownTables, names: Iterable[str] | None = None) -> None:
        self._calls = client.calls
        self._shards: dict[int, dict[str, Any]] = {}
        self._begin([pack(SnapshotMessage(names=one)) for one in _names_by_shard(client, names)])
        entries: dict[str, dict[str, Any]] = {}
        for begun in self._shards.values():
            for table in begun["tables"]:
                entry = entries.setdefault(table["spec"]["name"], {**table, "rows": 0})
                entry["step"], entry["rows"] = max(entry["step"], table["step"]), entry["rows"] + table["rows"]
        dense = [parameter for begun in self._shards.values() for parameter in begun["dense"]]
        self._index_of = {name: index for index, name in enumerate(entries)}
        self.state: dict[str, Any] = {"format": _FORMAT, "tables": list(entries.values()), "dense": dense}
        self._stack = ExitStack()
        self._stack.enter_context(periodic(lambda: self._say(-1), self._seconds / 4, name="anabranch-snapshot"))

    def _begin(self, messages: Sequence[bytes]) -> None:
        """Begin on all shards; each is read by two at a time, so this waits for others that read one."""
        deadline = Deadline(self._calls.timeout)
        while True:
            requests = [
                self._calls.request(shard, "snapshot", message, answer_bytes=LONGEST)
                for shard, message in enumerate(messages)
            ]
            errors: list[Exception] = []
            for shard, answer in enumerate(self._calls.outcomes(requests, deadline)):
                if isinstance(answer, Exception):
                    errors.append(answer)
                else:
                    self._shards[shard] = unpack(answer.tensors[0].numpy().tobytes(), dict[str, Any])
            self._seconds = min((begun["seconds"] for begun in self._shards.values()), default=0.0)
            if not errors:
                return
            self._say(-2)  # or what others have begun would live on, and keep a third from its turn
            self._shards.clear()
            errors.sort(key=lambda error: isinstance(error, Overloaded))
            if not isinstance(errors[0], Overloaded) or deadline.remaining() <= _PAUSE:
                raise errors[0]
            time.sleep(_PAUSE)

    def _say(self, part: int) -> None:
        with suppress(Exception):  # the reader's own request meets it, too
            words = [self._request(shard, part) for shard in self._shards]
            self._calls.all(words, Deadline(self._seconds))  # later they would change nothing

    def _request(self, shard: int, part: int) -> Request:
        begun = self._shards[shard]
        message, most = SnapshotMessage(begun["number"], part), begun["part_bytes"] if part >= 0 else 0
        return self._calls.request(shard, "snapshot", pack(message), answer_bytes=most)

    def _part(self, shard: int, part: int) -> tuple[SnapshotPart | None, Sequence[Tensor]]:
        try:
            (answer,) = self._calls.all([self._request(shard, part)])
        except NotFound as error:
            raise Replaced(f"shard {shard}: {error}") from error
        return unpack(answer.payload, SnapshotPart) if answer.payload else None, answer.tensors

    def __enter__(self) -> SavedTables:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        self._say(-2)

    def groups(self) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """Yield parameters, constants of missed steps, and rows; each group is filled again for the next."""
        dense, known = count(), set[int]()
        for shard, described in self._shards.items():
            for number in range(described["groups"]):
                part, tensors = self._part(shard, number)
                assert part is not None
                name = part.name
                if name.startswith("dense-"):
                    name = f"dense-{next(dense)}"
                else:  # of a table's constants those of a shard that is furthest are all
                    table = described["tables"][int(name.removeprefix("history-"))]
                    index = self._index_of[table["spec"]["name"]]
                    if index in known or table["step"] < self.state["tables"][index]["step"]:
                        continue
                    known.add(index)
                    name = f"history-{index}"
                yield name, {str(k): tensor for k, tensor in enumerate(tensors)}
        for number, group in enumerate(files(self.pieces())):
            yield f"rows-{number}", group

    def pieces(self) -> Iterator[Piece]:
        """Yield the rows of all shards."""
        reading = {shard: described["groups"] for shard, described in self._shards.items()}
        while reading:
            for shard, number in list(reading.items()):
                part, tensors = self._part(shard, number)
                if part is None:
                    del reading[shard]
                    continue
                reading[shard] += 1
                described = [self._shards[shard]["tables"][k] for k in part.tables]
                indices = [self._index_of[table["spec"]["name"]] for table in described]
                # A row is as far behind the table's step as it is behind that of its shard.
                ahead = [self.state["tables"][index]["step"] for index in indices]
                behind = [step - table["step"] for step, table in zip(ahead, described, strict=True)]
                block = RowBlock(*tensors)
                shift = torch.tensor(behind, device="cpu").repeat_interleave(torch.tensor(part.counts, device="cpu"))
                yield Piece(indices, part.counts, replace(block, stamps=(block.stamps + shift).clamp(min=1)))


def restore(client: KnownTables, state: object, groups: Mapping[str, Group]) -> None:
    """Load the groups of ``SavedTables``, in place of everything on the shards."""
    check(state, groups)
    client.drop_some(None)
    try:
        restore_some(client, cast("Mapping[str, Any]", state), groups)
    except Exception as error:
        error.add_note("the servers now hold only part of the checkpoint: load it again, or load another one")
        raise


def check(state: object, groups: Mapping[str, Group]) -> None:
    """Read everything, a group at a time; raise ``CheckpointError`` for what could not be loaded whole.

    Of a table's rows the ids are collected, to see that each is there once.
    """
    if not isinstance(state, Mapping) or state.get("format") != _FORMAT or "tables" not in state:
        raise CheckpointError("this checkpoint holds no server tables or parameters, or those of another version")
    made = [(TableSpec.from_dict(one["spec"]), RowOptimizer.from_dict(one["rule"])) for one in state["tables"]]
    ids: list[list[Tensor]] = [[] for _ in made]
    try:
        for k, block in rows_of(groups, range(len(made))):
            block.check(*made[k], state["tables"][k]["step"])
            ids[k].append(block.ids.clone())
        for (spec, _), some in zip(made, ids, strict=True):
            every = torch.cat([*some, torch.empty(0, dtype=torch.int64, device="cpu")]).numpy()
            some.clear()
            every.sort()
            if (every[1:] == every[:-1]).any():
                raise SchemaError(f"table {spec.name}: an id is there twice")
            if spec.rows is not None and len(every) and not 0 <= every[0] <= every[-1] < spec.rows:
                raise SchemaError(f"table {spec.name}: ids from {every[0]} to {every[-1]}")
        for k, entry in enumerate(state["dense"]):
            parts = parts_of(groups, f"dense-{k}")
            DenseParameter(entry["name"], parts[0], RowOptimizer.from_dict(entry["rule"])).check_restored(parts)
    except (SchemaError, KeyError, IndexError) as error:
        raise CheckpointError(f"the checkpoint cannot be loaded, and nothing was changed: {error}") from error


def restore_some(
    client: KnownTables, state: Mapping[str, Any], groups: Mapping[str, Group], names: Collection[str] | None = None
) -> None:
    """As ``restore``, of ``names`` only if there are any; leaves others in place, and checks nothing."""
    made = {}
    for k, entry in enumerate(state["tables"]):
        spec, rule = TableSpec.from_dict(entry["spec"]), RowOptimizer.from_dict(entry["rule"])
        if names is None or spec.name in names:
            own = next((made for made, _ in reversed(client.made) if made.name == spec.name), spec)
            client.init_table(replace(spec, memory_map=own.memory_map), rule)
            client.calls.everywhere("restore", pack(RestoreMessage(spec.name, entry["step"])), [_history(groups, k)])
            made[k] = spec.name, entry["step"]
    for k, block in rows_of(groups, made):
        name, step = made[k]
        _restore_rows(client, name, block.tensors(), step)
    for k, entry in enumerate(state["dense"]):
        if names is None or entry["name"] in names:
            parts, rule = parts_of(groups, f"dense-{k}"), RowOptimizer.from_dict(entry["rule"])
            _restore_dense(client, entry["name"], parts, entry["step"], rule)


def _restore_dense(client: KnownTables, name: str, parts: list[Tensor], step: int, rule: RowOptimizer) -> None:
    client.init_dense(name, torch.zeros_like(parts[0]), rule)  # trained ones may have overflowed, first values may not
    client.calls.call(client.home(name), "restore", pack(RestoreMessage(name, step)), parts)


def whole(
    state: Mapping[str, Any], groups: Mapping[str, Group], names: Collection[str]
) -> dict[str, tuple[RowOptimizer, ParameterState]]:
    """Return fixed tables and parameters in memory, with the optimizers that they were saved with.

    Raises:
        CheckpointError: what was saved is not whole.
    """
    made: dict[int, Table] = {}
    wholes: dict[str, tuple[RowOptimizer, ParameterState]] = {}
    try:
        for k, entry in enumerate(state["tables"]):
            if entry["spec"]["name"] in names:
                spec, rule = TableSpec.from_dict(entry["spec"]), RowOptimizer.from_dict(entry["rule"])
                made[k] = Table(spec, rule)
                made[k].resume(entry["step"], _history(groups, k))  # which checks it
        for k, block in rows_of(groups, made) if made else ():  # else nothing of the rows need be read
            made[k].check_block(block)
            made[k].restore(block)
        for k, entry in enumerate(state["dense"]):
            if entry["name"] in names:
                value, *own = parts_of(groups, f"dense-{k}")
                wholes[entry["name"]] = RowOptimizer.from_dict(entry["rule"]), ParameterState(value, own, entry["step"])
    except (SchemaError, NotFound) as error:
        raise CheckpointError(f"the checkpoint cannot be loaded, and nothing was changed: {error}") from error
    for table in made.values():
        spec, rows = table.spec, ((ids, table.pull_with_state(ids)) for ids in chunks(table.used))
        filled = gathered(table.rule, spec.dtype, (table.used, spec.width), rows)
        wholes[spec.name] = table.rule, replace(filled, step=table.step)
    return wholes


def chunks(rows: int) -> Iterator[Tensor]:
    """Yield the ids of a fixed table."""
    for first in range(0, rows, CHUNK):
        yield torch.arange(first, min(first + CHUNK, rows), device="cpu")


def gathered(
    rule: RowOptimizer, dtype: torch.dtype, shape: tuple[int, ...], rows: Iterable[tuple[Tensor, Tensor]]
) -> ParameterState:
    """Return a fixed table of which these are ids, and rows with their state."""
    count, width, names = shape[0], math.prod(shape[1:]), len(rule.state_names)
    numbers, kind = rule.state_form(width, dtype)
    values = torch.empty(count, width, dtype=dtype, device="cpu")
    states = [torch.empty(count, numbers // names, dtype=kind, device="cpu") for _ in range(names)]
    for ids, some in rows:
        parts = torch.split(some, [width, *(one.shape[1] for one in states)], 1)
        for whole, part in zip((values, *states), parts, strict=True):
            whole[ids] = part.to(whole.dtype)
    shape_of_state = (count,) if rule.family is Family.ROW_WISE_ADAGRAD else shape
    return ParameterState(values.reshape(shape), [one.reshape(shape_of_state) for one in states])


def _history(groups: Mapping[str, Group], k: int) -> Tensor:
    return next(iter(parts_of(groups, f"history-{k}")), torch.empty(0, CONSTANTS, dtype=torch.float64, device="cpu"))


def for_optimizer(
    entry: Mapping[str, Any], groups: Mapping[str, Mapping[str, Tensor]], rule: RowOptimizer
) -> dict[str, dict[str, Tensor]]:
    """Return the groups of one table of ``collect`` for another optimizer, whose state begins anew."""
    width, dtype = entry["spec"]["width"], TableSpec.from_dict(entry["spec"]).dtype
    numbers, kind = rule.state_form(width, dtype)

    def anew(piece: Piece) -> Piece:
        rows = piece.rows
        states = torch.full((len(rows.ids), numbers), rule.initial_accumulator_value, dtype=kind, device="cpu")
        return piece._replace(rows=replace(rows, states=states, stamps=rows.stamps.clamp(max=1)))

    every = (piece for name, group in groups.items() if name.startswith("rows-") for piece in pieces(group))
    return {f"rows-{number}": dict(group) for number, group in enumerate(files(map(anew, every)))}


def write_rows(client: KnownTables, name: str, state: ParameterState | Tensor, rule: RowOptimizer) -> None:
    """Set all rows of a fixed table that has not been trained here yet, a few at a time.

    A push meanwhile ends it: a shard takes no rows that are older than its table.
    """
    entry = client.entry(name, rows=True)
    there = _described(client, name)
    if there["step"]:
        return
    if isinstance(state, Tensor):
        state = ParameterState(state)
    # Every row is up to date, so earlier steps will not be replayed.
    if state.step:
        steps = state.step if there["spec"]["every_row_moves"] else 0
        history = torch.zeros(steps, CONSTANTS, dtype=torch.float64, device="cpu")
        client.calls.everywhere("restore", pack(RestoreMessage(name, state.step)), [history])
    numbers, kind = rule.state_form(entry.width, entry.dtype)
    for ids in chunks(len(state.values)):
        some, count = slice(int(ids[0]), int(ids[-1]) + 1), len(ids)
        weights = state.values[some].detach().to("cpu", entry.dtype).reshape(count, entry.width).contiguous()
        states = torch.full((count, numbers), rule.initial_accumulator_value, dtype=kind, device="cpu")
        if state.states:
            states.copy_(torch.cat([one[some].reshape(count, -1) for one in state.states], 1))
        stamps, usage = torch.full_like(ids, state.step + 1), torch.empty(0, 2, dtype=torch.int64, device="cpu")
        try:
            _restore_rows(client, name, [ids, weights, states, stamps, usage], state.step)
        except SchemaError:
            if _described(client, name)["step"] > state.step:
                return
            raise


def _described(client: KnownTables, name: str) -> dict[str, Any]:
    """Return what the first shard says about a table."""
    return next(table for table in client.calls.describe()[0]["tables"] if table["spec"]["name"] == name)


def write_dense(client: KnownTables, name: str, state: ParameterState, rule: RowOptimizer) -> None:
    """Create the dense parameter ``name`` from its state; an existing one is overwritten."""
    if not state.step:
        client.init_dense(name, state.values, rule)
        return
    kind = rule.state_form(1, state.values.dtype)[1]
    states = [one.to(kind) for one in state.states]
    parts = [part.detach().cpu().contiguous() for part in (state.values, *states)]
    _restore_dense(client, name, parts, state.step, rule)


def _names_by_shard(client: KnownTables, names: Iterable[str] | None) -> list[list[str] | None]:
    """Return for each shard those of ``names`` that it may have, as a header has room for some; ``None``: all."""
    if names is None:
        return [None] * client.calls.shards
    names, dense = list(names), {name for name, entry in client.entries.items() if entry.placement is None}
    shards = range(client.calls.shards)
    return [[name for name in names if name not in dense or client.home(name) == shard] for shard in shards]


def _restore_rows(client: KnownTables, name: str, parts: Sequence[Tensor], step: int) -> None:
    """Set rows of a table at this step, their state and stamps, on the shards that hold them."""
    routed = Routed(client.layout([name]), parts[:1], client.calls.shards)
    routed.arrange(np.zeros(routed.flat.size, np.int64), 1)
    message = pack(RestoreMessage(name, step))
    requests = []
    for shard in range(client.calls.shards):
        where = torch.from_numpy(routed.order[routed.of[shard]])
        mine = [part[where] if len(part) == len(parts[0]) else part for part in parts]
        if where.numel():
            requests.append(client.calls.request(shard, "restore", message, mine))
    client.calls.all(requests)
