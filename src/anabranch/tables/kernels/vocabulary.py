"""From ids to shards, and there to rows: computed in fixed tables, looked up in dynamic ones.

The dynamic tables of an arena share an index. It is extendible hashing, so that growth is a page at a time::

    hash of an id: | directory, top bits ... | tag, 23 bits | .. | bucket, 6 bits |

    directory ──> segment of 64 buckets ──> bucket of 8 slots, a cache line: tag << 40 | row, or FREE, or GONE

A tag is a hint: the row's own id and table decide. An id lies in its bucket or, where that is full, in one of the next
buckets of the segment. A segment that fills up is split in two by the next bit of the hashes; the directory doubles
where it has no such bit yet, which is short, for it has one entry for hundreds of rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from anabranch.tables.kernels.numbers import U, inline, kernel, mix, permuted, prefetch, share

BLOCK = 1024  # rows, which belong to one table
ROW = (1 << 40) - 1
FREE, GONE = -1, -2
SLOTS, FULL = 512, 384  # slots of a segment; used ones from which on it is split
DEEPEST = 26  # bits of the directory
DEPTH, SEGMENTS = range(2)  # of ``heads``
BASE, SIZE, HALF, STEP, LAGS = range(5)  # of ``facts``: BASE is a fixed table's first row, SIZE -1 in a dynamic one
AHEAD = U(24)  # lookups to prefetch


class Index(NamedTuple):
    """The index of an arena's dynamic tables."""

    directory: Any  # segments, by the top DEPTH bits of a hash
    heads: Any
    depths: Any  # of each segment: the bits of the hash that all of its ids share
    counts: Any  # of each segment: slots that are not FREE
    slots: Any
    owner: Any  # the table of each block of rows
    keys: Any  # 64 bits of each table


@inline
def hashed(key: Any, id_: Any) -> Any:
    """Return the hash of an id of the table with this key; not the one by which ids are placed on shards."""
    return mix(U(id_) ^ (U(key) + U(0x9E3779B97F4A7C15)))


@inline
def _segment(index: Any, hash_: Any) -> Any:
    return U(index.directory[hash_ >> U(64 - index.heads[DEPTH])]) * U(SLOTS)


@inline
def _tag(hash_: Any) -> Any:
    return np.int64((hash_ >> U(6)) & U(0x7FFFFF))


