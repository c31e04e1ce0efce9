"""A worker's requests and gradients as messages to the shards, and the shards' answers as rows by table.

::

    ids of all tables ──Routed──> by shard, table, kind ──Pull.message──> shards
    rows by table, in the order of their ids <──Pull.pulled── Pull.take <──answers

Each operation handles ids and rows of all tables at once: a message has dozens of tables, so costs that do not depend
on the number of ids are paid once for all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anabranch.errors import NotFound, ProtocolError
from anabranch.parameter_server.messages import PullPart, PullReply, PushPart
from anabranch.tables.kernels import routing
from anabranch.tables.kernels.caches import OLDEST, WITH_STATE
from anabranch.tables.kernels.memory import working_dtype
from anabranch.tables.table import side_by_side
from anabranch.tables.table_spec import Placement
from anabranch.tensors.packing import Compression, Share, join, split

Array = NDArray[Any]
_STATED, _UNKNOWN, _KNOWN = range(3)  # kinds of requested ids, in the order in which they are sent
_ONE = 0x3F80  # the bits of 1 in bfloat16
_SHORT = 1 << 31  # the most rows of a table for ids of 32 bits
_NOWHERE = np.empty(0, np.int64)
_NO_POSITIONS = torch.empty(0, dtype=torch.int64, device="cpu")
_Run: TypeAlias = tuple[torch.dtype, int, int | None, int, int]
"""Tables of one kind side by side: dtype, width, numbers of a row with its state if rows come with it; and the index of
the first table, and that behind the last."""


@dataclass(frozen=True, slots=True)
class Pulled:
    """Rows of one table as received.

    Attributes:
        positions: the positions of these rows among the ids requested, ascending; int64.
        versions: the version of each row, to be given as ``known`` in the next request for it; int64, at least 0.
        rows: ``[len(positions), width]``.
    """

    positions: Tensor
    versions: Tensor
    rows: Tensor


@dataclass(slots=True)
class VersionClock:
    """Turns one shard's steps into versions that only grow: each generation counts from a base above the previous one.

    A version below the base belongs to a generation that has ended, and counts as unknown.

    >>> clock = VersionClock()
    >>> [clock.read(generation, [steps]) + steps for generation, steps in [(7, 3), (7, 5), (9, 0), (9, 1)]]
    [3, 5, 6, 7]
    """

    generation: int = 0
    base: int = 0
    last: int = -1

    def read(self, generation: int, steps: Sequence[int]) -> int:
        """Return the base that the versions of an answer count from."""
        if generation != self.generation:
            self.generation, self.base = generation, self.last + 1
        self.last = max(self.last, self.base + max(steps, default=0))
        return self.base


class Layout:
    """Several tables, with their placement and the dtype and width of their rows, and the dense parameters beside them.

    Attributes:
        tables: their names, those of one kind side by side.
        dense: the share of each parameter in the message, by shard.
        limits, halves, keys: the tables' placements, as arrays: rows, -1 where any int64 is an id, and what
            ``Placement`` calls half and key.
        kinds: dtype and width of each table's rows.
        row_bytes, dense_bytes: of a row of each table, and of each shard's parameters.
        runs: the tables of each kind.
        ids_travel_as: int32, if no table has an id that needs more.
    """

    def __init__(
        self, tables: Mapping[str, tuple[Placement, torch.dtype, int]], dense: Sequence[Mapping[str, Share]] = ({},)
    ) -> None:
        tables = dict(sorted(tables.items(), key=lambda table: (str(table[1][1]), table[1][2])))
        placements = [placement for placement, _, _ in tables.values()]
        self.tables, self.dense = list(tables), dense
        self.limits = np.array([-1 if one.rows is None else one.rows for one in placements], np.int64)
        self.halves = np.array([0 if one.rows is None else one.half for one in placements], np.int64)
        self.keys = np.array([one.key for one in placements], np.uint64)
        self.kinds = [(dtype, width) for _, dtype, width in tables.values()]
        self.row_bytes = np.array([dtype.itemsize * width for dtype, width in self.kinds], np.int64)
        self.dense_bytes = [sum(share.bytes(None) for share in own.values()) for own in dense]
        self.runs = _runs(self.kinds, [None] * len(self.kinds))
        short = all(0 <= rows <= _SHORT for rows in self.limits.tolist())
        self.ids_travel_as = torch.int32 if short else torch.int64


def _runs(kinds: Sequence[tuple[torch.dtype, int]], wide: Sequence[int | None]) -> list[_Run]:
    runs, first = list[_Run](), 0
    for (kind, whole), some in groupby(zip(kinds, wide, strict=True)):
        last = first + len(list(some))
        runs.append((*kind, whole, first, last))
        first = last
    return runs


class Routed:
    """Int64 ids of several tables, by the shards that hold them.

    Args:
        layout: of the tables.
        ids: of each table.
        shards: the number of shards.

    Attributes:
        flat: all ids, one table after the other.
        starts: where each table's ids begin, and their end.
        owners: the shard of each id.
        tables: the table of each.
        order, kinds: once arranged, the order of the ids, and the kind of each in that order.
        of: the part of the order that holds the ids of each shard.
        as_is: once arranged, there is one shard and one kind, so the order is that of the ids.

    Raises:
        NotFound: an id outside its table; says which, and where.
    """

    def __init__(self, layout: Layout, ids: Sequence[Tensor], shards: int) -> None:
        self.layout, self.shards = layout, shards
        sizes = np.zeros(len(ids) + 1, np.int64)
        flat = []
        for t, some in enumerate(ids):
            sizes[t + 1] = some.numel()
            flat.append(some if some.ndim == 1 and some.is_cpu else some.detach().cpu().reshape(-1))
        self.starts = np.cumsum(sizes)
        self.flat: Array = side_by_side(flat).numpy() if flat else np.empty(0, np.int64)
        self.owners = np.empty_like(self.flat)
        bad = routing.owners(self.flat, self.starts, layout.limits, layout.halves, layout.keys, shards, self.owners)
        if bad >= 0:
            t = int(np.searchsorted(self.starts, bad, "right")) - 1
            last, at = layout.limits[t] - 1, bad - self.starts[t]
            raise NotFound(f"table {layout.tables[t]} has ids 0 to {last}; ids[{at}] is {self.flat[bad]}")
        self.tables = np.repeat(np.arange(len(ids)), sizes[1:])

    def arrange(self, kinds: Array | int, count: int) -> None:
        """Order the ids by shard, table and kind, otherwise in their order.

        Args:
            kinds: the kind of each id, or of all of them, below ``count``.
            count: the number of kinds.
        """
        self.counts = np.zeros((self.shards, len(self.starts) - 1, count), np.int64)
        self.as_is = self.shards == 1 and isinstance(kinds, int)
        if self.as_is:
            self.counts[0, :, kinds] = np.diff(self.starts)
            return
        kinds = np.full(self.flat.size, kinds) if isinstance(kinds, int) else kinds
        assert kinds.shape == self.flat.shape
        self.order = np.empty_like(kinds)
        routing.arrange(self.owners, kinds, self.starts, self.counts, np.empty_like(self.counts), self.order)
        self.kinds = kinds[self.order]
        edges = np.append(0, np.cumsum(self.counts.sum((1, 2)))).tolist()
        self.of = list(map(slice, edges, edges[1:]))

    def ids_of(self, shard: int) -> Tensor:
        """Return the ids of one shard, once arranged, as they travel."""
        ids = self.flat if self.as_is else self.flat[self.order[self.of[shard]]]
        return torch.from_numpy(ids).to(self.layout.ids_travel_as)


class Pull:
    """One request to all shards.

    Args:
        layout: of the tables.
        ids: of each, the ids that are requested.
        known: of each table, the known versions, as in ``ParameterClient.pull_many``; ``None`` if none are.
        wide: of each table the number of values of a row with its state, or ``None`` if no row comes with it.
        clocks: generation and base of each shard's clock.
    """

    def __init__(
        self,
        layout: Layout,
        ids: Sequence[Tensor],
        known: Sequence[Tensor] | None,
        wide: Sequence[int | None] | None,
        clocks: Sequence[tuple[int, int]],
        compression: Compression | None,
    ) -> None:
        routed = self._routed = Routed(layout, ids, len(clocks))
        tables = len(ids)
        self._compression = compression
        self._wide = [None] * tables if wide is None else wide
        self._runs = layout.runs if wide is None else _runs(layout.kinds, wide)
        self._since = np.zeros((len(clocks), tables), np.int64)
        self._ages = np.empty(0, np.int16)
        if known is None or not tables:
            routed.arrange(_UNKNOWN, 3)
        else:
            self._sort(side_by_side(known).numpy(), np.array([base for _, base in clocks]))
        # Of each run the rows that came, their positions among all ids, and their versions.
        self._came: list[tuple[list[Tensor], list[Array], list[Array]]] = [([], [], []) for _ in self._runs]
        self._parameters: dict[str, Tensor] = {}
        # Rows that came with their state, without it, and of those that were known before.
        self._stated_rows, self._other_rows, self._changed_rows = np.zeros((3, tables), np.int64)

    def _sort(self, known: Array, bases: Array) -> None:
        """Find the kind of each id, and the step of each known one."""
        routed = self._routed
        assert known.size == routed.flat.size
        steps = known - bases[routed.owners]
        kinds = np.where(known == WITH_STATE, _STATED, np.where((known < 0) | (steps < 0), _UNKNOWN, _KNOWN))
        if None in self._wide:
            without = np.array([whole is None for whole in self._wide])
            kinds[(kinds == _STATED) & without[routed.tables]] = _UNKNOWN
        while True:
            routed.arrange(kinds, 3)
            mine = routed.order[routed.kinds == _KNOWN]
            if not mine.size:
                return
            sizes = routed.counts[:, :, _KNOWN].reshape(-1)
            firsts = np.cumsum(sizes) - sizes
            since = np.zeros_like(sizes)
            since[sizes > 0] = np.maximum.reduceat(steps[mine], firsts[sizes > 0])
            ages = np.repeat(since, sizes) - steps[mine]
            old = ages > OLDEST
            if not old.any():
                break
            kinds[mine[old]] = _UNKNOWN
        self._since, self._ages = since.reshape(self._since.shape), ages.astype(np.int16)

    def message(self, shard: int) -> tuple[list[PullPart], list[Tensor]]:
        """Return a shard's message: one part for each table that has ids there and each parameter; and its tensors."""
        routed, parts = self._routed, []
        rows = zip(routed.layout.tables, routed.counts[shard].tolist(), self._since[shard].tolist(), strict=True)
        for name, (with_state, unknown, known), since in rows:
            if with_state or unknown or known:
                parts.append(PullPart(name, with_state + unknown + known, with_state, known, since))
        parts += map(PullPart, routed.layout.dense[shard])
        tensors = [routed.ids_of(shard)]
        if self._ages.size:
            known = routed.counts[:, :, _KNOWN].sum(1)
            first = int(known[:shard].sum())
            if known[shard]:
                tensors.append(torch.from_numpy(self._ages[first : first + int(known[shard])]))
        return parts, tensors

    def most(self, shard: int) -> int:
        """Return the bytes of a shard's answer in which all known rows have changed, and nothing was rounded."""
        layout, counts = self._routed.layout, self._routed.counts[shard]
        with_state, known = counts[:, _STATED], counts[:, _KNOWN]
        most = layout.dense_bytes[shard] + int((counts[:, _UNKNOWN] + known) @ layout.row_bytes) + 4 * int(known.sum())
        if with_state.any():
            wide = zip(layout.kinds, self._wide, strict=True)
            most += int(with_state @ np.array([(whole or 0) * working_dtype(kind[0]).itemsize for kind, whole in wide]))
        return most

    def take(self, shard: int, reply: PullReply, tensors: Sequence[Tensor], base: int) -> None:
        """Add a shard's answer, which has its parameters after its tables.

        Raises:
            ProtocolError, SchemaError: it does not fit the request.
        """
        routed = self._routed
        counts, dense = routed.counts[shard], routed.layout.dense[shard]
        concerned = np.flatnonzero(counts.sum(1))
        parts = len(concerned) + len(dense)
        changed, known = np.array(reply.changed[: len(concerned)], np.int64), counts[concerned, _KNOWN]
        if len(reply.steps) != parts or len(reply.changed) != parts or (changed > known).any():
            raise ProtocolError(f"shard {shard} answers {parts} parts with {reply.steps} and {reply.changed}")
        if routed.as_is:
            with_state, others = _NOWHERE, np.arange(routed.flat.size)
        else:
            where, kinds = routed.order[routed.of[shard]], routed.kinds[routed.of[shard]]
            comes = kinds == _UNKNOWN
            if known.any():
                positions, *tensors = tensors or [_NO_POSITIONS]  # which are refused
                comes[np.flatnonzero(kinds == _KNOWN)[_checked(positions, changed, known, shard)]] = True
            with_state, others = where[kinds == _STATED], where[comes]
        as_of, new = np.zeros((2, len(counts)), np.int64)
        as_of[concerned] = reply.steps[: len(concerned)]
        new[concerned] = changed
        stated, rest = counts[:, _STATED], counts[:, _UNKNOWN] + new
        self._stated_rows += stated
        self._other_rows += rest
        self._changed_rows += new
        # Of each run of tables the rows with their state; then those without, of runs that the request concerns.
        shares, into = list[Share](), list[list[Tensor]]()
        for (dtype, _, whole, first, last), came in zip(self._runs, self._came, strict=True):
            if (count := int(stated[first:last].sum())) and whole is not None:
                shares.append(Share(working_dtype(dtype), (count, whole), "states"))
                into.append(came[0])
        for (dtype, width, _, first, last), came in zip(self._runs, self._came, strict=True):
            if counts[first:last].any():
                shares.append(Share(dtype, (int(rest[first:last].sum()), width), "rows"))
                into.append(came[0])
        numbers = split(tensors, [*shares, *dense.values()], self._compression)
        self._parameters.update(zip(dense, numbers[len(shares) :], strict=True))
        for pieces, part in zip(into, numbers, strict=False):
            if len(part):
                pieces.append(part)
        stated_at, others_at = np.append(0, np.cumsum(stated)), np.append(0, np.cumsum(rest))
        for (_, _, _, first, last), (_, wheres, versions) in zip(self._runs, self._came, strict=True):
            mine = others[others_at[first] : others_at[last]]
            if with_state.size:
                mine = np.concatenate([with_state[stated_at[first] : stated_at[last]], mine])
            wheres.append(mine)
            versions.append(base + as_of[routed.tables[mine]])

    def pulled(self) -> dict[str, Pulled]:
        """Return the received rows, by table and parameter."""
        routed, pulled = self._routed, dict[str, Pulled]()
        for name, value in self._parameters.items():
            pulled[name] = Pulled(_NO_POSITIONS, _NO_POSITIONS, value)
        for (dtype, width, whole, first, last), (pieces, wheres, each) in zip(self._runs, self._came, strict=True):
            rows = _together(pieces, width, whole, dtype)
            there, versions = (one[0] if len(one) == 1 else np.concatenate([_NOWHERE, *one]) for one in (wheres, each))
            if not routed.as_is:
                begin, end = routed.starts[[first, last]]
                index = np.full(end - begin, -1)
                index[there - begin] = np.arange(there.size)
                there = np.flatnonzero(index >= 0)
                order = index[there]
                if not (order == np.arange(order.size)).all():
                    rows = rows.index_select(0, torch.from_numpy(order))
                there += begin
                versions = versions[order]
            tables = routed.tables[there]
            sizes = np.bincount(tables - first, minlength=last - first).tolist()
            positions = torch.split(torch.from_numpy(there - routed.starts[tables]), sizes)
            each_version = torch.split(torch.from_numpy(versions), sizes)
            names = routed.layout.tables[first:last]
            pulled |= zip(names, map(Pulled, positions, each_version, torch.split(rows, sizes)), strict=True)
        return pulled

    def bytes(self) -> dict[str, int]:
        """For each table and parameter the number of bytes of ids, ages, positions and rows sent and received."""
        layout, counts = self._routed.layout, self._routed.counts.sum(0)
        sizes = {}
        rows = np.stack([self._stated_rows, self._other_rows, self._changed_rows, counts.sum(1), counts[:, _KNOWN]], 1)
        each = zip(layout.tables, layout.kinds, self._wide, rows.tolist(), strict=True)
        for name, (dtype, width), whole, (with_state, others, changed, ids, known) in each:
            size = ids * layout.ids_travel_as.itemsize + known * torch.int16.itemsize + changed * torch.int32.itemsize
            size += Share(dtype, (others, width), "rows").bytes(self._compression)
            if whole is not None:
                size += Share(working_dtype(dtype), (with_state, whole), "states").bytes(self._compression)
            sizes[name] = size
        for name, value in self._parameters.items():
            sizes[name] = value.nbytes
        return sizes


