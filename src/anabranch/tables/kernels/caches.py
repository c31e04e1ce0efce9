"""Kernels that work on the caches of several tables in one call: what ``CacheGroup`` runs, compiled.

``held`` has all contents of the caches, an array of ``[tables, ...]`` of each kind. ``members`` names the tables of a
call, and ``starts`` splits its ids by table: those of ``members[k]`` are ``starts[k]:starts[k + 1]``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from anabranch.tables.kernels.id_index import _look_ahead, _place, use
from anabranch.tables.kernels.numbers import U, inline, kernel, prefetch
from anabranch.tables.kernels.row_versions import WITH_STATE
from anabranch.tables.kernels.rules import move_row

LONG_AGO = -(1 << 40)
NEVER = 1 << 40
HITS, MISSES, REFRESHED, EVICTIONS, PUSHED = range(5)
_AHEAD = 12  # ids


class CacheArrays(NamedTuple):
    """The index of each table, then the contents of its slots."""

    keys: Any
    slots: Any
    ids_of: Any
    uses: Any
    last_use: Any
    heap: Any
    sizes: Any  # rows that are filled, entries of the heap
    versions: Any  # -1 for a row that has not come yet
    checked: Any  # the step
    due_at: Any  # the step at which a gradient that waits is pushed, ``NEVER`` if there is none
    with_state: Any  # whether a row's optimizer state is here, if it has any
    coming: Any  # whether it was requested ahead
    rows: Any
    waiting: Any
    energy: Any  # the sum of squares of the gradients that wait
    pushed: Any  # since the received rows were requested
    counters: Any


class Due(NamedTuple):
    """Room for gradients that go to the servers; ``starts`` as of the ids."""

    ids: Any
    grads: Any
    squares: Any
    starts: Any


@inline
def _take(held: Any, t: int, slot: int, width: int, own: int, due: Any, at: int) -> None:
    """Move the gradient that waits in a slot to ``due``."""
    total = np.float32(0)
    for j in range(U(width)):
        value = held.waiting[t, U(slot), j]
        due.grads[U(at), j] = value
        total += np.float32(value) * np.float32(value)
        held.waiting[t, U(slot), j] = 0
    squares = held.energy[t, slot] / total
    due.squares[at] = squares if np.isfinite(squares) else np.float32(1)
    due.ids[at] = own
    held.energy[t, slot] = 0
    held.due_at[t, slot] = NEVER
    held.counters[t, PUSHED] += 1


@inline
def _use(
    held: Any, t: int, ids: Any, step: int, by_frequency: bool, settled: int, width: int, out: Any, due: Any, at: int
) -> int:
    """Use rows of one table in training, which may evict others; return the number of gradients in ``due`` then."""
    reused, left = np.empty(ids.size, np.int64), np.empty(ids.size, np.int64)
    filled, size, taken = use(
        held.keys[t], held.slots[t], held.ids_of[t], held.uses[t], held.last_use[t], held.heap[t], held.sizes[t, 1],
        held.sizes[t, 0], held.versions.shape[1], by_frequency, settled, ids, step, out, reused, left,
    )  # fmt: skip
    held.sizes[t, 0], held.sizes[t, 1] = filled, size
    held.counters[t, EVICTIONS] += taken
    for k in range(taken):
        slot = reused[k]
        if held.due_at[t, slot] < NEVER:
            _take(held, t, slot, width, left[k], due, at)
            at += 1
        held.versions[t, slot] = -1
        held.coming[t, slot] = False
    return at


@inline
def _store(
    held: Any, t: int, slot: int, width: int, stateless: bool, asked: int, step: int, versions: Any, came: Any, at: int
) -> None:
    """Store row ``at`` of those that ``came``, which was asked about with the version ``asked``, in a slot."""
    whole = held.rows.shape[2]
    if not stateless:
        if asked >= 0 and held.with_state[t, slot]:
            whole = width  # its state is here already
        else:
            held.with_state[t, slot] = asked == WITH_STATE
    for j in range(U(whole)):
        held.rows[t, U(slot), j] = came[U(at), j]
    held.versions[t, slot], held.checked[t, slot] = versions[at], step


@kernel
def start_prefetch(
    held: Any,
    members: Any,
    ids: Any,
    starts: Any,
    step: int,
    bound: int,
    waits: bool,
    spare: int,
    asks: Any,
    asked: Any,
    ask_starts: Any,
) -> None:
    """Choose ids of the next step to request, in the form of ``ask``; ``waits``: own gradients are held back."""
    count = 0
    others, known = np.empty(ids.size, np.int64), np.empty(ids.size, np.int64)
    for k in range(members.size):
        t, begin, end = U(members[k]), starts[k], starts[k + 1]
        keys, slots = held.keys[t], held.slots[t]
        later = 0
        for i in range(begin, end):
            _look_ahead(keys, slots, ids, i)
            slot = slots[_place(keys, slots, ids[i])]
            version = held.versions[t, slot] if slot >= 0 else -1
            if version >= 0:
                used = held.last_use[t, slot] == step
                stale = step + 1 - held.checked[t, slot] > bound - spare
                if not waits:
                    again = stale and not used
                elif held.with_state[t, slot]:
                    again = stale and held.due_at[t, slot] > step - spare
                else:
                    again = stale or used
                if not again or bound == 0:
                    continue
                held.coming[t, slot] = True
                if not held.with_state[t, slot]:
                    asks[count], asked[count] = i, WITH_STATE
                    count += 1
                    continue
            others[later], known[later] = i, version
            later += 1
        for n in range(later):
            asks[count], asked[count] = others[n], known[n]
            count += 1
        ask_starts[k + 1] = count


@kernel
def ask(
    held: Any,
    by_frequency: bool,
    settled: int,
    width: int,
    members: Any,
    ids: Any,
    starts: Any,
    step: int,
    bound: int,
    training: bool,
    found: Any,
    known: Any,
    asks: Any,
    asked: Any,
    ask_starts: Any,
    out: Any,
    leaving: Any,
) -> None:
    """Do the first half of ``read``: use the ids, copy cached rows into ``out``, and choose the ids to ask about.

    ``found`` takes each id's slot, ``known`` its version; ``asks`` the places of the ids to ask about, those that come
    with their state first, ``asked`` the versions to ask with.
    """
    count = left = 0
    others = np.empty(ids.size, np.int64)
    for k in range(members.size):
        t, begin, end = U(members[k]), starts[k], starts[k + 1]
        if training:
            left = _use(held, t, ids[begin:end], step, by_frequency, settled, width, found[begin:end], leaving, left)
        else:
            for i in range(begin, end):
                found[i] = held.slots[t, _place(held.keys[t], held.slots[t], ids[i])]
        versions, checked, with_state, rows = held.versions[t], held.checked[t], held.with_state[t], held.rows[t]
        later = 0
        for i in range(begin, end):
            slot = found[i]
            version = versions[slot] if slot >= 0 else -1
            known[i] = version
            if version < 0:
                others[later] = i
                later += 1
                continue
            here, place = U(slot), U(i)
            for j in range(U(width)):
                out[place, j] = rows[here, j]
            if step - checked[here] <= bound:
                continue
            if with_state[here]:
                others[later] = i
                later += 1
            else:
                asks[count], asked[count] = i, WITH_STATE
                count += 1
        for n in range(later):
            asks[count], asked[count] = others[n], known[others[n]]
            count += 1
        ask_starts[k + 1] = count
        leaving.starts[k + 1] = left
        held.counters[t, HITS] += end - begin - (count - ask_starts[k])


@kernel
def answer(
    held: Any,
    width: int,
    stateless: bool,
    members: Any,
    step: int,
    found: Any,
    known: Any,
    asks: Any,
    asked: Any,
    ask_starts: Any,
    positions: Any,
    came_starts: Any,
    versions: Any,
    came: Any,
    out: Any,
    dirty: Any,
) -> int:
    """Return the second half of ``read``: takes in the rows that ``came``; a state that is cached already is kept.

    ``dirty`` takes table, slot and place of rows whose own gradients still wait here, to be applied again; returns
    their number.
    """
    again = 0
    changed = np.zeros(asks.size, np.bool_)
    for k in range(members.size):
        t, first = U(members[k]), ask_starts[k]
        for p in range(came_starts[k], came_starts[k + 1]):
            at = first + positions[p]
            changed[at] = True
            i = asks[at]
            slot = found[i]
            for j in range(U(width)):
                out[U(i), j] = came[U(p), j]
            held.counters[t, MISSES] += 1
            if known[i] >= 0:
                held.counters[t, REFRESHED] += 1
            if slot < 0:
                continue
            _store(held, t, slot, width, stateless, asked[at], step, versions, came, p)
            if held.due_at[t, slot] < NEVER:
                dirty[again, 0], dirty[again, 1], dirty[again, 2] = t, slot, i
                again += 1
        for at in range(first, ask_starts[k + 1]):
            if not changed[at]:
                slot = found[asks[at]]
                if slot >= 0:
                    held.checked[t, slot] = step
                held.counters[t, HITS] += 1
    return again


@kernel
def admit(
    held: Any,
    by_frequency: bool,
    settled: int,
    width: int,
    members: Any,
    ids: Any,
    starts: Any,
    step: int,
    leaving: Any,
) -> None:
    """Give each of ``ids`` of ``step`` a slot, before any of them is read."""
    left = 0
    found = np.empty(ids.size, np.int64)
    for k in range(members.size):
        t, begin, end = U(members[k]), starts[k], starts[k + 1]
        left = _use(held, t, ids[begin:end], step, by_frequency, settled, width, found[begin:end], leaving, left)
        leaving.starts[k + 1] = left


@kernel
def mark(held: Any, members: Any, ids: Any, starts: Any) -> None:
    """Mark ``ids`` as pushed since the rows now taken in were requested."""
    for k in range(members.size):
        t = U(members[k])
        for i in range(starts[k], starts[k + 1]):
            _look_ahead(held.keys[t], held.slots[t], ids, i)
            slot = held.slots[t, _place(held.keys[t], held.slots[t], ids[i])]
            if slot >= 0:
                held.pushed[t, slot] = True


@kernel
def finish_prefetch(
    held: Any,
    width: int,
    stateless: bool,
    members: Any,
    step: int,
    ids: Any,
    asked: Any,
    starts: Any,
    positions: Any,
    came_starts: Any,
    versions: Any,
    came: Any,
    dirty: Any,
) -> int:
    """Store requested rows of ids that were admitted; ``dirty`` and the result are as in ``answer``."""
    again = 0
    for k in range(members.size):
        t, p = U(members[k]), came_starts[k]
        for i in range(starts[k], starts[k + 1]):
            _look_ahead(held.keys[t], held.slots[t], ids, i)
            here = p < came_starts[k + 1] and starts[k] + positions[p] == i
            at = p
            p += here
            slot = held.slots[t, _place(held.keys[t], held.slots[t], ids[i])]
            if slot < 0:
                continue
            held.coming[t, slot] = False
            version = held.versions[t, slot]
            if asked[i] == -1:
                if not here or version >= 0:
                    continue
            elif version < 0 or held.pushed[t, slot]:
                continue
            elif not here:
                if version == asked[i]:
                    held.checked[t, slot] = step
                continue
            _store(held, t, slot, width, stateless, asked[i], step, versions, came, at)
            held.counters[t, MISSES] += 1
            if version < 0:
                if held.pushed[t, slot]:
                    held.checked[t, slot] = LONG_AGO
                continue
            held.counters[t, REFRESHED] += 1
            if held.due_at[t, slot] < NEVER:
                dirty[again, 0], dirty[again, 1] = t, slot
                again += 1
    return again


@kernel
def pass_on(held: Any, members: Any, ids: Any, starts: Any) -> None:
    """``write`` without a ``push_bound``: cached rows are asked about when they are next read."""
    for k in range(members.size):
        t = U(members[k])
        for i in range(starts[k], starts[k + 1]):
            _look_ahead(held.keys[t], held.slots[t], ids, i)
            slot = held.slots[t, _place(held.keys[t], held.slots[t], ids[i])]
            if slot >= 0 and held.versions[t, slot] >= 0:
                held.checked[t, slot] = LONG_AGO
        held.counters[t, PUSHED] += starts[k + 1] - starts[k]


@kernel
def count_due(due_at: Any, members: Any, limit: int) -> int:
    """Count the waiting rows that are due by the step ``limit``."""
    count = 0
    for k in range(members.size):
        due = due_at[U(members[k])]
        for slot in range(U(due.size)):
            count += due[slot] <= limit
    return count


@kernel
def take_due(held: Any, width: int, members: Any, limit: int, due: Any) -> None:
    """Move the gradients that are due by the step ``limit`` to ``due``."""
    at = 0
    for k in range(members.size):
        t = U(members[k])
        for slot in range(U(held.due_at.shape[1])):
            if held.due_at[t, slot] <= limit:
                _take(held, t, slot, width, held.ids_of[t, slot], due, at)
                at += 1
        due.starts[k + 1] = at


@kernel
def write(
    rule: int,
    held: Any,
    width: int,
    members: Any,
    ids: Any,
    starts: Any,
    grads: Any,
    step: int,
    push_bound: int,
    spare: int,
    constants: Any,
    due: Any,
) -> None:
    """Move the cached rows by their gradients, which wait; ``due`` takes those of other rows and those that are due.

    ``rule`` is a number of ``rules.py``. Of row-wise Adagrad a row's last number is its sum.
    """
    at = 0
    wide, stride = U(width), U(held.rows.shape[2])
    own = np.empty(width, grads.dtype)
    slots = np.empty(ids.size, np.int64)
    storage, waiting = held.rows.reshape(held.rows.size), held.waiting.reshape(held.waiting.size)
    for k in range(members.size):
        t, begin, end = U(members[k]), starts[k], starts[k + 1]
        base = t * U(held.rows.shape[1])
        keys, places = held.keys[t], held.slots[t]
        for i in range(begin, end):
            _look_ahead(keys, places, ids, i)
            slots[i] = places[_place(keys, places, ids[i])]
        for i in range(begin, end):
            if i + _AHEAD < end and slots[i + _AHEAD] >= 0:
                prefetch(storage, (base + U(slots[i + _AHEAD])) * stride)
                prefetch(storage, (base + U(slots[i + _AHEAD])) * stride + wide)
                prefetch(waiting, (base + U(slots[i + _AHEAD])) * wide)
            slot = slots[i]
            here = slot >= 0 and held.versions[t, slot] >= 0
            with_state = here and held.with_state[t, slot]
            if here and not with_state:
                held.checked[t, slot] = LONG_AGO
                here = held.coming[t, slot]
            if not here:
                due.ids[at], due.squares[at] = ids[i], 1
                for j in range(U(width)):
                    due.grads[U(at), j] = grads[U(i), j]
                at += 1
                held.counters[t, PUSHED] += 1
                continue
            energy = np.float32(0)
            for j in range(U(width)):
                value = grads[U(i), j]
                own[j] = value
                held.waiting[t, U(slot), j] += value
                energy += np.float32(value) * np.float32(value)
            if with_state:
                row = (base + U(slot)) * stride
                move_row(rule, storage, row, storage, row + wide, wide, own, U(0), constants[k])
            held.energy[t, slot] += energy
            if held.due_at[t, slot] == NEVER:
                held.due_at[t, slot] = step + push_bound - spare
        for slot in range(U(held.due_at.shape[1])):
            if held.due_at[t, slot] <= step - spare * held.coming[t, slot]:
                _take(held, t, slot, width, held.ids_of[t, slot], due, at)
                at += 1
        due.starts[k + 1] = at
