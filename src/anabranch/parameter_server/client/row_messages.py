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
from functools import cached_property
from itertools import groupby
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anabranch.errors import NotFound, ProtocolError
from anabranch.parameter_server.messages import Compression, PullPart, PullReply, PushPart, Share, join, split
from anabranch.tables.kernels import vocabulary
from anabranch.tables.kernels.caches import OLDEST, WITH_STATE
from anabranch.tables.table import side_by_side
from anabranch.tables.table_spec import Placement
from anabranch.tensors.dtypes import working_dtype

Array = NDArray[Any]
_STATED, _UNKNOWN, _KNOWN = range(3)  # kinds of requested ids, in the order in which they are sent
_ONE = 0x3F80  # the bits of 1 in bfloat16
_SHORT = 1 << 31  # the most rows of a table for ids of 32 bits
_COMPRESSIONS: tuple[Compression | None, ...] = (None, "bfloat16", "int8")
_NOWHERE = np.empty(0, np.int64)
_NO_POSITIONS = torch.empty(0, dtype=torch.int64, device="cpu")
_Run: TypeAlias = tuple[torch.dtype, int, int | None, int, int]
"""Tables of one kind side by side: dtype, width, numbers of a row with its state if rows come with it; and the index of
the first table, and that behind the last."""


@dataclass(frozen=True, slots=True)
class Pulled:
    """Rows of one table as received.

    Attributes:
        positions: the positions of these rows among the ids requested, ascending; int64. Empty of a request without
            known versions, which all rows answer.
        versions: the version of each row, to be given as ``known`` in the next request for it; int64, at least 0. Empty
            as the positions are.
        rows: ``[number of rows, width]``.
    """

    positions: Tensor
    versions: Tensor
    rows: Tensor


class VersionClock(NamedTuple):
    """Turns one shard's steps into versions that only grow: each generation counts from a base above the previous one.

    A version below the base belongs to a generation that has ended, and counts as unknown.

    >>> clock = VersionClock()
    >>> for generation, steps in [(7, 3), (7, 5), (9, 0), (9, 1)]:
    ...     clock = clock.after(generation, [steps])
    ...     print(clock.base + steps)
    3
    5
    6
    7
    """

    generation: int = 0
    base: int = 0
    last: int = -1

    def after(self, generation: int, steps: Sequence[int]) -> VersionClock:
        """Return the clock from whose base the versions of an answer count."""
        base = self.base if generation == self.generation else self.last + 1
        return VersionClock(generation, base, max(self.last, base + max(steps, default=0)))


class Layout:
    """Several tables, with their placement and the dtype and width of their rows, and the dense parameters beside them.

    Attributes:
        tables: their names, those of one kind side by side.
        dense: the share of each parameter in the message, by shard.
        limits, halves, keys: the tables' placements, as arrays: rows, -1 where any int64 is an id, and what
            ``Placement`` calls half and key.
        kinds: dtype, width, and numbers of a row with its state, of each table.
        row_bytes, wide_bytes, dense_bytes: of a row of each table, with its state, and of each shard's parameters.
        row_sizes: bytes of a row of each table on the way, not whole ones where rows share a scale; by compression.
        runs, wide_runs: the tables of each kind, where no row comes with its state, and where some do.
        ids_travel_as: int32, if no table has an id that needs more.
    """

    def __init__(
        self,
        tables: Mapping[str, tuple[Placement, torch.dtype, int, int]],
        dense: Sequence[Mapping[str, Share]] = ({},),
    ) -> None:
        tables = dict(sorted(tables.items(), key=lambda table: (str(table[1][1]), table[1][2])))
        placements = [placement for placement, *_ in tables.values()]
        self.tables, self.dense = list(tables), dense
        self.limits = np.array([-1 if one.rows is None else one.rows for one in placements], np.int64)
        self.halves = np.array([0 if one.rows is None else one.half for one in placements], np.int64)
        self.keys = np.array([one.key for one in placements], np.uint64)
        self.kinds = [(dtype, width, whole) for _, dtype, width, whole in tables.values()]
        self.row_bytes = np.array([dtype.itemsize * width for dtype, width, _ in self.kinds], np.int64)
        self.wide_bytes = np.array([working_dtype(dtype).itemsize * whole for dtype, _, whole in self.kinds], np.int64)
        self.dense_bytes = [sum(share.bytes(None) for share in own.values()) for own in dense]
        self.runs = _runs([(dtype, width, None) for dtype, width, _ in self.kinds])
        self.wide_runs = _runs(self.kinds)
        self.row_sizes: dict[Compression | None, Array] = {}
        for compression in _COMPRESSIONS:
            many = [Share(dtype, (16, width), "rows").bytes(compression) for dtype, width, _ in self.kinds]
            self.row_sizes[compression] = np.array(many) / 16
        short = all(0 <= rows <= _SHORT for rows in self.limits.tolist())
        self.ids_travel_as = torch.int32 if short else torch.int64