class Push:
    """The gradients of one step to all shards.

    Args:
        layout: of the tables and parameters.
        gradients: by name; ids and a gradient for each of a table, where a row may have any shape, else no ids.
        squares: of tables whose gradients are sums over several steps, one for each id.
        shards: the number of shards.
    """

    def __init__(
        self,
        layout: Layout,
        gradients: Mapping[str, tuple[Tensor, Tensor]],
        squares: Mapping[str, Tensor],
        shards: int,
        compression: Compression | None,
    ) -> None:
        self._gradients, self._compression = gradients, compression
        routed = self._routed = Routed(layout, [gradients[name][0] for name in layout.tables], shards)
        sizes = np.diff(routed.starts).tolist()
        kinds: Array | int = 0
        if squares:
            every = [
                squares[name].float() if name in squares else torch.ones(count, device="cpu")
                for name, count in zip(layout.tables, sizes, strict=True)
            ]
            self._squares = torch.cat(every).bfloat16()
            kinds = (self._squares.view(torch.int16).numpy() != _ONE).astype(np.int64)
        routed.arrange(kinds, 2)
        self._blocks: list[Tensor] = []  # the gradients of each run
        for dtype, width, _, first, last in layout.runs:
            some = []
            for t in range(first, last):
                grads = gradients[layout.tables[t]][1]
                assert grads.numel() == sizes[t] * width
                some.append(grads.detach().reshape(-1, width).to("cpu", dtype))
            self._blocks.append(side_by_side(some))

    def message(self, shard: int, rules: Mapping[str, int]) -> tuple[list[PushPart], list[Tensor]]:
        """Return a shard's message, and its tensors, with those of parameters after those of the tables.

        No table is left out, because a table's step is counted on every shard.
        """
        routed, layout, parts = self._routed, self._routed.layout, []
        counts = routed.counts[shard].tolist()
        for name, (single, sums) in zip(layout.tables, counts, strict=True):
            parts.append(PushPart(name, single + sums, rules.get(name, 0), sums))
        tensors, rows, shares = [routed.ids_of(shard)], [*self._blocks], list[Share]()
        at = np.append(0, np.cumsum(routed.counts[shard].sum(1)))
        if not routed.as_is:
            mine = routed.order[routed.of[shard]]
            sums = mine[routed.kinds[routed.of[shard]] == 1]
            if sums.size:
                tensors.append(self._squares[torch.from_numpy(sums)])
            rows = [
                _of(block, mine[at[first] : at[last]] - routed.starts[first])
                for block, (_, _, _, first, last) in zip(self._blocks, layout.runs, strict=True)
            ]
        for dtype, width, _, first, last in layout.runs:
            shares.append(Share(dtype, (int(at[last] - at[first]), width), "rows"))
        for name, share in layout.dense[shard].items():
            gradient = self._gradients[name][1]
            assert gradient.shape == share.shape
            parts.append(PushPart(name, 0, rules.get(name, 0)))
            rows.append(gradient.detach().to("cpu", share.dtype))
            shares.append(share)
        return parts, [*tensors, *join(rows, shares, self._compression)]

    def bytes(self) -> dict[str, int]:
        """For each table and parameter the number of bytes of ids, squares and gradients in the messages."""
        layout, sizes = self._routed.layout, {}
        counts = self._routed.counts.sum(0).tolist()
        for name, (dtype, width), (single, sums) in zip(layout.tables, layout.kinds, counts, strict=True):
            size = (single + sums) * layout.ids_travel_as.itemsize + sums * torch.bfloat16.itemsize
            sizes[name] = size + Share(dtype, (single + sums, width), "rows").bytes(self._compression)
        for dense in layout.dense:
            for name, share in dense.items():
                sizes[name] = share.bytes(None)
        return sizes


