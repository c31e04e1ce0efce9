"""A worker's requests and gradients as messages to the shards, and the shards' answers as rows by table.

::

    ids of all tables ──routing──> by shard, table, kind ──Pull.parts, Pull.tensors──> shards
    rows by table, in the order of their ids <──Pull.pulled── Pull.take <──answers

Each operation handles ids and rows of all tables at once.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anabranch.errors import NotFound, ProtocolError, SchemaError
from anabranch.parameter_server.client.routing import Placements, arrange, owners_of
from anabranch.parameter_server.messages import PullPart, PullReply, PushPart
from anabranch.tables.kernels.row_versions import OLDEST, WITH_STATE
from anabranch.tables.shard_placement import Placement
from anabranch.tables.table import side_by_side
from anabranch.tables.table_spec import state_dtype
from anabranch.tensors.packing import Compression, Share, join, split

__all__ = ["Layout", "Pull", "Pulled", "Push", "Routed", "VersionClock"]

Array = NDArray[Any]
_STATED, _UNKNOWN, _KNOWN = range(3)  # kinds of requested ids, in the order in which they are sent
_ONE = 0x3F80  # the bits of 1 in bfloat16
_SHORT = 1 << 31  # the most rows of a table for ids of 32 bits


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


@dataclass(frozen=True, slots=True)
class Layout:
    """Several tables, and the dense parameters beside them in a message.

    Attributes:
        tables, dense: their names.
        placements: of the tables.
        kinds: dtype and width of each table's rows.
        short: true if all ids fit into 32 bits.
    """

    tables: list[str]
    dense: list[str]
    placements: Placements
    kinds: list[tuple[torch.dtype, int]]
    short: bool

    @classmethod
    def of(cls, tables: Mapping[str, tuple[Placement, torch.dtype, int]], dense: Sequence[str]) -> Layout:
        """Return the layout of tables with their placement and the dtype and width of their rows."""
        placements = Placements.of([placement for placement, _, _ in tables.values()])
        short = all(0 <= rows <= _SHORT for rows in placements.limits.tolist())
        return cls(
            list(tables), list(dense), placements, [(dtype, width) for _, dtype, width in tables.values()], short
        )

    @property
    def ids_travel_as(self) -> torch.dtype:
        """The ids as int32, if no table has an id that needs more; else unchanged."""
        return torch.int32 if self.short else torch.int64

    def alike(self, wide: Sequence[int | None]) -> list[tuple[torch.dtype, int, int | None, list[int]]]:
        """Dtype, width, values per row with state if ``wide`` has any, and the indices of these tables."""
        found: dict[tuple[torch.dtype, int, int | None], list[int]] = {}
        for number, ((dtype, width), whole) in enumerate(zip(self.kinds, wide, strict=True)):
            found.setdefault((dtype, width, whole), []).append(number)
        return [(*key, numbers) for key, numbers in found.items()]


class Routed:
    """Ids of several tables, by the shards that hold them.

    Args:
        layout: of the tables.
        ids: of each table, int64 of any shape.
        shards: the number of shards.

    Raises:
        SchemaError: ids that are not int64.
        NotFound: an id outside its table; says which, and where.
    """

    def __init__(self, layout: Layout, ids: Sequence[Tensor], shards: int) -> None:
        self.layout, self.shards = layout, shards
        for name, some in zip(layout.tables, ids, strict=True):
            if some.dtype != torch.int64:
                raise SchemaError(f"table {name}: ids must be int64, got {some.dtype}; convert with ids.long()")
        self.flat = _flat(ids)
        self.starts = np.zeros(len(ids) + 1, np.int64)
        np.cumsum([some.numel() for some in ids], out=self.starts[1:])
        self.owners, bad = owners_of(self.flat, self.starts, layout.placements, shards)
        if bad >= 0:
            t = int(np.searchsorted(self.starts, bad, "right")) - 1
            last, at = layout.placements.limits[t] - 1, bad - self.starts[t]
            raise NotFound(f"table {layout.tables[t]} has ids 0 to {last}; ids[{at}] is {self.flat[bad]}")
        self.tables = np.repeat(np.arange(len(ids)), np.diff(self.starts))

    def arrange(self, kinds: Array, count: int) -> None:
        """Orders the ids by shard, table and kind."""
        self.order, self.counts = arrange(self.owners, kinds, self.starts, self.shards, count)
        self.kinds = kinds[self.order]
        self._edges = np.append(0, np.cumsum(self.counts.sum((1, 2)))).tolist()

    def of(self, shard: int) -> slice:
        """Return the slice of the order that holds a shard's ids."""
        return slice(self._edges[shard], self._edges[shard + 1])

    def ids_of(self, shard: int) -> Tensor:
        """Return a shard's ids in the dtype in which they are sent."""
        return torch.from_numpy(self.flat[self.order[self.of(shard)]]).to(self.layout.ids_travel_as)


