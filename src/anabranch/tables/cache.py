"""The worker's cache: frequently used rows, at most a bounded number of steps behind the servers.

::

    read(ids, step):  have it, checked at most pull_bound steps ago ──────────────────> here
                      have it, older ──> ask by version ──> unchanged: here again; changed: the new row + own gradients
                      have it not ────> pull ──> put in, if a row can leave for it; one that leaves is pushed if dirty
    write(ids, grads, step):  the row here moves at once (own writes are read); its gradient waits, and is pushed once
                              the first of it is push_bound steps old

Own gradients can update a cached row only if its optimizer's state is cached too, but most rows are used once and then
evicted: a row is first sent without it. Its first gradient is pushed with the step; used again, it is sent with its
state, and from then on is updated here and not sent again.

Rows of the next step are requested during this one, as of the pushes before this step::

    start_prefetch(ids, step):  not here, soon too old, or used again without its state ──> ask; gradients of the latter
                                wait
    finish_prefetch(...):       as it was at ``step``, with the own gradients that wait; what was pushed since is left
                                as it is, and asked about when it is read, for own writes are read

To avoid requesting a row twice, or by a read that must wait for the answer, bounds of ``SPARE`` steps and more keep one
step in reserve: a row is requested a step before it is too old, and gradients are pushed a step before they have waited
too long, unless they must be added to an answer in flight.

An update of another worker waits there for at most push_bound steps, and is missed here for at most pull_bound: a read
misses none older than their sum. Age is counted in steps, not lookups, so a hot id ages no faster than others.

Waiting gradients are added up, and an optimizer that scales its steps by squared gradients (Adagrad, Adam) would square
the sum of 50 equal gradients: 2,500 times one square instead of 50. So each row's sum is sent with its *squares*: the
sum of its gradients' squares, divided by the square of their sum.

``RowCache`` is the cache of one table in its simple form; ``cache_group.py`` does the same for many tables at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from anabranch.choices import choice
from anabranch.tables.id_index import IdIndex, make_index
from anabranch.tables.kernels.row_versions import WITH_STATE

Policy = Literal["LRU", "LFU", "LFUOpt"]
SPARE = 8  # steps from which on a bound has one to spare
SETTLED = 10  # steps of use after which LFUOpt keeps a row for good
_LONG_AGO = -(1 << 40)
_NEVER = 1 << 40
Move = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""A local estimate of a gradient's effect on cached rows, until the servers' rows are known:
``(rows, gradients, squares) -> rows``."""
Due = tuple[Tensor, Tensor, Tensor | None]
"""Gradients for the servers: ids, a gradient of each, and its squares (``None`` for gradients of one step)."""


