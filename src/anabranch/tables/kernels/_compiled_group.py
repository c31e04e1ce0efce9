"""Kernels that work on several tables in one call: what ``TableGroup`` runs, compiled.

Each table's memory is passed by address, so tables need not be moved to be grouped. They share the properties that a
kernel is compiled for: the values per row, their type and the rule. ``starts`` splits the lookups by table: those of
table ``t`` are ``starts[t]:starts[t + 1]``. ``first`` and ``last`` are the tables that this thread processes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.np.numpy_support import carray

from anabranch.tables.kernels._compiled import (
    U,
    _adagrad_row,
    _adam_row,
    _feistel,
    _inline,
    _instruction,
    _kernel,
    _overload,
    _prefetch,
    _row_wise_adagrad_row,
    _sgd_row,
    coarse,
    load,
    number,
    store,
)

_AHEAD = 16  # lookups
_DIGIT = 11  # bits


@_instruction
def _memory_at(typing: Any, address: Any, like: Any) -> Any:
    """Return a pointer to numbers of the type that the array ``like`` holds."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = context.get_value_type(signature.return_type)
        return builder.inttoptr(args[0], kind if isinstance(kind, ir.PointerType) else kind.as_pointer())

    pointer: Any = types.CPointer
    return pointer(like.dtype)(types.uint64, like), generate


@_kernel
def locate_all(
    ids: Any,
    starts: Any,
    limits: Any,
    halves: Any,
    keys: Any,
    shard: int,
    shards: int,
    rows: Any,
    first: int,
    last: int,
) -> int:
    """Return the row of each id, as ``Placement`` places them; returns the first lookup whose id has no row here, or
    -1.
    """
    many, mine = U(shards), U(shard)
    for t in range(first, last):
        limit = limits[t]
        if shards == 1:
            for i in range(starts[t], starts[t + 1]):
                if ids[i] < 0 or ids[i] >= limit:
                    return i
                rows[i] = ids[i]
        else:
            bits, mask = U(halves[t]), (U(1) << U(halves[t])) - U(1)
            for i in range(starts[t], starts[t + 1]):
                if ids[i] < 0 or ids[i] >= limit:
                    return i
                value = _feistel(U(ids[i]), bits, mask, keys[t], True)
                while value >= U(limit):
                    value = _feistel(value, bits, mask, keys[t], True)
                if value % many != mine:
                    return i
                rows[i] = value // many
    return -1


@_kernel
def distinct_all(ids: Any, starts: Any, limits: Any, out: Any, out_starts: Any, inverse: Any, whole: Any) -> None:
    """Find the distinct ids of each table, ascending, and the place of each of ``ids`` among them.

    Ids outside ``range(limits[t])`` are left out with place -1; ``whole[t]`` is true if a table has none such.
    """
    most = 0
    for t in range(limits.size):
        most = max(most, starts[t + 1] - starts[t])
    keys, others = np.empty(most, np.int64), np.empty(most, np.int64)
    places, other_places = np.empty(most, np.int64), np.empty(most, np.int64)
    ends = np.empty(1 << _DIGIT, np.int64)
    count = 0
    for t in range(limits.size):
        begin, size = starts[t], 0
        for i in range(starts[t], starts[t + 1]):
            if 0 <= ids[i] < limits[t]:
                keys[size], places[size] = ids[i], i
                size += 1
            else:
                inverse[i] = -1
        whole[t] = size == starts[t + 1] - begin
        shift = 0
        while (limits[t] - 1) >> shift:  # a digit at a time, from the last
            ends[:] = 0
            for i in range(size):
                ends[(keys[i] >> shift) & ((1 << _DIGIT) - 1)] += 1
            total = 0
            for digit in range(ends.size):
                total, ends[digit] = total + ends[digit], total
            for i in range(size):
                digit = (keys[i] >> shift) & ((1 << _DIGIT) - 1)
                others[ends[digit]], other_places[ends[digit]] = keys[i], places[i]
                ends[digit] += 1
            keys, others, places, other_places = others, keys, other_places, places
            shift += _DIGIT
        first = count
        for i in range(size):
            if i == 0 or keys[i] != keys[i - 1]:
                out[count] = keys[i]
                count += 1
            inverse[places[i]] = count - 1 - first
        out_starts[t + 1] = count