class Pull:
    """One request to all shards.

    Args:
        routed: the ids that are requested.
        known: of each table, the versions held, as in ``ParameterClient.pull_many``; ``None`` if none are.
        wide: of each table the number of values of a row with its state, or ``None`` if no row comes with it.
        clocks: generation and base of each shard's clock.
    """

    def __init__(
        self,
        routed: Routed,
        known: Sequence[Tensor] | None,
        wide: Sequence[int | None],
        clocks: Sequence[tuple[int, int]],
        compression: Compression | None,
    ) -> None:
        self._routed, self._wide, self._compression = routed, wide, compression
        self._alike = routed.layout.alike(wide)
        self._since = np.zeros((routed.shards, len(wide)), np.int64)
        self._ages = np.empty(0, np.int16)
        if known is None:
            routed.arrange(np.full(routed.flat.size, _UNKNOWN), 3)
        else:
            self._sort(_flat(known), np.array([base for _, base in clocks]))
        tables = len(wide)
        self._came: list[list[tuple[Tensor, Tensor, Array, Array]]] = [[] for _ in self._alike]
        self._parameters: dict[str, Tensor] = {}
        self._stated_rows, self._other_rows, self._changed_rows = (np.zeros(tables, np.int64) for _ in range(3))

    def _sort(self, known: Array, bases: Array) -> None:
        """Find the kind of each id, and the step of each known one."""
        routed = self._routed
        if known.size != routed.flat.size:
            raise SchemaError(f"{routed.flat.size} ids have {known.size} known versions")
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

    def parts(self, shard: int) -> list[PullPart]:
        """Return the parts of a shard's message: one for each table that has ids there."""
        counts, since = self._routed.counts[shard].tolist(), self._since[shard].tolist()
        return [
            PullPart(name, with_state + unknown + known, with_state, known, step)
            for name, (with_state, unknown, known), step in zip(self._routed.layout.tables, counts, since, strict=True)
            if with_state or unknown or known
        ]

    def tensors(self, shard: int) -> list[Tensor]:
        """Return the request's tensors."""
        known = self._routed.counts[:, :, _KNOWN].sum(1)
        first = int(known[:shard].sum())
        ages = torch.from_numpy(self._ages[first : first + int(known[shard])])
        return [self._routed.ids_of(shard), *([ages] if len(ages) else [])]

    def take(
        self, shard: int, reply: PullReply, tensors: Sequence[Tensor], base: int, dense: Mapping[str, Share]
    ) -> None:
        """Add a shard's answer, which has the parameters ``dense`` after its tables.

        Raises:
            ProtocolError, SchemaError: it does not fit the request.
        """
        routed = self._routed
        counts, some = routed.counts[shard], routed.of(shard)
        concerned = np.flatnonzero(counts.sum(1))
        parts = len(concerned) + len(dense)
        changed, known = np.array(reply.changed[: len(concerned)], np.int64), counts[concerned, _KNOWN]
        if len(reply.steps) != parts or len(reply.changed) != parts or (changed > known).any():
            raise ProtocolError(f"shard {shard} answers {parts} parts with {reply.steps} and {reply.changed}")
        where, kinds = routed.order[some], routed.kinds[some]
        comes = kinds == _UNKNOWN
        if known.any():
            places, *tensors = tensors
            comes[np.flatnonzero(kinds == _KNOWN)[_checked(places, changed, known, shard)]] = True
        as_of = np.zeros(len(counts), np.int64)
        as_of[concerned] = reply.steps[: len(concerned)]
        with_state, others = where[kinds == _STATED], where[comes]
        new = np.zeros(len(counts), np.int64)
        new[concerned] = changed
        self._stated_rows += counts[:, _STATED]
        self._other_rows += counts[:, _UNKNOWN] + new
        self._changed_rows += new
        blocks = self._blocks(counts[:, _STATED], counts[:, _UNKNOWN] + new, concerned, tensors, dense)
        for group, (whole, rows) in enumerate(blocks):
            mine = np.concatenate([self._of_group(with_state, group), self._of_group(others, group)])
            self._came[group].append((whole, rows, mine, base + as_of[routed.tables[mine]]))

    def _of_group(self, where: Array, group: int) -> Array:
        if len(self._alike) == 1:
            return where
        numbers = self._alike[group][-1]
        return where[np.isin(self._routed.tables[where], numbers)]

    def _blocks(
        self, with_state: Array, others: Array, concerned: Array, tensors: Sequence[Tensor], dense: Mapping[str, Share]
    ) -> list[tuple[Tensor, Tensor]]:
        """For each group of tables of one kind the rows with state, and those without."""
        sizes, alike = (with_state.tolist(), others.tolist()), self._alike
        shares: list[Share] = []
        if len(alike) == 1:  # the shares of all tables form one
            dtype, width, whole, _ = alike[0]
            if whole is not None and sum(sizes[0]):
                shares.append(Share(state_dtype(dtype), (sum(sizes[0]), whole), "states"))
            if len(concerned):
                shares.append(Share(dtype, (sum(sizes[1]), width), "rows"))
            found = split(tensors, [*shares, *dense.values()], self._compression)
            self._parameters |= zip(dense, found[len(shares) :], strict=True)
            rows = found[len(shares) - 1] if len(concerned) else torch.empty(0, width, dtype=dtype, device="cpu")
            return [(found[0] if len(shares) == 2 else torch.empty(0, whole or width, dtype=dtype, device="cpu"), rows)]
        kinds, asked = self._routed.layout.kinds, concerned.tolist()
        own = [t for t in asked if sizes[0][t]]
        for t in own:
            dtype, whole = kinds[t][0], self._wide[t]
            assert whole is not None
            shares.append(Share(state_dtype(dtype), (sizes[0][t], whole), "states"))
        shares += [Share(kinds[t][0], (sizes[1][t], kinds[t][1]), "rows") for t in asked]
        found = split(tensors, [*shares, *dense.values()], self._compression)
        states = dict(zip(own, found, strict=False))
        rows_of = dict(zip(asked, found[len(own) :], strict=False))
        self._parameters |= zip(dense, found[len(shares) :], strict=True)
        blocks = []
        for dtype, width, whole, numbers in alike:
            parts = [states[t] for t in numbers if t in states], [rows_of[t] for t in numbers if t in rows_of]
            none = (
                torch.empty(0, whole or width, dtype=dtype, device="cpu"),
                torch.empty(0, width, dtype=dtype, device="cpu"),
            )
            blocks.append((torch.cat([none[0], *parts[0]]), torch.cat([none[1], *parts[1]])))
        return blocks

    def pulled(self) -> dict[str, Pulled]:
        """Return the received rows, by table and parameter."""
        routed, none = self._routed, torch.empty(0, dtype=torch.int64, device="cpu")
        found = {name: Pulled(none, none, value) for name, value in self._parameters.items()}
        for (dtype, width, whole, numbers), came in zip(self._alike, self._came, strict=True):
            where = np.concatenate([np.empty(0, np.int64), *(mine for _, _, mine, _ in came)])
            versions = np.concatenate([np.empty(0, np.int64), *(some for *_, some in came)])
            places = np.full(routed.flat.size, -1)
            places[where] = np.arange(where.size)
            there = np.flatnonzero(places >= 0)
            order = places[there]
            rows = _together([pair[:2] for pair in came], width, whole, dtype)
            if not (order == np.arange(order.size)).all():
                rows = rows.index_select(0, torch.from_numpy(order))
            tables = routed.tables[there]
            sizes = np.bincount(tables, minlength=len(routed.layout.tables))[numbers].tolist()
            positions = torch.from_numpy(there - routed.starts[tables])
            parts = (torch.split(one, sizes) for one in (positions, torch.from_numpy(versions[order]), rows))
            found |= zip((routed.layout.tables[t] for t in numbers), map(Pulled, *parts), strict=True)
        return found

    def bytes(self) -> list[int]:
        """For each table the number of bytes of ids, ages, places and rows sent and received."""
        size, counts = self._routed.layout.ids_travel_as.itemsize, self._routed.counts.sum(0)
        found = []
        rows = zip(self._stated_rows.tolist(), self._other_rows.tolist(), self._changed_rows.tolist(), strict=True)
        for (dtype, width), whole, (with_state, others, changed), ids, known in zip(
            self._routed.layout.kinds, self._wide, rows, counts.sum(1).tolist(), counts[:, _KNOWN].tolist(), strict=True
        ):
            numbers = Share(dtype, (others, width), "rows").bytes(self._compression)
            if whole is not None:
                numbers += Share(state_dtype(dtype), (with_state, whole), "states").bytes(self._compression)
            found.append(ids * size + known * torch.int16.itemsize + changed * torch.int32.itemsize + numbers)
        return found