@dataclass(frozen=True, slots=True)
class Cache:
    """Configuration of the workers' cache of each table.

    >>> Cache(policy="LFU", capacity=10_000, pull_bound=5).pull_bound
    5
    >>> Cache(capacity=0)
    Traceback (most recent call last):
    ValueError: capacity=0 must be a number of rows, at least 1

    Attributes:
        policy: the row to evict: ``"LRU"`` the one unused longest, ``"LFU"`` the one used in the fewest steps; under
            ``"LFUOpt"`` a row used in 10 steps stays for good, and once all have, no further row is cached.
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
        object.__setattr__(self, "policy", choice("policy", self.policy, ("LRU", "LFU", "LFUOpt")))
        if isinstance(self.capacity, bool) or not isinstance(self.capacity, int) or self.capacity < 1:
            raise ValueError(f"capacity={self.capacity!r} must be a number of rows, at least 1")
        for name in ("pull_bound", "push_bound"):
            bound = getattr(self, name)
            if isinstance(bound, bool) or not isinstance(bound, int) or bound < 0:
                raise ValueError(f"{name}={bound!r} must be a number of steps, at least 0")


class RowSource(Protocol):
    """The servers' side of one table."""

    def pull(self, ids: Tensor, known: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Positions among ``ids``, versions and rows, of the rows whose version differs from the ``known`` one.

        Those known as ``WITH_STATE`` are sent with their optimizer's state, if the cache needs it.
        """

    def push(self, ids: Tensor, grads: Tensor, squares: Tensor | None) -> None:
        """Pushes gradients at once."""


@dataclass(frozen=True, slots=True)
class CacheStatistics:
    """Counters of a cache, in rows.

    Attributes:
        hits: read without a transfer: checked recently, or checked now and unchanged.
        misses: read and pulled.
        refreshed: misses on rows that were cached but too old, and had changed.
        evictions: rows evicted to make room.
        pushed: gradients of rows sent to the servers.
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
        held: numbers per row as the peer sends them: with the optimizer's state, if ``move`` needs it; else ``width``.
        peer: the source of rows and the receiver of gradients.
        move: the effect of own gradients on cached rows; required with a ``push_bound``. Without it a pushed row is
            checked when it is next read, so that own writes are read.
    """

    def __init__(
        self,
        cache: Cache,
        width: int,
        dtype: torch.dtype,
        peer: RowSource,
        *,
        move: Move | None = None,
        held: int | None = None,
        kind: Literal["compiled", "plain"] | None = None,
    ) -> None:
        if cache.push_bound and move is None:
            raise ValueError(
                f"push_bound={cache.push_bound} needs a move, so that a worker can read its own writes before they "
                "are pushed"
            )
        self.cache = cache
        self._peer, self._move = peer, move
        self._kind: Literal["compiled", "plain"] = kind or "compiled"
        self._width, self._dtype, self.held = width, dtype, held or width
        self._spare = spare_of(cache)
        self._stateless = self.held == self._width
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
        self._rows = torch.zeros(capacity, self.held, dtype=self._dtype, device="cpu")
        self._versions = torch.full((capacity,), -1, device="cpu")
        self._checked = torch.full((capacity,), _LONG_AGO, device="cpu")
        self._waiting = torch.zeros(
            capacity if self.cache.push_bound else 0, self._width, dtype=self._dtype, device="cpu"
        )
        self._energy = torch.zeros(len(self._waiting), device="cpu")  # the sum of squares of the gradients that wait
        self._due_at = torch.full(
            (capacity,), _NEVER, device="cpu"
        )  # when delayed gradients are pushed, if there are any
        self._stated = torch.full(
            (capacity,), self._stateless, device="cpu"
        )  # whether a row has its state here, if it has any
        self._coming = torch.zeros(capacity, dtype=torch.bool, device="cpu")  # whether it was asked about ahead
        self._sent: list[tuple[int, Tensor]] = []  # ids that were pushed, by step; of the last steps
        self._clock = 0  # of the last step that was asked about ahead, or written

    # --- reading ----------------------------------------------------------------------------------------------------

    def read(self, ids: Tensor, step: int, *, training: bool = True) -> Tensor:
        """Return the rows of distinct ``ids`` at ``step``; evaluation checks all, caches none and does not count as a
        use.
        """
        slots = self._use(ids, step) if training else self._find(ids)
        here = slots >= 0
        at = slots.clamp(min=0)
        known = torch.where(here, self._versions.index_select(0, at), -1)
        held = known >= 0
        bound = self.cache.pull_bound if training else -1  # -1: all, since others may have pushed meanwhile
        ask = torch.nonzero(~held | (step - self._checked.index_select(0, at) > bound))[:, 0]
        out = self._rows.index_select(0, at)  # rows that are not fresh are overwritten
        if len(ask):
            self._fetch(ids, slots, known, ask, out, step)
        self._hits += len(ids) - len(ask)
        return out if self.held == self._width else out[:, : self._width].contiguous()

    def stale(self, ids: Tensor, step: int, *, training: bool = True) -> tuple[Tensor, Tensor]:
        """Return the distinct ``ids`` that ``read`` would request from the peer, and their cached versions."""
        slots = self._find(ids)
        at = slots.clamp(min=0)
        known = torch.where(slots >= 0, self._versions.index_select(0, at), -1)
        bound = self.cache.pull_bound if training else -1
        ask = torch.nonzero((known < 0) | (step - self._checked.index_select(0, at) > bound))[:, 0]
        ask, asked = self._asked(ask, slots, known)
        return ids[ask], asked

    def _asked(self, ask: Tensor, slots: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
        """Of the rows to ask about, in order, those to come with their state first; and the versions to ask with.

        A reused row without its state here is sent with it. Rows with their state are answered first, so in this order
        no positions need be sent if all rows are sent.
        """
        known = known[ask]
        if self._stateless:
            return ask, known
        with_state = self._stated.index_select(0, slots[ask].clamp(min=0))
        asked = torch.where((known >= 0) & ~with_state, WITH_STATE, known)
        order = torch.argsort((asked != WITH_STATE).to(torch.int8), stable=True)
        return ask[order], asked[order]

    def start_prefetch(self, ids: Tensor, step: int, *, training: bool = True) -> tuple[Tensor, Tensor]:
        """Return the distinct ``ids`` of the next step to request during this one, and the versions to send.

        Rows that this step will push are left out: the answer would lack the push. Evaluation requests missing rows.
        """
        slots = self._find(ids)
        at = slots.clamp(min=0)
        known = torch.where(slots >= 0, self._versions.index_select(0, at), -1)
        ask = known < 0
        bound = self.cache.pull_bound if training else 0
        if bound:
            last_use = torch.from_numpy(np.append(self._index.entries()[2], 0))
            used = last_use[at.clamp(max=len(last_use) - 1)] == step
            stale = step + 1 - self._checked[at] > bound - self._spare
            if not self.cache.push_bound:
                again = stale & ~used
            else:
                again = torch.where(self._stated[at], stale & (self._due_at[at] > step - self._spare), stale | used)
            ask |= again
        chosen, asked = self._asked(torch.nonzero(ask)[:, 0], slots, known)
        self._coming[slots[chosen[asked != -1]]] = True
        self._clock = step
        return ids[chosen], asked

    def finish_prefetch(
        self,
        wanted: Tensor,
        ids: Tensor,
        asked: Tensor,
        positions: Tensor,
        versions: Tensor,
        rows: Tensor,
        step: int,
    ) -> None:
        """Store the rows requested by ``start_prefetch`` at ``step``, at ``positions`` of ``ids``; others stay.

        ``wanted`` are all ids of the next step: none of them is evicted to make room.
        """
        self._use(wanted, step + 1)
        slots = self._find(ids)
        at = slots.clamp(min=0)
        held = torch.where(slots >= 0, self._versions[at], -1)
        pushed = torch.isin(ids, torch.cat([some for when, some in self._sent if when >= step] or [ids[:0]]))
        came = torch.full((len(ids),), -1, device="cpu")
        came[positions] = torch.arange(len(positions), device="cpu")
        self._coming[slots[slots >= 0]] = False

        new = torch.nonzero((asked == -1) & (came >= 0) & (slots >= 0) & (held < 0))[:, 0]
        into = slots[new]
        self._rows[into] = rows[came[new]].to(self._dtype)
        self._versions[into] = versions[came[new]]
        self._stated[into] = self._stateless
        self._checked[into] = torch.where(pushed[new], _LONG_AGO, step)

        again = (asked != -1) & (held >= 0) & ~pushed
        self._checked[slots[again & (came < 0) & (held == asked)]] = step
        changed = torch.nonzero(again & (came >= 0))[:, 0]
        into = slots[changed]
        everyone = torch.ones(len(changed), dtype=torch.bool, device="cpu")
        fresh = rows[came[changed]].to(self._dtype)
        if not self._stateless and len(into):
            fresh = self._with_states(fresh, everyone, into, asked[changed])
        if self.cache.push_bound and len(into):
            fresh = self._with_own_writes(fresh, everyone, into)
        self._rows[into] = fresh
        self._versions[into] = versions[came[changed]]
        self._checked[into] = step
        self._misses += len(new) + len(changed)
        self._refreshed += len(changed)

    def _use(self, ids: Tensor, step: int) -> Tensor:
        before = self._index.entries()[0].copy()
        found, reused = self._index.use(ids.numpy(), np.ones(len(ids), np.bool_), step)
        if reused.size:
            leaving = torch.from_numpy(reused)
            self._evictions += len(leaving)
            dirty = leaving[self._due_at[leaving] < _NEVER]
            self._push_slots(dirty, torch.from_numpy(before)[dirty], step)
            self._versions[leaving] = -1
            self._coming[leaving] = False
        return torch.from_numpy(found)

    def _find(self, ids: Tensor) -> Tensor:
        return torch.from_numpy(self._index.find(ids.numpy()))

    def _fetch(self, ids: Tensor, slots: Tensor, known: Tensor, ask: Tensor, out: Tensor, step: int) -> None:
        ask, asked = self._asked(ask, slots, known)
        positions, versions, rows = self._peer.pull(ids[ask], asked)
        came = ask[positions]
        unchanged = torch.ones(len(ids), dtype=torch.bool, device="cpu")
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
        """Return the received rows, with the states that are cached already."""
        here = (asked >= 0) & self._stated[into]
        self._stated[into] = here | (asked == WITH_STATE)
        rows = rows.clone()
        rows[torch.nonzero(cached)[:, 0][here], self._width :] = self._rows[into[here], self._width :]
        return rows

    def _with_own_writes(self, rows: Tensor, cached: Tensor, into: Tensor) -> Tensor:
        """Return the received rows, with the gradients that still wait here applied."""
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
        """Add the gradients of distinct ``ids`` at ``step``; return those that are due at the peer.

        The returned gradients count as pushed.
        """
        slots = self._find(ids)
        held = slots >= 0
        held &= self._versions.index_select(0, slots.clamp(min=0)) >= 0
        mine = slots[held]
        self._clock = step
        self._sent = [(at, some) for at, some in self._sent if at >= step - 1]
        if not self.cache.push_bound:
            self._checked.index_fill_(0, mine, _LONG_AGO)
            self._pushed += len(ids)
            self._sent.append((step, ids))
            return ids, grads, None
        with_state = self._stated.index_select(0, mine)
        self._checked.index_fill_(0, mine[~with_state], _LONG_AGO)
        waits = with_state | self._coming.index_select(0, mine)
        held[torch.nonzero(held)[:, 0][~waits]] = False
        mine, with_state = mine[waits], with_state[waits]
        assert self._move is not None
        own = grads.index_select(0, torch.nonzero(held)[:, 0])
        moved = self._move(self._rows.index_select(0, mine[with_state]), own[with_state], None)
        self._rows.index_copy_(0, mine[with_state], moved)
        clean = self._due_at.index_select(0, mine) == _NEVER
        self._due_at.index_fill_(0, mine[clean], step + self.cache.push_bound - self._spare)
        self._waiting.index_add_(0, mine, own.to(self._dtype))
        self._energy.index_add_(0, mine, _energies(own))
        due_slots = torch.nonzero(self._due_at <= step - self._spare * self._coming.long())[:, 0]
        due_ids, due_grads, due_squares = self._take(due_slots)
        rest = torch.nonzero(~held)[:, 0]
        self._pushed += len(rest)
        squares = torch.cat([torch.ones(len(rest), device="cpu"), due_squares])
        pushed = torch.cat([ids[rest], due_ids])
        self._sent.append((step, pushed))
        return pushed, torch.cat([grads.index_select(0, rest), due_grads]), squares

    def nothing(self) -> tuple[Tensor, Tensor]:
        """No ids and no gradients, for a step that writes none."""
        return torch.empty(0, dtype=torch.int64, device="cpu"), torch.empty(
            0, self._width, dtype=self._dtype, device="cpu"
        )

    def waiting(self) -> Due:
        """All gradients that wait here, which then count as pushed: for saving and closing."""
        taken = self._take(torch.nonzero(self._due_at < _NEVER)[:, 0])
        self._sent.append((self._clock, taken[0]))
        return taken

    def _take(self, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if not self.cache.push_bound:
            return *self.nothing(), torch.empty(0, device="cpu")
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
        )  # not a sum: no squares
        return torch.from_numpy(self._index.entries()[0])[slots], grads, squares

    def _push_slots(self, slots: Tensor, ids: Tensor, step: int) -> None:
        if len(slots):
            _, grads, squares = self._take(slots)
            self._sent.append((step, ids))
            self._peer.push(ids, grads, squares)

    def drop(self) -> None:
        """Forget all rows and waiting gradients; take ``waiting`` first if they must not be lost."""
        self._begin()

    def check_again(self, step: int) -> None:
        """Allow another check of rows that were checked in ``step``."""
        self._checked[self._checked == step] = step - 1

    def statistics(self) -> CacheStatistics:
        """Counters since it was made."""
        return CacheStatistics(self._hits, self._misses, self._refreshed, self._evictions, self._pushed)


def spare_of(cache: Cache) -> int:
    """Return the number of steps kept in reserve of the bounds."""
    return int(cache.pull_bound >= SPARE and (cache.push_bound >= SPARE or not cache.push_bound))


def _energies(grads: Tensor) -> Tensor:
    """Each row's sum of squares."""
    return grads.float().square().sum(1)