@_kernel
def gather_all(
    values_at: Any,
    stamps_at: Any,
    sizes: Any,
    stride: int,
    width: int,
    rows: Any,
    starts: Any,
    needed: Any,
    out: Any,
    out_at: Any,
    apart: int,
    versions: Any,
    behind: Any,
    first: int,
    last: int,
) -> None:
    """Copy each lookup's weights to ``out[out_at[t] + i * apart:]``, ``i`` counting the table's own lookups.

    A table with a row whose stamp is below ``needed`` is marked in ``behind`` and abandoned. ``versions``
    takes each row's, unless it is empty.
    """
    wide, step = U(width), U(stride)
    for t in range(first, last):
        storage = carray(_memory_at(values_at[t], out), (sizes[t] * stride,))
        stamps = carray(_memory_at(stamps_at[t], rows), (sizes[t],))
        begin, end = starts[t], starts[t + 1]
        for i in range(begin, end):
            if i + _AHEAD < end:
                _prefetch(storage, U(rows[i + _AHEAD]) * step)
                _prefetch(stamps, U(rows[i + _AHEAD]))
            row = U(rows[i])
            stamp = stamps[row]
            if stamp < needed[t]:
                behind[t] = True
                break
            if versions.size:
                versions[i] = stamp - 1
            source, target = row * step, U(out_at[t]) + U(i - begin) * U(apart)
            for j in range(wide):
                out[target + j] = storage[source + j]


@_kernel
def changed_all(
    stamps_at: Any,
    sizes: Any,
    rows: Any,
    starts: Any,
    needed: Any,
    steps: Any,
    since: Any,
    since_starts: Any,
    changed: Any,
    counts: Any,
    behind: Any,
    first: int,
    last: int,
) -> None:
    """Mark which of a table's last ``since_starts[t + 1] - since_starts[t]`` rows have changed after ``since``.

    Tables with a row below ``needed`` are marked in ``behind`` and skipped. ``steps`` holds the step of a table whose
    rows all move in every step, else -1. ``counts`` receives the number of changed rows.
    """
    for t in range(first, last):
        stamps = carray(_memory_at(stamps_at[t], rows), (sizes[t],))
        begin, end = starts[t], starts[t + 1]
        known, count = since_starts[t], 0
        asked = end - (since_starts[t + 1] - known)
        for i in range(begin, end):
            if i + _AHEAD < end:
                _prefetch(stamps, U(rows[i + _AHEAD]))
            stamp = stamps[U(rows[i])]
            if stamp < needed[t]:
                behind[t] = True
                break
            if i >= asked:
                version = steps[t] if steps[t] >= 0 else stamp - 1
                is_new = version > since[known + i - asked]
                changed[known + i - asked] = is_new
                count += is_new
        counts[t] = count


@_kernel
def pick_all(
    values_at: Any,
    sizes: Any,
    stride: int,
    width: int,
    rows: Any,
    starts: Any,
    with_state: Any,
    since_starts: Any,
    changed: Any,
    states: Any,
    states_at: Any,
    out: Any,
    out_at: Any,
    places: Any,
    places_at: Any,
    first: int,
    last: int,
) -> None:
    """Copy a table's first rows with their states, if there is room for any; then the rows without their state.

    The latter are all unknown ones, and the known ones that have ``changed``, whose ``places`` are written.
    """
    wide, step = U(width), U(stride)
    for t in range(first, last):
        storage = carray(_memory_at(values_at[t], out), (sizes[t] * stride,))
        begin, end = starts[t], starts[t + 1]
        known = since_starts[t]
        asked = end - (since_starts[t + 1] - known)
        whole, target, place = U(states_at[t]) * step, U(out_at[t]) * wide, places_at[t]
        for i in range(begin, end):
            if i + _AHEAD < end:
                _prefetch(storage, U(rows[i + _AHEAD]) * step)
            source = U(rows[i]) * step
            if i < begin + with_state[t]:
                if states.size:
                    for j in range(step):
                        states[whole + j] = storage[source + j]
                    whole += step
                continue
            if i >= asked:
                if not changed[known + i - asked]:
                    continue
                places[place] = i - asked
                place += 1
            for j in range(wide):
                out[target + j] = storage[source + j]
            target += wide


