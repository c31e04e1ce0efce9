"""Rows as they are before they change, each once: a bit a row says that it was copied."""

from __future__ import annotations

from typing import Any

from anabranch.tables.kernels.numbers import U, kernel, prefetch
from anabranch.tables.kernels.vocabulary import AHEAD, BLOCK


@kernel
def keep(
    rows: Any, limit: int, written: Any, owner: Any, words: Any, pitch: Any, usage: Any, out: Any, marks: Any,
    count: int,
) -> tuple[int, int]:  # fmt: skip
    """Copy those of ``rows`` that are not written yet behind the ``count`` in ``out``, while there is room.

    ``marks`` gets each one's table and usage. Returns how many of ``rows`` are done, and how many ``out`` has by then.
    """
    for i in range(rows.size):
        if i + AHEAD < rows.size:
            prefetch(words, U(max(rows[i + AHEAD], 0)) * pitch)
        row = rows[i]
        if row < 0 or row >= limit or written[row >> 3] >> (row & 7) & 1:
            continue
        if count == marks.shape[0]:
            return i, count
        written[row >> 3] |= 1 << (row & 7)
        at, to = U(row) * pitch, U(count) * pitch
        if owner[row // BLOCK] > 0 and words[at + U(1)] > 0:  # else nobody's, or not begun
            for j in range(pitch):
                out[to + j] = words[at + j]
            marks[count, 0], marks[count, 1], marks[count, 2] = owner[row // BLOCK], 0, 0
            if usage.shape[0]:
                marks[count, 1], marks[count, 2] = usage[row, 0], usage[row, 1]
            count += 1
    return rows.size, count
