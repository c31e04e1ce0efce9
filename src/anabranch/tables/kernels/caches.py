"""Kernels that work on the caches of several tables in one call: what ``CacheGroup`` runs, compiled.

``held`` has all contents of the caches, an array of ``[tables, ...]`` of each kind; ``constants`` are those of each
table's step.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from anabranch.tables.kernels.numbers import U, inline, kernel, mix, prefetch
from anabranch.tables.kernels.rules import correct, move_row
from anabranch.tables.kernels.vocabulary import add, drop_top, sink

WITH_STATE = -2  # as the known version of a row: it comes in any case, with its optimizer's state
OLDEST = (1 << 15) - 1  # steps; the age of a row is sent in 16 bits
LONG_AGO = -(1 << 40)
NEVER = 1 << 40
_AHEAD = 12  # ids
HITS, MISSES, REFRESHED, EVICTIONS, PUSHED = range(5)


class CacheArrays(NamedTuple):
    """Properties of the caches, the index of each table, and the contents of its slots."""

    width: Any  # weights of a row
    stateless: Any  # a row has no more numbers than weights
    by_frequency: Any  # the row used in the fewest steps is evicted, not the one unused longest
    settled: Any  # steps of use after which a row stays for good
    push_bound: Any
    spare: Any
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


class Lookups(NamedTuple):
    """Ids of the tables ``members``; those of ``members[k]`` are ``starts[k]:starts[k + 1]``."""

    members: Any
    ids: Any
    starts: Any


class Requests(NamedTuple):
    """Room for the lookups to ask the servers about: where they are, and the version to ask with."""

    at: Any
    versions: Any
    starts: Any


class Received(NamedTuple):
    """Rows that came for those asked about, and where among them."""

    positions: Any
    starts: Any
    versions: Any
    rows: Any


class Due(NamedTuple):
    """Room for gradients that go to the servers; ``starts`` as of the ids."""

    ids: Any
    grads: Any
    squares: Any
    starts: Any


@inline
def _squares(held: Any, t: int, slot: int) -> Any:
    """Return the squares of the sum of gradients that waits in a slot."""
    total = np.float32(0)
    for j in range(U(held.width)):
        value = np.float32(held.waiting[t, U(slot), j])
        total += value * value
    squares = held.energy[t, slot] / total
    return squares if np.isfinite(squares) else np.float32(1)


@inline
def _take(held: Any, t: int, slot: int, own: int, due: Any, at: int) -> None:
    """Move the gradient that waits in a slot to ``due``."""
    due.ids[at], due.squares[at] = own, _squares(held, t, slot)
    for j in range(U(held.width)):
        due.grads[U(at), j] = held.waiting[t, U(slot), j]
        held.waiting[t, U(slot), j] = 0
    held.energy[t, slot] = 0
    held.due_at[t, slot] = NEVER
    held.counters[t, PUSHED] += 1


@inline
def _store(
    rule: int, held: Any, t: int, slot: int, known: int, step: int, received: Any, at: int, constants: Any
) -> None:  # fmt: skip
    """Store row ``at`` of the ``received`` ones, which was asked about with the version ``known``, in a slot.

    A gradient that waits there is applied to it.
    """
    whole = held.rows.shape[2]
    if not held.stateless:
        if known >= 0 and held.with_state[t, slot]:
            whole = held.width  # its state is here already
        else:
            held.with_state[t, slot] = known == WITH_STATE
    for j in range(U(whole)):
        held.rows[t, U(slot), j] = received.rows[U(at), j]
    held.versions[t, slot], held.checked[t, slot] = received.versions[at], step
    if held.due_at[t, slot] < NEVER:
        rows, waiting, wide = held.rows.reshape(held.rows.size), held.waiting.reshape(held.waiting.size), U(held.width)
        place = U(t) * U(held.rows.shape[1]) + U(slot)
        row, g, c = place * U(held.rows.shape[2]), place * wide, constants[t]
        squares = _squares(held, t, slot)
        if squares != 1:
            correct(rule, rows, row, rows, row + wide, wide, waiting, g, c, squares, 2.0**-16)
        move_row(rule, rows, row, rows, row + wide, wide, waiting, g, c)


@kernel
def start_prefetch(held: Any, lookups: Any, step: int, bound: int, requests: Any) -> None:
    """Choose ids of the next step to request, in the form of ``ask``."""
    members, ids, starts = lookups
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
                stale = step + 1 - held.checked[t, slot] > bound - held.spare
                if not held.push_bound:
                    again = stale and not used
                elif held.with_state[t, slot]:
                    again = stale and held.due_at[t, slot] > step - held.spare
                else:
                    again = stale or used
                if not again or bound == 0:
                    continue
                held.coming[t, slot] = True
                if not held.with_state[t, slot]:
                    requests.at[count], requests.versions[count] = i, WITH_STATE
                    count += 1
                    continue
            others[later], known[later] = i, version
            later += 1
        for n in range(later):
            requests.at[count], requests.versions[count] = others[n], known[n]
            count += 1
        requests.starts[k + 1] = count


@kernel
def ask(
    held: Any, lookups: Any, step: int, bound: int, training: bool, found: Any, known: Any, requests: Any, out: Any,
    leaving: Any,
) -> None:  # fmt: skip
    """Do the first half of ``read``: use the ids, copy cached rows into ``out``, and choose the ids to ask about.

    ``found`` takes each id's slot, ``known`` its version; ``requests`` the ids to ask about, those that come with their
    state first.
    """
    members, ids, starts = lookups
    count = left = 0
    others = np.empty(ids.size, np.int64)
    for k in range(members.size):
        t, begin, end = U(members[k]), starts[k], starts[k + 1]
        if training:
            left = _use(held, t, ids[begin:end], step, found[begin:end], leaving, left)
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
            for j in range(U(held.width)):
                out[place, j] = rows[here, j]
            if step - checked[here] <= bound:
                continue
            if with_state[here]:
                others[later] = i
                later += 1
            else:
                requests.at[count], requests.versions[count] = i, WITH_STATE
                count += 1
        for n in range(later):
            requests.at[count], requests.versions[count] = others[n], known[others[n]]
            count += 1
        requests.starts[k + 1] = count
        leaving.starts[k + 1] = left
        held.counters[t, HITS] += end - begin - (count - requests.starts[k])


@kernel
def answer(
    rule: int, held: Any, members: Any, step: int, found: Any, known: Any, requests: Any, received: Any, constants: Any,
    out: Any,
) -> None:  # fmt: skip
    """Do the second half of ``read``: take in the ``received`` rows; a state that is cached already is kept."""
    changed = np.zeros(requests.at.size, np.bool_)
    for k in range(members.size):
        t, first = U(members[k]), requests.starts[k]
        for p in range(received.starts[k], received.starts[k + 1]):
            at = first + received.positions[p]
            changed[at] = True
            i = requests.at[at]
            slot = found[i]
            held.counters[t, MISSES] += 1
            if known[i] >= 0:
                held.counters[t, REFRESHED] += 1
            if slot >= 0:
                _store(rule, held, t, slot, requests.versions[at], step, received, p, constants)
            for j in range(U(held.width)):
                out[U(i), j] = held.rows[t, U(slot), j] if slot >= 0 else received.rows[U(p), j]
        for at in range(first, requests.starts[k + 1]):
            if not changed[at]:
                slot = found[requests.at[at]]
                if slot >= 0:
                    held.checked[t, slot] = step
                held.counters[t, HITS] += 1


@kernel
def admit(held: Any, lookups: Any, step: int, leaving: Any) -> None:
    """Give each of the ids of ``step`` a slot, before any of them is read."""
    members, ids, starts = lookups
    left = 0
    found = np.empty(ids.size, np.int64)
    for k in range(members.size):
        t, begin, end = U(members[k]), starts[k], starts[k + 1]
        left = _use(held, t, ids[begin:end], step, found[begin:end], leaving, left)
        leaving.starts[k + 1] = left


@kernel
def mark(held: Any, lookups: Any) -> None:
    """Mark ids as pushed since the rows now taken in were requested."""
    members, ids, starts = lookups
    for k in range(members.size):
        t = U(members[k])
        for i in range(starts[k], starts[k + 1]):
            _look_ahead(held.keys[t], held.slots[t], ids, i)
            slot = held.slots[t, _place(held.keys[t], held.slots[t], ids[i])]
            if slot >= 0:
                held.pushed[t, slot] = True


@kernel
def finish_prefetch(rule: int, held: Any, lookups: Any, step: int, known: Any, received: Any, constants: Any) -> None:
    """Store requested rows of ids that were admitted; ``known`` are the versions that they were requested with."""
    members, ids, starts = lookups
    for k in range(members.size):
        t, p = U(members[k]), received.starts[k]
        for i in range(starts[k], starts[k + 1]):
            _look_ahead(held.keys[t], held.slots[t], ids, i)
            here = p < received.starts[k + 1] and starts[k] + received.positions[p] == i
            at = p
            p += here
            slot = held.slots[t, _place(held.keys[t], held.slots[t], ids[i])]
            if slot < 0:
                continue
            held.coming[t, slot] = False
            version = held.versions[t, slot]
            if known[i] == -1:
                if not here or version >= 0:
                    continue
            elif version < 0 or held.pushed[t, slot]:
                continue
            elif not here:
                if version == known[i]:
                    held.checked[t, slot] = step
                continue
            _store(rule, held, t, slot, known[i], step, received, at, constants)
            held.counters[t, MISSES] += 1
            if version < 0:
                if held.pushed[t, slot]:
                    held.checked[t, slot] = LONG_AGO
                continue
            held.counters[t, REFRESHED] += 1


@kernel
def pass_on(held: Any, lookups: Any) -> None:
    """``write`` without a ``push_bound``: cached rows are asked about when they are next read."""
    members, ids, starts = lookups
    for k in range(members.size):
        t = U(members[k])
        for i in range(starts[k], starts[k + 1]):
            _look_ahead(held.keys[t], held.slots[t], ids, i)
            slot = held.slots[t, _place(held.keys[t], held.slots[t], ids[i])]
            if slot >= 0 and held.versions[t, slot] >= 0:
                held.checked[t, slot] = LONG_AGO
        held.counters[t, PUSHED] += starts[k + 1] - starts[k]


@kernel
def write(rule: int, held: Any, lookups: Any, grads: Any, step: int, constants: Any, due: Any) -> None:
    """Move the cached rows by their gradients, which wait; ``due`` takes those of other rows and those that are due.

    ``rule`` is a number of ``rules.py``. Of row-wise Adagrad a row's last number is its sum.
    """
    members, ids, starts = lookups
    at = 0
    wide, stride = U(held.width), U(held.rows.shape[2])
    own = np.empty(held.width, grads.dtype)
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
                for j in range(wide):
                    due.grads[U(at), j] = grads[U(i), j]
                at += 1
                held.counters[t, PUSHED] += 1
                continue
            energy = np.float32(0)
            for j in range(wide):
                value = grads[U(i), j]
                own[j] = value
                held.waiting[t, U(slot), j] += value
                energy += np.float32(value) * np.float32(value)
            if with_state:
                row = (base + U(slot)) * stride
                move_row(rule, storage, row, storage, row + wide, wide, own, U(0), constants[t])
            held.energy[t, slot] += energy
            if held.due_at[t, slot] == NEVER:
                held.due_at[t, slot] = step + held.push_bound - held.spare
        for slot in range(U(held.due_at.shape[1])):
            if held.due_at[t, slot] <= step - held.spare * held.coming[t, slot]:
                _take(held, t, slot, held.ids_of[t, slot], due, at)
                at += 1
        due.starts[k + 1] = at


# --- the index --------------------------------------------------------------------------------------------------------
# ``keys`` and ``slots`` are one hash table of a power of two: an id is at the first free place from its mixed bits on;
# ``slots`` holds its row, or -1 in a free place. Any int64 is an id. Rows are allocated from 0 up; once they are all in
# use, a new id evicts another: ``heap`` orders the rows by (uses or 0, last use, row).


@inline
def _place(keys: Any, slots: Any, wanted: Any) -> Any:
    """Return the place of ``wanted`` in the hash table, or the free place where it would go."""
    mask = U(keys.size - 1)
    at = mix(U(wanted)) & mask
    while slots[at] >= 0 and keys[at] != wanted:
        at = (at + U(1)) & mask
    return at


@inline
def _look_ahead(keys: Any, slots: Any, ids: Any, i: int) -> None:
    """Prefetches the place of the id that is looked up a little later."""
    if i + _AHEAD < ids.size:
        at = mix(U(ids[i + _AHEAD])) & U(keys.size - 1)
        prefetch(keys, at)
        prefetch(slots, at)


@inline
def _remove(keys: Any, slots: Any, leaving: Any) -> None:
    """Remove an id and move back those that it had pushed on, so that no search ends too early."""
    mask = U(keys.size - 1)
    hole = _place(keys, slots, leaving)
    at = hole
    while True:
        at = (at + U(1)) & mask
        if slots[at] < 0:
            break
        home = mix(U(keys[at])) & mask
        if ((at - home) & mask) >= ((at - hole) & mask):
            keys[hole], slots[hole] = keys[at], slots[at]
            hole = at
    slots[hole] = -1


@kernel
def _use(held: Any, t: int, ids: Any, step: int, out: Any, due: Any, at: int) -> int:
    """Find the row of each id of one table in a training step, new ones too. A row is used at most once per step.

    No row that this step has used is taken from another id, nor one used in ``settled`` steps; without another, a new
    id has no row, -1. Gradients that wait in rows that are taken go to ``due``; returns how many are there then.
    """
    keys, slots, ids_of, uses, last_use = held.keys[t], held.slots[t], held.ids_of[t], held.uses[t], held.last_use[t]
    heap, filled, heap_size = held.heap[t], held.sizes[t, 0], held.sizes[t, 1]
    for i in range(ids.size):
        _look_ahead(keys, slots, ids, i)
        row = slots[_place(keys, slots, ids[i])]
        out[i] = row
        if row >= 0 and last_use[row] != step:
            last_use[row] = step
            uses[row] += 1
    aside = 0
    waiting = np.empty(ids.size + 1, np.int64)
    for i in range(ids.size):
        if out[i] >= 0:
            continue
        place = _place(keys, slots, ids[i])
        if slots[place] >= 0:  # just admitted, earlier in this batch
            out[i] = slots[place]
            continue
        row = -1
        on_top = False
        if filled < uses.size:
            row = filled
            filled += 1
        else:
            while heap_size:
                top = heap[0, 2]
                now = uses[top] if held.by_frequency else 0
                if heap[0, 0] != now or heap[0, 1] != last_use[top]:
                    heap[0, 0], heap[0, 1] = now, last_use[top]
                    sink(heap, heap_size)
                elif uses[top] >= held.settled:  # stays for good, so it need not be checked again
                    heap_size = drop_top(heap, heap_size)
                elif last_use[top] == step:
                    if not held.by_frequency:  # the least recently used row is in use, so all are
                        break
                    heap_size = drop_top(heap, heap_size)
                    if aside == waiting.size:
                        waiting = np.concatenate((waiting, waiting))
                    waiting[aside] = top
                    aside += 1
                else:
                    row = top
                    on_top = True
                    _remove(keys, slots, ids_of[row])
                    held.counters[t, EVICTIONS] += 1
                    if held.due_at[t, row] < NEVER:
                        _take(held, t, row, ids_of[row], due, at)
                        at += 1
                    held.versions[t, row], held.coming[t, row] = -1, False
                    break
        if row < 0:
            continue
        place = _place(keys, slots, ids[i])
        keys[place], slots[place] = ids[i], row
        ids_of[row], uses[row], last_use[row] = ids[i], 1, step
        out[i] = row
        if on_top:
            heap[0, 0], heap[0, 1] = 1 if held.by_frequency else 0, step
            sink(heap, heap_size)
        else:
            heap_size = add(heap, heap_size, 1 if held.by_frequency else 0, step, row)
    for k in range(aside):
        row = waiting[k]
        heap_size = add(heap, heap_size, uses[row] if held.by_frequency else 0, last_use[row], row)
    held.sizes[t, 0], held.sizes[t, 1] = filled, heap_size
    return at
