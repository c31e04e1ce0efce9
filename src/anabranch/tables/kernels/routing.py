"""Kernels that route the ids of a message to shards: what ``row_messages.py`` runs, compiled.

``starts`` splits the ids by table: those of table ``t`` are ``starts[t]:starts[t + 1]``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from anabranch.tables.kernels.numbers import U, kernel, mix, permuted

_DIGIT = 11  # bits


@kernel
def owners(ids: Any, starts: Any, limits: Any, halves: Any, keys: Any, shards: int, out: Any) -> int:
    """Return the shard of each id; returns the position of the first id outside its table, or -1. A limit of -1 allows
    any.
    """
    many = U(shards)
    for t in range(limits.size):
        limit = limits[t]
        for i in range(starts[t], starts[t + 1]):
            if limit < 0:
                out[i] = mix(U(ids[i]) ^ keys[t]) % many
                continue
            if ids[i] < 0 or ids[i] >= limit:
                return i
            if shards == 1:
                out[i] = 0
                continue
            out[i] = permuted(U(ids[i]), U(limit), U(halves[t]), keys[t]) % many
    return -1


@kernel
def arrange(owners: Any, kinds: Any, starts: Any, counts: Any, places: Any, order: Any) -> None:
    """Orders ids by shard, table and kind, and else as they come; ``counts`` is ``[shards, tables, kinds]``, zero."""
    for t in range(starts.size - 1):
        for i in range(starts[t], starts[t + 1]):
            counts[owners[i], t, kinds[i]] += 1
    total = 0
    for s in range(counts.shape[0]):
        for t in range(counts.shape[1]):
            for k in range(counts.shape[2]):
                places[s, t, k] = total
                total += counts[s, t, k]
    for t in range(starts.size - 1):
        for i in range(starts[t], starts[t + 1]):
            at = places[owners[i], t, kinds[i]]
            order[at] = i
            places[owners[i], t, kinds[i]] = at + 1


@kernel
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