@_inline
def _chain(
    rows: Any,
    begin: int,
    end: int,
    stamps: Any,
    needed: int,
    storage: Any,
    step: Any,
    wide: Any,
    sums: Any,
    with_sums: bool,
    grads: Any,
    grads_at: int,
    apart: int,
    buckets: Any,
    scratch: Any,
) -> int:
    """Chains the lookups of each distinct row in their order; returns their count, -1 if a row is behind.

    Rows and gradients are prefetched on the way, for the sums and moves that follow.

    ``scratch``: of each lookup the next one of its row; of each distinct row its first and its last lookup.
    """
    following, heads, tails = scratch[0], scratch[1], scratch[2]
    size = 4
    while size < 2 * (end - begin):
        size *= 2
    mask = U(size - 1)
    for b in range(size):
        buckets[b] = -1
    count = 0
    for i in range(end - begin):
        if begin + i + _AHEAD < end:
            _prefetch(stamps, U(rows[begin + i + _AHEAD]))
        _prefetch(grads, U(grads_at) + U(i) * U(apart))
        row = rows[begin + i]
        following[i] = -1
        at = (U(row) * U(0x9E3779B97F4A7C15) >> U(20)) & mask
        while True:
            held = buckets[at]
            if held < 0:
                if stamps[U(row)] < needed:
                    return -1
                buckets[at] = count
                _prefetch(storage, U(row) * step)
                if step > wide:
                    _prefetch(storage, U(row) * step + wide)
                if step > wide + wide:
                    _prefetch(storage, U(row) * step + wide + wide)
                if with_sums:
                    _prefetch(sums, U(row))
                heads[count] = i
                tails[count] = i
                count += 1
                break
            if rows[begin + heads[held]] == row:
                following[tails[held]] = i
                tails[held] = i
                break
            at = (at + U(1)) & mask
    return count


def move(kind: Any, storage: Any, base: Any, wide: Any, sums: Any, row: Any, grads: Any, c: Any) -> None:
    """Move one row by the rule of this ``kind``; each kind is compiled separately, else none of them is fast."""


@_overload(move)
def _move(kind: Any, storage: Any, base: Any, wide: Any, sums: Any, row: Any, grads: Any, c: Any) -> Any:
    def sgd(kind: Any, storage: Any, base: Any, wide: Any, sums: Any, row: Any, grads: Any, c: Any) -> None:
        _sgd_row(storage, base, wide, False, grads, U(0), c)

    def momentum(kind: Any, storage: Any, base: Any, wide: Any, sums: Any, row: Any, grads: Any, c: Any) -> None:
        _sgd_row(storage, base, wide, True, grads, U(0), c)

    def adagrad(kind: Any, storage: Any, base: Any, wide: Any, sums: Any, row: Any, grads: Any, c: Any) -> None:
        _adagrad_row(storage, base, wide, True, grads, U(0), c)

    def row_wise(kind: Any, storage: Any, base: Any, wide: Any, sums: Any, row: Any, grads: Any, c: Any) -> None:
        _row_wise_adagrad_row(storage, base, wide, sums, row, grads, U(0), c)

    def adam(kind: Any, storage: Any, base: Any, wide: Any, sums: Any, row: Any, grads: Any, c: Any) -> None:
        _adam_row(storage, base, wide, True, grads, U(0), c)

    return (sgd, momentum, adagrad, row_wise, adam)[len(kind) - 1]


def correct_second_moments(
    kind: Any, storage: Any, base: Any, wide: Any, sums: Any, row: Any, grads: Any, c: Any, squares: float
) -> None:
    """Do for one row what ``squares.correct_second_moments`` does."""


@_inline
def _excess(storage: Any, at: Any, gradient: Any, c: Any, squares: Any) -> Any:
    g = gradient * number(storage, c[5])
    if c[4] != 0:
        g = g + number(storage, c[4]) * load(storage, at)
    return g * g * (squares - number(storage, 1.0))


@_overload(correct_second_moments)
def _correct_second_moments(
    kind: Any, storage: Any, base: Any, wide: Any, sums: Any, row: Any, grads: Any, c: Any, squares: float
) -> Any:
    def nothing(
        kind: Any, storage: Any, base: Any, wide: Any, sums: Any, row: Any, grads: Any, c: Any, squares: float
    ) -> None:
        pass

    def adagrad(
        kind: Any, storage: Any, base: Any, wide: Any, sums: Any, row: Any, grads: Any, c: Any, squares: float
    ) -> None:
        known = number(storage, max(number(storage, squares), number(storage, _least(storage))))
        for j in range(wide):
            more = coarse(storage, _excess(storage, base + j, grads[j], c, known))
            store(storage, base + wide + j, load(storage, base + wide + j) + more)

    def row_wise(
        kind: Any, storage: Any, base: Any, wide: Any, sums: Any, row: Any, grads: Any, c: Any, squares: float
    ) -> None:
        known = number(storage, max(number(storage, squares), number(storage, _least(storage))))
        total = 0.0
        for j in range(wide):
            total += np.float64(_excess(storage, base + j, grads[j], c, known))
        sums[row] += number(storage, total / wide)

    def adam(
        kind: Any, storage: Any, base: Any, wide: Any, sums: Any, row: Any, grads: Any, c: Any, squares: float
    ) -> None:
        if c[3] != 0:
            known = number(storage, max(number(storage, squares), number(storage, _least(storage))))
            share = number(storage, c[8] / c[3])
            for j in range(wide):
                more = coarse(storage, _excess(storage, base + j, grads[j], c, known) * share)
                store(storage, base + wide + wide + j, load(storage, base + wide + wide + j) + more)

    return (nothing, nothing, adagrad, row_wise, adam)[len(kind) - 1]