def _runs(kinds: Sequence[tuple[torch.dtype, int, int | None]]) -> list[_Run]:
    runs, first = list[_Run](), 0
    for kind, some in groupby(kinds):
        last = first + len(list(some))
        runs.append((*kind, first, last))
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
        bad = vocabulary.owners(self.flat, self.starts, layout.limits, layout.halves, layout.keys, shards, self.owners)
        if bad >= 0:
            t = int(np.searchsorted(self.starts, bad, "right")) - 1
            last, at = layout.limits[t] - 1, bad - self.starts[t]
            raise NotFound(f"table {layout.tables[t]} has ids 0 to {last}; ids[{at}] is {self.flat[bad]}")

    @cached_property
    def tables(self) -> Array:
        """The table of each id."""
        return np.repeat(np.arange(len(self.starts) - 1), np.diff(self.starts))

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
        vocabulary.arrange(self.owners, kinds, self.starts, self.counts, np.empty_like(self.counts), self.order)
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
        known: of each table, the known versions, as in ``ParameterClient.pull_many``; ``None``: all rows come, without
            their positions and versions.
        clocks: of the shards.
        with_state: rows known as ``WITH_STATE`` come with their state, or all without ``known``.
    """

    def __init__(
        self,
        layout: Layout,
        ids: Sequence[Tensor],
        known: Sequence[Tensor] | None,
        clocks: Sequence[VersionClock],
        compression: Compression | None,
        *,
        with_state: bool = False,
    ) -> None:
        routed = self._routed = Routed(layout, ids, len(clocks))
        self._compression, self._with_state = compression, with_state
        self._runs = layout.wide_runs if with_state else layout.runs
        self._since = np.zeros((len(clocks), len(ids)), np.int64)
        if known is None or not ids:
            self._ages = self._versions = _NOWHERE
            routed.arrange(np.full(routed.flat.size, _STATED) if with_state else _UNKNOWN, 3)
        else:
            self._versions = np.full(routed.flat.size, -1)
            kinds, ages = self._sort(side_by_side(known).numpy(), np.array([clock.base for clock in clocks]))
            routed.arrange(kinds, 3)
            self._ages = ages[routed.order[routed.kinds == _KNOWN]].astype(np.int16)
        # Of each run the rows of all ids, with room for the state where some come with it.
        self._rows: list[Tensor] = []
        for dtype, width, whole, first, last in self._runs:
            kind = dtype if whole is None else working_dtype(dtype)
            count = 0 if routed.as_is else int(routed.starts[last] - routed.starts[first])
            self._rows.append(torch.zeros(count, whole or width, dtype=kind, device="cpu"))
        self._parameters: dict[str, Tensor] = {}
        self._changed = np.zeros(len(ids), np.int64)  # of the known rows those that came

    def _sort(self, known: Array, bases: Array) -> tuple[Array, Array]:
        """Return the kind of each id, and how many steps before the last one of its table here each known one is."""
        routed = self._routed
        assert known.size == routed.flat.size
        part, steps = routed.owners * self._since.shape[1] + routed.tables, known - bases[routed.owners]
        is_known = (known >= 0) & (steps >= 0)
        newest = self._since.reshape(-1)
        np.maximum.at(newest, part[is_known], steps[is_known])
        ages = newest[part] - steps
        stated = (known == WITH_STATE) & self._with_state
        return np.where(stated, _STATED, np.where(is_known & (ages <= OLDEST), _KNOWN, _UNKNOWN)), ages

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
        rows = (counts[:, _UNKNOWN] + known) @ layout.row_bytes + with_state @ layout.wide_bytes
        return layout.dense_bytes[shard] + int(rows + known.sum())

    def take(self, shard: int, reply: PullReply, tensors: Sequence[Tensor], base: int) -> None:
        """Add a shard's answer, which has its parameters after its tables.

        Raises:
            ProtocolError, SchemaError: it does not fit the request.
        """
        routed = self._routed
        counts, dense = routed.counts[shard], routed.layout.dense[shard]
        stated, rest = counts[:, _STATED], counts[:, _UNKNOWN]
        concerned = np.flatnonzero(counts.sum(1))
        if len(reply.steps) != len(concerned) + len(dense):
            raise ProtocolError(f"shard {shard} answers {len(concerned) + len(dense)} parts with {reply.steps}")
        with_state = others = _NOWHERE  # the positions of the rows that come
        if not routed.as_is:
            where, kinds = routed.order[routed.of[shard]], routed.kinds[routed.of[shard]]
            comes, known = kinds == _UNKNOWN, np.flatnonzero(kinds == _KNOWN)
            if known.size:
                bits, *tensors = tensors or [_NO_POSITIONS]  # which are refused
                changed = known[_set_bits(bits, known.size, shard)]
                comes[changed] = True
                new = np.bincount(routed.tables[where[changed]], minlength=len(counts))
                self._changed += new
                rest = rest + new
            with_state, others = where[kinds == _STATED], where[comes]
        if self._versions.size:
            as_of = np.zeros(len(counts), np.int64)
            as_of[concerned] = reply.steps[: len(concerned)]
            for some in (with_state, others):
                self._versions[some] = base + as_of[routed.tables[some]]
        # Of each run of tables the rows with their state; then those without, of runs that the request concerns.
        shares, into = list[Share](), list[tuple[int, Array]]()
        edges = np.append(0, np.cumsum(stated))
        for r, (dtype, _, whole, first, last) in enumerate(self._runs):
            if (count := int(edges[last] - edges[first])) and whole is not None:
                shares.append(Share(working_dtype(dtype), (count, whole), "states"))
                into.append((r, with_state[edges[first] : edges[last]]))
        edges = np.append(0, np.cumsum(rest))
        for r, (dtype, width, _, first, last) in enumerate(self._runs):
            if counts[first:last].any():
                shares.append(Share(dtype, (int(edges[last] - edges[first]), width), "rows"))
                into.append((r, others[edges[first] : edges[last]]))
        numbers = split(tensors, [*shares, *dense.values()], self._compression)
        self._parameters.update(zip(dense, numbers[len(shares) :], strict=True))
        for (r, positions), part in zip(into, numbers, strict=False):
            if routed.as_is:
                self._rows[r] = part
                continue
            rows, at = self._rows[r], torch.from_numpy(positions - routed.starts[self._runs[r][3]])
            rows[:, : part.shape[1]].index_copy_(0, at, part.to(rows.dtype))

    def pulled(self) -> dict[str, Pulled]:
        """Return the received rows, by table and parameter."""
        routed, pulled = self._routed, dict[str, Pulled]()
        for name, value in self._parameters.items():
            pulled[name] = Pulled(_NO_POSITIONS, _NO_POSITIONS, value)
        for (_, _, _, first, last), rows in zip(self._runs, self._rows, strict=True):
            names, starts = routed.layout.tables[first:last], routed.starts[first : last + 1]
            if not self._versions.size:
                for name, part in zip(names, torch.split(rows, np.diff(starts).tolist()), strict=True):
                    pulled[name] = Pulled(_NO_POSITIONS, _NO_POSITIONS, part)
                continue
            came = np.flatnonzero(self._versions[starts[0] : starts[-1]] >= 0)
            if came.size < len(rows):
                rows = rows.index_select(0, torch.from_numpy(came))
            came += starts[0]
            tables = routed.tables[came] - first
            sizes = np.bincount(tables, minlength=last - first).tolist()
            positions = torch.split(torch.from_numpy(came - starts[tables]), sizes)
            versions = torch.split(torch.from_numpy(self._versions[came]), sizes)
            pulled |= zip(names, map(Pulled, positions, versions, torch.split(rows, sizes)), strict=True)
        return pulled

    def bytes(self) -> dict[str, int]:
        """For each table and parameter the number of bytes of ids, ages, marks and rows sent and received."""
        layout, counts = self._routed.layout, self._routed.counts.sum(0)
        known = counts[:, _KNOWN]
        rows = np.ceil((counts[:, _UNKNOWN] + self._changed) * layout.row_sizes[self._compression])
        sizes = counts.sum(1) * layout.ids_travel_as.itemsize + known * torch.int16.itemsize + -(-known // 8) + rows
        for k in np.flatnonzero(counts[:, _STATED]).tolist():
            dtype, _, whole = layout.kinds[k]
            share = Share(working_dtype(dtype), (int(counts[k, _STATED]), whole), "states")
            sizes[k] += share.bytes(self._compression)
        each = dict(zip(layout.tables, map(int, sizes), strict=True))
        for name, value in self._parameters.items():
            each[name] = value.nbytes
        return each


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
            some = [
                gradients[name][1].detach().reshape(-1, width).to("cpu", dtype) for name in layout.tables[first:last]
            ]
            self._blocks.append(side_by_side(some))
            assert len(self._blocks[-1]) == routed.starts[last] - routed.starts[first]

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
        layout, counts = self._routed.layout, self._routed.counts.sum(0)
        ids, sums = counts.sum(1), counts[:, 1]
        rows = np.ceil(ids * layout.row_sizes[self._compression])
        sizes = ids * layout.ids_travel_as.itemsize + sums * torch.bfloat16.itemsize + rows
        each = dict(zip(layout.tables, map(int, sizes), strict=True))
        for dense in layout.dense:
            for name, share in dense.items():
                each[name] = share.bytes(None)
        return each


def _of(block: Tensor, where: Array) -> Tensor:
    if where.size == len(block) and (where == np.arange(where.size)).all():
        return block
    return block.index_select(0, torch.from_numpy(where))


def _set_bits(bits: Tensor, count: int, shard: int) -> Array:
    """Return the positions of the ones among the first ``count`` bits.

    Raises:
        ProtocolError: they are not as many.
    """
    if bits.dtype != torch.uint8 or bits.shape != (-(-count // 8),):
        raise ProtocolError(f"shard {shard} returned {tuple(bits.shape)} {bits.dtype} for {count} bits")
    return np.flatnonzero(np.unpackbits(bits.numpy(), count=count))