class Push:
    """The gradients of one step to all shards.

    Args:
        routed: their ids.
        grads: of each table: the shape of the ids, or their number, and then that of a row.
        squares: of each table whose gradients are sums over several steps, one for each id, else ``None``.
    """

    def __init__(
        self,
        routed: Routed,
        grads: Sequence[Tensor],
        squares: Sequence[Tensor | None],
        compression: Compression | None,
    ) -> None:
        self._routed, self._compression = routed, compression
        layout, sizes = routed.layout, np.diff(routed.starts).tolist()
        self._squares = torch.empty(0, dtype=torch.bfloat16, device="cpu")
        kinds = np.zeros(routed.flat.size, np.int64)
        if any(own is not None for own in squares):
            for name, own, count in zip(layout.tables, squares, sizes, strict=True):
                if own is not None and own.shape != (count,):
                    raise SchemaError(f"table {name}: {count} ids have squares {tuple(own.shape)}")
            every = [
                torch.ones(n, device="cpu") if own is None else own.float()
                for own, n in zip(squares, sizes, strict=True)
            ]
            self._squares = side_by_side(every).bfloat16()
            kinds = (self._squares.view(torch.int16).numpy() != _ONE).astype(np.int64)
        routed.arrange(kinds, 2)
        self._groups: list[tuple[Tensor, list[int]]] = []
        for dtype, width, _, numbers in layout.alike([None] * len(sizes)):
            some = []
            for t in numbers:
                if not _of_rows(grads[t], sizes[t], width):
                    raise SchemaError(
                        f"table {layout.tables[t]}: {sizes[t]} ids need {width} numbers each, got gradients "
                        f"{tuple(grads[t].shape)}; give ({sizes[t]}, {width})"
                    )
                some.append(grads[t].detach().reshape(-1, width).to("cpu", dtype))
            self._groups.append((side_by_side(some), numbers))

    def parts(self, shard: int, rules: Sequence[int]) -> list[PushPart]:
        """Return the part of each table in the message; none is left out, because a table's step is counted on every
        shard.
        """
        counts = self._routed.counts[shard].tolist()
        return [
            PushPart(name, single + sums, rule, sums)
            for name, (single, sums), rule in zip(self._routed.layout.tables, counts, rules, strict=True)
        ]

    def tensors(self, shard: int, dense: Sequence[tuple[Tensor, Share]]) -> list[Tensor]:
        """Return the message's tensors, with those of parameters after those of the tables."""
        routed = self._routed
        some = routed.of(shard)
        found = [routed.ids_of(shard)]
        sums = routed.order[some][routed.kinds[some] == 1]
        if sums.size:
            found.append(self._squares[torch.from_numpy(sums)])
        rows, shares = list[Tensor](), list[Share]()
        if len(self._groups) == 1:
            rows.append(self._rows(self._groups[0][0], routed.order[some]))
            shares.append(Share(rows[0].dtype, tuple(rows[0].shape), "rows"))
        else:
            counts, of = routed.counts[shard].sum(1), dict[int, Tensor]()
            mine = routed.order[some]
            for grads, numbers in self._groups:
                places = np.full(len(counts), -1)
                firsts = np.append(0, np.cumsum(np.diff(routed.starts)[numbers]))[:-1]
                places[numbers] = firsts - routed.starts[:-1][numbers]  # from the flat ids to the group's own
                tables = routed.tables[mine]
                own = mine[np.isin(tables, numbers)]
                gathered = self._rows(grads, own + places[routed.tables[own]])
                of |= zip(numbers, torch.split(gathered, counts[numbers].tolist()), strict=True)
            for t in range(len(counts)):
                rows.append(of[t])
                shares.append(Share(of[t].dtype, tuple(of[t].shape), "rows"))
        rows += [value for value, _ in dense]
        shares += [share for _, share in dense]
        return [*found, *join(rows, shares, self._compression)]

    @staticmethod
    def _rows(grads: Tensor, where: Array) -> Tensor:
        if where.size == len(grads) and (where == np.arange(where.size)).all():
            return grads
        return grads.index_select(0, torch.from_numpy(where))

    def bytes(self) -> list[int]:
        """For each table the number of bytes of ids, squares and gradients in the messages."""
        size, counts = self._routed.layout.ids_travel_as.itemsize, self._routed.counts.sum(0).tolist()
        return [
            (single + sums) * size
            + sums * torch.bfloat16.itemsize
            + Share(dtype, (single + sums, width), "rows").bytes(self._compression)
            for (dtype, width), (single, sums) in zip(self._routed.layout.kinds, counts, strict=True)
        ]


