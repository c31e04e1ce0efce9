"""Kernels that route the ids of a message to shards: what ``routing.py`` runs, compiled.

``starts`` splits the ids by table: those of table ``t`` are ``starts[t]:starts[t + 1]``.
"""

from __future__ import annotations

from typing import Any

from anabranch.tables.kernels._compiled import U, _feistel, _kernel, _mix


@_kernel
def owners(ids: Any, starts: Any, limits: Any, halves: Any, keys: Any, shards: int, out: Any) -> int:
    """Return the shard of each id; returns the position of the first id outside its table, or -1. A limit of -1 allows
    any.
    """
    many = U(shards)
    for t in range(limits.size):
        limit = limits[t]
        bits, mask = U(halves[t]), (U(1) << U(halves[t])) - U(1)
        for i in range(starts[t], starts[t + 1]):
            if limit < 0:
                out[i] = _mix(U(ids[i]) ^ keys[t]) % many
                continue
            if ids[i] < 0 or ids[i] >= limit:
                return i
            if shards == 1:
                out[i] = 0
                continue
            value = _feistel(U(ids[i]), bits, mask, keys[t], True)
            while value >= U(limit):
                value = _feistel(value, bits, mask, keys[t], True)
            out[i] = value % many
    return -1


@_kernel
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
