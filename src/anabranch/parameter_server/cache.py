"""The worker's cache: rows that are used again and again stay here, a bounded number of steps behind the servers.

::

    read(ids, step):  have it, checked at most pull_bound steps ago ──────────────────> here
                      have it, older ──> ask by version ──> unchanged: here again; changed: the new row + own gradients
                      have it not ────> pull ──> put in, if a row can leave for it; one that leaves is pushed if dirty
    write(ids, grads, step):  the row here moves at once (own writes are read); its gradient waits, and is pushed once
                              the first of it is push_bound steps old

Own gradients can only move a row here whose optimizer's state is here, and most rows are used once and leave: a row
comes without it. Its first gradient is pushed with the step; used again, it comes with its state, which from then on is
moved here and comes no more.

An update of another worker waits there for at most push_bound steps, and is missed here for at most pull_bound: a read
misses none older than their sum. Steps are the clock, not lookups, so a hot id ages no faster than others.

What waits is added up, and an optimizer that scales its steps by squared gradients (Adagrad, Adam) would take the sum
of 50 alike gradients for one of 2,500 times the square. So each row's sum goes with its *squares*: the sum of its
gradients' squares, in squares of their sum.

``RowCache`` is the cache of one table in its simple form; ``cache_group.py`` does the same to many tables at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from anabranch.parameter_server.id_index import IdIndex, make_index
from anabranch.parameter_server.kernels import kernels
from anabranch.parameter_server.messages import WITH_STATE

__all__ = ["Cache", "CacheStatistics", "Due", "Move", "Peer", "RowCache", "SETTLED"]

Policy = Literal["LRU", "LFU", "LFUOpt"]
SETTLED = 10  # steps of use after which LFUOpt keeps a row for good
_LONG_AGO = -(1 << 40)
_NEVER = 1 << 40
Move = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""What own gradients do to rows here, until the servers' are known: ``(rows, gradients, squares) -> rows``."""
Due = tuple[Tensor, Tensor, Tensor | None]
"""What goes to the servers: ids, a gradient of each, and its squares (``None``: they are those of one step)."""


@dataclass(frozen=True, slots=True)
class Cache:
    """How each table is cached on the workers.

    >>> Cache(policy="LFU", capacity=10_000, pull_bound=5).pull_bound
    5
    >>> Cache(capacity=0)
    Traceback (most recent call last):
    ValueError: capacity=0 must be a number of rows, at least 1

    Attributes:
        policy: who leaves: ``"LRU"`` the row unused longest, ``"LFU"`` the one used in the fewest steps; under
            ``"LFUOpt"`` a row used in 10 steps stays for good, and once all have, no other comes in.
        capacity: rows, of each table.
        pull_bound: steps that a row may be behind the servers.
        push_bound: steps that own gradients may wait before they are pushed.

    Raises:
        ValueError: an unknown policy, a capacity below 1, a bound below 0.

    Source: the cache of HET (Miao et al., "HET: Scaling out Huge Embedding Model Training via Cache-enabled Distributed
    Framework", 2022), whose clocks tick with an id's lookups; these tick with steps.
    """

    policy: Policy = "LRU"
    capacity: int = 100_000
    pull_bound: int = 0
    push_bound: int = 0

    def __post_init__(self) -> None:
        if self.policy not in ("LRU", "LFU", "LFUOpt"):
            raise ValueError(f"policy={self.policy!r} is none of 'LRU', 'LFU' and 'LFUOpt'")
        if isinstance(self.capacity, bool) or not isinstance(self.capacity, int) or self.capacity < 1:
            raise ValueError(f"capacity={self.capacity!r} must be a number of rows, at least 1")
        for name in ("pull_bound", "push_bound"):
            bound = getattr(self, name)
            if isinstance(bound, bool) or not isinstance(bound, int) or bound < 0:
                raise ValueError(f"{name}={bound!r} must be a number of steps, at least 0")