def _of_rows(grads: Tensor, count: int, width: int) -> bool:
    """Return True if the first dimensions are of ``count`` ids, and the others of rows of ``width`` numbers."""
    return grads.numel() == count * width and count in accumulate(grads.shape, operator.mul, initial=1)


def _flat(tensors: Sequence[Tensor]) -> Array:
    """All numbers of int64 tensors, one tensor after the other."""
    if not tensors:
        return np.empty(0, np.int64)
    flat = [one if one.ndim == 1 and one.device.type == "cpu" else one.detach().cpu().reshape(-1) for one in tensors]
    return side_by_side(flat).contiguous().numpy()


def _checked(places: Tensor, changed: Array, known: Array, shard: int) -> Array:
    """Return the positions of a shard's known ids that have changed, from the ``places`` it gives for each part.

    Raises:
        ProtocolError: the places are not ascending positions within each part.
    """
    if places.dtype != torch.int32 or places.shape != (int(changed.sum()),):
        raise ProtocolError(
            f"shard {shard} returned {tuple(places.shape)} {places.dtype} for {changed.tolist()} places"
        )
    own = places.numpy().astype(np.int64)
    found: Array = own + np.repeat(np.cumsum(known) - known, changed)
    if (own < 0).any() or (own >= np.repeat(known, changed)).any() or (np.diff(found) <= 0).any():
        raise ProtocolError(f"shard {shard} returned places {own.tolist()[:8]}... of {known.tolist()} known rows")
    return found


def _together(parts: Sequence[tuple[Tensor, Tensor]], width: int, whole: int | None, dtype: torch.dtype) -> Tensor:
    """All rows, one part after the other; rows without state are padded with zeros where others have one."""
    if whole is None or whole == width:
        some = [one for pair in parts for one in pair if len(one)]
        return side_by_side(some) if some else torch.empty(0, whole or width, dtype=dtype, device="cpu")
    found = torch.empty(sum(len(one) for pair in parts for one in pair), whole, dtype=state_dtype(dtype), device="cpu")
    at = 0
    for with_state, others in parts:
        found[at : at + len(with_state)] = with_state
        at += len(with_state)
        found[at : at + len(others), :width] = others
        found[at : at + len(others), width:] = 0
        at += len(others)
    return found