@_inline
def _least(storage: Any) -> float:
    return 2.0**-7 if storage.itemsize == 2 else 2.0**-16


@_inline
def _merged_squares(
    head: int, following: Any, begin: int, grads: Any, grads_at: int, apart: int, wide: Any, squares: Any
) -> float:
    """``squares.merged_squares`` of one row, whose lookups are chained from ``head`` on."""
    every = own = 0.0
    i = head
    while i >= 0:
        energy = 0.0
        source = U(grads_at) + U(i) * U(apart)
        for j in range(wide):
            energy += np.float64(grads[source + j]) * np.float64(grads[source + j])
        every += energy
        own += energy * np.float64(squares[begin + i])
        i = following[i]
    return own / every if every > 0 else 1.0


@_kernel
def step_all(
    kind: Any,
    values_at: Any,
    stamps_at: Any,
    sums_at: Any,
    sizes: Any,
    stride: int,
    width: int,
    rows: Any,
    starts: Any,
    needed: Any,
    marks: Any,
    grads: Any,
    grads_at: Any,
    apart: int,
    squares: Any,
    constants: Any,
    like: Any,
    buckets: Any,
    scratch: Any,
    total: Any,
    behind: Any,
    first: int,
    last: int,
) -> None:
    """One step of each table: a row's gradients are summed in the order of its lookups, the row moves and is stamped.

    Gradients lie as ``gather_all`` has its output. A table with a row that is behind is marked and left unchanged.
    ``squares`` are those of each lookup, as ``squares.py`` describes them; none if every gradient is of one step.
    ``kind`` is a ``kind_of``, ``like`` has the storage's type, ``total`` is scratch of one row.
    """
    wide, step, zero = U(width), U(stride), number(like, 0.0)
    for t in range(first, last):
        storage = carray(_memory_at(values_at[t], like), (sizes[t] * stride,))
        stamps = carray(_memory_at(stamps_at[t], rows), (sizes[t],))
        sums = carray(_memory_at(sums_at[t], grads), (sizes[t],))
        begin = starts[t]
        count = _chain(
            rows,
            begin,
            starts[t + 1],
            stamps,
            needed[t],
            storage,
            step,
            wide,
            sums,
            len(kind) == 4,
            grads,
            grads_at[t],
            apart,
            buckets,
            scratch,
        )
        if count < 0:
            behind[t] = True
            continue
        following, heads = scratch[0], scratch[1]
        for u in range(count):
            i = heads[u]
            row = U(rows[begin + i])
            source = U(grads_at[t]) + U(i) * U(apart)
            for j in range(wide):
                total[j] = grads[source + j] + zero  # as a sum that begins with zero has no -0.0
            i = following[i]
            while i >= 0:
                source = U(grads_at[t]) + U(i) * U(apart)
                for j in range(wide):
                    total[j] += grads[source + j]
                i = following[i]
            if like.itemsize == 2:
                for j in range(wide):
                    total[j] = coarse(like, total[j]) if total[j] == total[j] else total[j]
            if squares.size:
                known = _merged_squares(heads[u], following, begin, grads, grads_at[t], apart, wide, squares)
                if known != 1:
                    correct_second_moments(kind, storage, row * step, wide, sums, row, total, constants[t], known)
            move(kind, storage, row * step, wide, sums, row, total, constants[t])
            stamps[row] = marks[t]


def kind_of(family: str, states: int) -> tuple[int, ...]:
    """Return the ``kind`` that stands for a rule in ``step_all``: a tuple whose length identifies it, so that it is a
    type.
    """
    if family == "SGD":
        return (0,) * (2 if states else 1)
    return (0,) * {"Adagrad": 3, "RowWiseAdagrad": 4}.get(family, 5)


def new_scratch(lookups: int, width: int, like: Any) -> tuple[Any, Any, Any]:
    """``buckets``, ``scratch`` and ``total`` of ``step_all`` for tables of at most this many lookups."""
    size = 4
    while size < 2 * lookups:
        size *= 2
    return np.empty(size, np.int32), np.empty((3, lookups), np.int32), np.empty(width, like.dtype)