class Peer(Protocol):
    """The far side of one table."""

    def pull(self, ids: Tensor, known: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of the rows whose version is not the ``known`` one: positions among ``ids``, versions, rows.

        Those known as ``WITH_STATE`` come with their optimizer's state, if the cache needs it.
        """

    def push(self, ids: Tensor, grads: Tensor, squares: Tensor | None) -> None:
        """Gradients, at once."""


@dataclass(frozen=True, slots=True)
class CacheStatistics:
    """What a cache has done: rows.

    Attributes:
        hits: read without a row coming over: checked lately, or asked about and unchanged.
        misses: read and pulled.
        refreshed: of the misses, rows that were here and too old, and had changed.
        evictions: rows that left for others.
        pushed: gradients of rows that went to the servers.
    """

    hits: int
    misses: int
    refreshed: int
    evictions: int
    pushed: int


class RowCache:
    """The cached rows of one table.

    Args:
        cache: policy, capacity and bounds.
        width, dtype: of a row.
        held: numbers a row as the peer sends them: with the optimizer's state, if ``move`` needs it; else ``width``.
        peer: where rows come from and gradients go.
        move: what own gradients do to rows here; required with a ``push_bound``. Without it a row that was pushed is
            asked about when it is next read, so that own writes are read.
    """

    def __init__(
        self,
        cache: Cache,
        width: int,
        dtype: torch.dtype,
        peer: Peer,
        *,
        move: Move | None = None,
        held: int | None = None,
        kind: Literal["compiled", "plain"] | None = None,
    ) -> None:
        if cache.push_bound and move is None:
            raise ValueError(f"push_bound={cache.push_bound} needs a move, or own writes could not be read meanwhile")
        self.cache = cache
        self._peer, self._move = peer, move
        self._kind: Literal["compiled", "plain"] = kind or ("plain" if kernels() is kernels("plain") else "compiled")
        self._width, self._dtype, self._held = width, dtype, held or width
        self._stateless = self._held == self._width
        self._hits = self._misses = self._refreshed = self._evictions = self._pushed = 0
        self._begin()

    def _begin(self) -> None:
        capacity = self.cache.capacity
        self._index: IdIndex = make_index(
            self._kind,
            capacity,
            by_frequency=self.cache.policy != "LRU",
            settled=SETTLED if self.cache.policy == "LFUOpt" else 1 << 62,
        )
        self._rows = torch.zeros(capacity, self._held, dtype=self._dtype)
        self._versions = torch.full((capacity,), -1)
        self._checked = torch.full((capacity,), _LONG_AGO)
        self._waiting = torch.zeros(capacity if self.cache.push_bound else 0, self._width, dtype=self._dtype)
        self._energy = torch.zeros(len(self._waiting))  # the sum of squares of the gradients that wait
        self._due_at = torch.full((capacity,), _NEVER)  # when the gradients that wait are pushed, if any do
        self._stated = torch.full((capacity,), self._stateless)  # whether a row has its state, if any, here
        self._sent: list[tuple[int, Tensor]] = []  # ids pushed from rows that are not here, by step; of the last steps

    # --- reading ----------------------------------------------------------------------------------------------------

    def read(self, ids: Tensor, step: int, *, training: bool = True) -> Tensor:
        """The rows of distinct ``ids`` at ``step``; evaluation asks about all, puts none in and counts as no use."""
        slots = self._use(ids, step) if training else self._find(ids)
        here = slots >= 0
        at = slots.clamp(min=0)
        known = torch.where(here, self._versions.index_select(0, at), -1)
        held = known >= 0
        bound = self.cache.pull_bound if training else 0
        ask = torch.nonzero(~held | (step - self._checked.index_select(0, at) > bound))[:, 0]
        out = self._rows.index_select(0, at)  # what is not fresh is written over
        if len(ask):
            self._fetch(ids, slots, known, ask, out, step)
        self._hits += len(ids) - len(ask)
        return out if self._held == self._width else out[:, : self._width].contiguous()

    def stale(self, ids: Tensor, step: int, *, training: bool = True) -> tuple[Tensor, Tensor]:
        """Those of distinct ``ids`` that ``read`` would ask the peer about, and the versions known of them here."""
        slots = self._find(ids)
        at = slots.clamp(min=0)
        known = torch.where(slots >= 0, self._versions.index_select(0, at), -1)
        bound = self.cache.pull_bound if training else 0
        ask = torch.nonzero((known < 0) | (step - self._checked.index_select(0, at) > bound))[:, 0]
        ask, asked = self._asked(ask, slots, known)
        return ids[ask], asked

    def _asked(self, ask: Tensor, slots: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
        """Of the rows to ask about, in order, those that come with their state first; and the versions to ask with.

        A row that is used again and has no state here comes with it. Rows with their state are answered first, so in
        this order no positions need be said of rows that all come.
        """
        known = known[ask]
        if self._stateless:
            return ask, known
        stated = self._stated.index_select(0, slots[ask].clamp(min=0))
        asked = torch.where((known >= 0) & ~stated, WITH_STATE, known)
        order = torch.argsort((asked != WITH_STATE).to(torch.int8), stable=True)
        return ask[order], asked[order]

    def missing(self, ids: Tensor) -> Tensor:
        """Those of distinct ``ids`` that are not here."""
        slots = self._find(ids)
        return ids[(slots < 0) | (self._versions[slots.clamp(min=0)] < 0)]

    def put(self, ids: Tensor, versions: Tensor, rows: Tensor, step: int) -> None:
        """Takes in rows as they were at ``step``, ahead of their use in the next; what is here stays as it is."""
        slots = self._use(ids, step + 1)
        new = (slots >= 0) & (self._versions[slots.clamp(min=0)] < 0)
        into, which = slots[new], torch.nonzero(new)[:, 0]
        self._rows.index_copy_(0, into, rows.index_select(0, which).to(self._dtype))
        self._versions.index_copy_(0, into, versions[new])
        self._stated.index_fill_(0, into, self._stateless)
        # What was pushed since these rows were asked for may not be in them, and own writes are read.
        pushed = torch.cat([some for at, some in self._sent if at >= step] or [ids[:0]])
        since = torch.where(torch.isin(ids[new], pushed), _LONG_AGO, step)
        self._checked.index_copy_(0, into, since)
        self._misses += int(new.sum())

    def _use(self, ids: Tensor, step: int) -> Tensor:
        before = self._index.entries()[0].copy()
        found, reused = self._index.use(ids.numpy(), np.ones(len(ids), np.bool_), step)
        if reused.size:
            leaving = torch.from_numpy(reused)
            self._evictions += len(leaving)
            dirty = leaving[self._due_at[leaving] < _NEVER]
            self._push_slots(dirty, torch.from_numpy(before)[dirty], step)
            self._versions[leaving] = -1
        return torch.from_numpy(found)

    def _find(self, ids: Tensor) -> Tensor:
        return torch.from_numpy(self._index.find(ids.numpy()))

    def _fetch(self, ids: Tensor, slots: Tensor, known: Tensor, ask: Tensor, out: Tensor, step: int) -> None:
        ask, asked = self._asked(ask, slots, known)
        positions, versions, rows = self._peer.pull(ids[ask], asked)
        came = ask[positions]
        unchanged = torch.ones(len(ids), dtype=torch.bool)
        unchanged[came] = False
        still = ask[unchanged[ask]]
        self._checked.index_fill_(0, slots[still], step)
        cached = slots[came] >= 0
        into = slots[came][cached]
        fresh_rows = rows.to(self._dtype)
        if not self._stateless and len(into):
            fresh_rows = self._with_states(fresh_rows, cached, into, asked[positions][cached])
        if self.cache.push_bound and len(into):
            fresh_rows = self._with_own_writes(fresh_rows, cached, into)
        out.index_copy_(0, came, fresh_rows)
        here = torch.nonzero(cached)[:, 0]
        self._rows.index_copy_(0, into, fresh_rows.index_select(0, here))
        self._versions.index_copy_(0, into, versions[here])
        self._checked.index_fill_(0, into, step)
        self._hits += len(still)
        self._misses += len(came)
        self._refreshed += int((known[came] >= 0).sum())

    def _with_states(self, rows: Tensor, cached: Tensor, into: Tensor, asked: Tensor) -> Tensor:
        """Rows as they came, with the states that are here already."""
        here = (asked >= 0) & self._stated[into]
        self._stated[into] = here | (asked == WITH_STATE)
        rows = rows.clone()
        rows[torch.nonzero(cached)[:, 0][here], self._width :] = self._rows[into[here], self._width :]
        return rows

    def _with_own_writes(self, rows: Tensor, cached: Tensor, into: Tensor) -> Tensor:
        """Rows as they came, with the gradients that still wait here applied again."""
        assert self._move is not None
        dirty = self._due_at[into] < _NEVER
        if not dirty.any():
            return rows
        rows = rows.clone()
        where = torch.nonzero(cached)[:, 0][dirty]
        _, grads, squares = self._waiting_of(into[dirty])
        rows[where] = self._move(rows[where], grads, squares)
        return rows

    # --- writing ----------------------------------------------------------------------------------------------------

    def write(self, ids: Tensor, grads: Tensor, step: int) -> Due:
        """Takes the gradients of distinct ``ids`` at ``step``; returns those that are due at the peer.

        What is returned counts as pushed.
        """
        slots = self._find(ids)
        held = slots >= 0
        held &= self._versions.index_select(0, slots.clamp(min=0)) >= 0
        mine = slots[held]
        self._sent = [(at, some) for at, some in self._sent if at >= step - 1]
        self._sent.append((step, ids[~held]))
        if not self.cache.push_bound:
            self._checked.index_fill_(0, mine, _LONG_AGO)
            self._pushed += len(ids)
            return ids, grads, None
        stated = self._stated.index_select(0, mine)
        self._checked.index_fill_(0, mine[~stated], _LONG_AGO)
        held[torch.nonzero(held)[:, 0][~stated]] = False
        mine = mine[stated]
        assert self._move is not None
        own = grads.index_select(0, torch.nonzero(held)[:, 0])
        self._rows.index_copy_(0, mine, self._move(self._rows.index_select(0, mine), own, None))
        clean = self._due_at.index_select(0, mine) == _NEVER
        self._due_at.index_fill_(0, mine[clean], step + self.cache.push_bound)
        self._waiting.index_add_(0, mine, own.to(self._dtype))
        self._energy.index_add_(0, mine, _energies(own))
        due_slots = torch.nonzero(self._due_at <= step)[:, 0]
        due_ids, due_grads, due_squares = self._take(due_slots)
        rest = torch.nonzero(~held)[:, 0]
        self._pushed += len(rest)
        squares = torch.cat([torch.ones(len(rest)), due_squares])
        return torch.cat([ids[rest], due_ids]), torch.cat([grads.index_select(0, rest), due_grads]), squares

    def nothing(self) -> tuple[Tensor, Tensor]:
        """No ids and no gradients: what is written in a step that has none."""
        return torch.empty(0, dtype=torch.int64), torch.empty(0, self._width, dtype=self._dtype)

    def waiting(self) -> Due:
        """All that waits here, which counts as pushed: for saving and closing."""
        return self._take(torch.nonzero(self._due_at < _NEVER)[:, 0])

    def _take(self, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if not self.cache.push_bound:
            return *self.nothing(), torch.empty(0)
        taken = self._waiting_of(slots)
        self._waiting.index_fill_(0, slots, 0)
        self._energy.index_fill_(0, slots, 0)
        self._due_at.index_fill_(0, slots, _NEVER)
        self._pushed += len(slots)
        return taken

    def _waiting_of(self, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        grads = self._waiting.index_select(0, slots)
        squares = (self._energy.index_select(0, slots) / _energies(grads)).nan_to_num(
            nan=1.0, posinf=1.0
        )  # no sum: no square of it
        return torch.from_numpy(self._index.entries()[0])[slots], grads, squares

    def _push_slots(self, slots: Tensor, ids: Tensor, step: int) -> None:
        if len(slots):
            _, grads, squares = self._take(slots)
            self._sent.append((step, ids))
            self._peer.push(ids, grads, squares)

    def drop(self) -> None:
        """Forgets all rows; gradients that wait are lost, so take ``waiting`` first if they count."""
        self._begin()

    def statistics(self) -> CacheStatistics:
        """Counts since it was made."""
        return CacheStatistics(self._hits, self._misses, self._refreshed, self._evictions, self._pushed)


def _energies(grads: Tensor) -> Tensor:
    """Of each row the sum of its squares."""
    return grads.float().square().sum(1)