def _of(block: Tensor, where: Array) -> Tensor:
    if where.size == len(block) and (where == np.arange(where.size)).all():
        return block
    return block.index_select(0, torch.from_numpy(where))


def _checked(positions: Tensor, changed: Array, known: Array, shard: int) -> Array:
    """Return the positions of a shard's known ids that have changed, from those within each part.

    Raises:
        ProtocolError: the positions do not ascend within each part.
    """
    if positions.dtype != torch.int32 or positions.shape != (int(changed.sum()),):
        raise ProtocolError(
            f"shard {shard} returned {tuple(positions.shape)} {positions.dtype} for {changed.tolist()} positions"
        )
    within = positions.numpy().astype(np.int64)
    among_all: Array = within + np.repeat(np.cumsum(known) - known, changed)
    if (within < 0).any() or (within >= np.repeat(known, changed)).any() or (np.diff(among_all) <= 0).any():
        raise ProtocolError(f"shard {shard} returned positions {within.tolist()[:8]}... of {known.tolist()} known rows")
    return among_all


def _together(pieces: list[Tensor], width: int, whole: int | None, dtype: torch.dtype) -> Tensor:
    """All rows, one piece after the other; rows without state are padded with zeros where others have one."""
    wide, rows, alike = whole or width, 0, True
    for piece in pieces:
        rows, alike = rows + len(piece), alike and piece.shape[1] == wide
    if alike and pieces:
        return side_by_side(pieces)
    states = torch.zeros(rows, wide, dtype=working_dtype(dtype) if pieces else dtype, device="cpu")
    at = 0
    for piece in pieces:
        states[at : at + len(piece), : piece.shape[1]] = piece
        at += len(piece)
    return states