@inline
def find(index: Any, words: Any, pitch: Any, t: Any, id_: Any, hash_: Any) -> Any:
    """Return the place of an id's slot, or -1 - a place to put it."""
    segment, tag, room = _segment(index, hash_), _tag(hash_), np.int64(-1)
    bucket = hash_ & U(63)
    ends = False  # with the first bucket that has a free slot, anywhere in it: slots are freed in any order
    while not ends:
        for at in range(segment + (bucket << U(3)), segment + (bucket << U(3)) + U(8)):
            word = index.slots[at]
            if word >= 0:
                row = U(word) & U(ROW)
                if word >> 40 == tag and words[row * pitch] == id_ and index.owner[row // U(BLOCK)] == t:
                    return np.int64(at)
            else:
                if room < 0:
                    room = np.int64(at)
                ends |= word == FREE
        bucket = (bucket + U(1)) & U(63)
    return -1 - room


@kernel
def correct(index: Any, words: Any, pitch: Any, t: int, ids: Any, rows: Any) -> None:
    """Correct ``rows`` of ids of a dynamic table as ``locate`` returns them: another id's, because of a false tag."""
    for i in range(ids.size):
        row = U(rows[i])
        if rows[i] >= 0 and (words[row * pitch] != ids[i] or index.owner[row // U(BLOCK)] != t):
            at = find(index, words, pitch, t, ids[i], hashed(index.keys[t], ids[i]))
            rows[i] = index.slots[at] & ROW if at >= 0 else -1


@kernel
def locate(
    which: Any, facts: Any, shard: int, shards: int, index: Any, ids: Any, starts: Any, hashes: Any, rows: Any,
    thread: int, threads: int,
) -> tuple[Any, Any]:  # fmt: skip
    """Rows of the ids of this thread's share, -1 where a dynamic table has none.

    But for false tags, which the row's own id shows. Returns the first lookup whose id is not of its table on this
    shard, or -1; and how many do not ascend.
    """
    many, mine = U(shards), U(shard)
    falls: Any = 0
    first, last = share(starts, thread, threads)
    for k in range(which.size):
        t, begin, end = which[k], U(max(first, starts[k])), U(min(last, starts[k + 1]))
        base, size, key = facts[t, BASE], facts[t, SIZE], U(index.keys[t])
        for i in range(max(begin, U(starts[k]) + U(1)), end):
            falls += ids[i] <= ids[i - U(1)]
        if size >= 0:
            outside: Any = 0
            for i in range(begin, end):
                outside += U(ids[i]) >= U(size)
            if outside:
                for i in range(begin, end):
                    if U(ids[i]) >= U(size):
                        return np.int64(i), falls
            if shards == 1:
                for i in range(begin, end):
                    rows[i] = base + ids[i]
            else:
                for i in range(begin, end):
                    value = permuted(U(ids[i]), U(size), U(facts[t, HALF]), key)
                    if value % many != mine:
                        return np.int64(i), falls
                    rows[i] = base + np.int64(value // many)
            continue
        if shards > 1:
            for i in range(begin, end):
                if mix(U(ids[i]) ^ key) % many != mine:
                    return np.int64(i), falls
        for i in range(begin, end):
            hashes[i] = hashed(key, ids[i])
        for i in range(begin, end):
            if i + AHEAD < end:
                ahead = hashes[i + AHEAD]
                prefetch(index.slots, _segment(index, ahead) + ((ahead & U(63)) << U(3)))
            segment, bucket, tag = _segment(index, hashes[i]), hashes[i] & U(63), _tag(hashes[i])
            word, ends = np.int64(-1), False
            while word < 0 and not ends:  # no look at the row itself, which is in no cache yet
                for at in range(segment + (bucket << U(3)), segment + (bucket << U(3)) + U(8)):
                    word = index.slots[at] if index.slots[at] >> 40 == tag else word  # without a branch
                    ends |= index.slots[at] == FREE
                bucket = (bucket + U(1)) & U(63)
            rows[i] = word & ROW if word >= 0 else -1
    return -1, falls


@inline
def _put(index: Any, at: Any, hash_: Any, row: Any) -> None:
    index.counts[at // SLOTS] += index.slots[at] == FREE
    index.slots[at] = _tag(hash_) << 40 | row


@inline
def _split(index: Any, words: Any, pitch: Any, hash_: Any) -> bool:
    """Split the segment of a hash, or sweep it if few of its slots are in use. False if the directory is full."""
    segment = _segment(index, hash_)
    number, count = np.int64(segment // U(SLOTS)), 0
    rows, hashes = np.empty(SLOTS, np.int64), np.empty(SLOTS, np.uint64)
    for at in range(segment, segment + U(SLOTS)):
        if index.slots[at] >= 0:
            rows[count] = index.slots[at] & ROW
            prefetch(words, U(rows[count]) * pitch)
            count += 1
        index.slots[at] = FREE
    index.counts[number] = 0
    for i in range(count):
        hashes[i] = hashed(index.keys[index.owner[rows[i] // BLOCK]], words[U(rows[i]) * pitch])
    if count > FULL // 2:
        if index.depths[number] == index.heads[DEPTH]:
            if index.heads[DEPTH] == DEEPEST:
                return False
            for i in range((1 << index.heads[DEPTH]) - 1, -1, -1):
                index.directory[2 * i] = index.directory[2 * i + 1] = index.directory[i]
            index.heads[DEPTH] += 1
        more = index.heads[SEGMENTS]
        index.heads[SEGMENTS] += 1
        index.slots[more * SLOTS : (more + 1) * SLOTS] = FREE
        index.counts[more] = 0
        depth = index.depths[number] + 1
        index.depths[number] = index.depths[more] = depth
        width = 1 << (index.heads[DEPTH] - depth)
        first = (np.int64(hash_ >> U(64 - depth)) | 1) * width
        index.directory[first : first + width] = more
    for i in range(count):
        at = _segment(index, hashes[i]) + ((hashes[i] & U(63)) << U(3))
        end = _segment(index, hashes[i]) + U(SLOTS)
        while index.slots[at] != FREE:
            at += U(1)
            if at == end:
                at -= U(SLOTS)
        _put(index, np.int64(at), hashes[i], rows[i])
    return True


@kernel
def enter(index: Any, words: Any, pitch: Any, t: int, ids: Any, rows: Any) -> bool:
    """Give rows to distinct new ids. False if so many share their bits that the directory is full."""
    for i in range(ids.size):
        hash_ = hashed(index.keys[t], ids[i])
        if i + 8 < ids.size:
            ahead = hashed(index.keys[t], ids[i + 8])
            prefetch(index.slots, _segment(index, ahead) + ((ahead & U(63)) << U(3)))
            prefetch(words, U(rows[i + 8]) * pitch)
        while index.counts[_segment(index, hash_) // U(SLOTS)] >= FULL:
            if not _split(index, words, pitch, hash_):
                return False
        _put(index, -1 - find(index, words, pitch, t, ids[i], hash_), hash_, rows[i])
        at = U(rows[i]) * pitch
        words[at], words[at + U(1)] = ids[i], 0
    return True


@kernel
def remove(index: Any, words: Any, pitch: Any, t: int, rows: Any) -> None:
    """Take the ids of rows out of the index; the rows keep them."""
    for row in rows:
        at = find(index, words, pitch, t, words[U(row) * pitch], hashed(index.keys[t], words[U(row) * pitch]))
        assert at >= 0
        ends = False  # a search that comes to a free slot ends there anyway
        for slot in range(at & ~7, (at & ~7) + 8):
            ends |= index.slots[slot] == FREE
        index.slots[at] = FREE if ends else GONE
        index.counts[at // SLOTS] -= ends


# --- eviction ---------------------------------------------------------------------------------------------------------


@kernel
def use(rows: Any, usage: Any, step: int) -> None:
    """Count a step's use of rows: ``usage`` has of each the number of steps that used it, and the last."""
    for row in rows:
        if row >= 0 and usage[row, 1] != step:
            usage[row, 0] += 1
            usage[row, 1] = step


@kernel
def rank(heap: Any, size: int, ids: Any, rows: Any, usage: Any, by_frequency: bool) -> int:
    """Add rows to the heap; returns its size."""
    for i in range(ids.size):
        size = add(heap, size, usage[rows[i], 0] if by_frequency else 0, usage[rows[i], 1], ids[i])
    return size


@kernel
def victims(
    heap: Any,
    size: int,
    usage: Any,
    step: int,
    by_frequency: bool,
    index: Any,
    words: Any,
    pitch: Any,
    t: int,
    out: Any,
) -> tuple[int, int]:
    """Rows to evict, as many as ``out`` has room for: the least used, but none that this step has used.

    Returns how many there are, and the heap's size without them.
    """
    count, aside = 0, 0
    waiting = np.empty((size, 2), np.int64)
    while size and count < out.size:
        id_ = heap[0, 2]
        row = index.slots[find(index, words, pitch, t, id_, hashed(index.keys[t], id_))] & ROW
        now = usage[row, 0] if by_frequency else 0
        if heap[0, 0] != now or heap[0, 1] != usage[row, 1]:
            heap[0, 0], heap[0, 1] = now, usage[row, 1]
            sink(heap, size)
        elif usage[row, 1] == step:
            if not by_frequency:  # the row unused longest is in use, so all are
                break
            size = drop_top(heap, size)
            waiting[aside, 0], waiting[aside, 1] = id_, now
            aside += 1
        else:
            size = drop_top(heap, size)
            out[count] = row
            count += 1
    for k in range(aside):
        size = add(heap, size, waiting[k, 1], step, waiting[k, 0])
    return count, size


# --- heaps ------------------------------------------------------------------------------------------------------------
# Of what to evict next: entries (uses or 0, last use, id or row), the least first. Keys only grow, so an entry is
# brought up to date when it reaches the top, not when its row is used.


@inline
def _less(heap: Any, a: Any, b: Any) -> bool:
    for k in range(3):
        if heap[a, k] != heap[b, k]:
            return bool(heap[a, k] < heap[b, k])
    return False


@inline
def _swap(heap: Any, a: Any, b: Any) -> None:
    for k in range(3):
        heap[a, k], heap[b, k] = heap[b, k], heap[a, k]


@inline
def sink(heap: Any, size: int) -> None:
    """Sink the top to its place."""
    at = 0
    while 2 * at + 1 < size:
        child = 2 * at + 1
        if child + 1 < size and _less(heap, child + 1, child):
            child += 1
        if not _less(heap, child, at):
            break
        _swap(heap, child, at)
        at = child


@inline
def add(heap: Any, size: int, uses: int, last_use: int, last: int) -> int:
    """Add an entry; returns the new size."""
    heap[size, 0], heap[size, 1], heap[size, 2] = uses, last_use, last
    at = size
    while at and _less(heap, at, (at - 1) // 2):
        _swap(heap, at, (at - 1) // 2)
        at = (at - 1) // 2
    return size + 1


@inline
def drop_top(heap: Any, size: int) -> int:
    """Remove the top; returns the new size."""
    _swap(heap, 0, size - 1)
    sink(heap, size - 1)
    return size - 1


# --- from ids to shards: ``starts`` splits the ids by table, those of table ``t`` are ``starts[t]:starts[t + 1]``

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
