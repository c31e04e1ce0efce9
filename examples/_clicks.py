"""Clicks as text: Criteo's and Adult's own formats, read a batch of lines at a time, and what a prediction is worth.

::

    file ──> lines of a batch ──> this worker's share ──> fields ──> numbers and categories ──> tensors

Every worker sees where all lines end, and reads the fields of its own: W workers with a W-th of each batch have read
what one worker reads, and if one of them is lost, the others share the same batch out anew. The position is a byte and
a line number, so a restart goes on without reading what was read.

Fields are found and read a column of characters at a time, by numpy. Shapes: n lines, k fields.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Bytes = NDArray[np.uint8]
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Batch = dict[str, Tensor]

BLOCK = 1 << 20
LINE_FEED = 10
MISSING = -1
_HEXADECIMAL = np.full(256, 255, np.uint8)
for _digit in b"0123456789abcdefABCDEF":
    _HEXADECIMAL[_digit] = int(chr(_digit), 16)
_DECIMAL = np.full(256, 255, np.uint8)
_DECIMAL[48:58] = np.arange(10)


class BadLine(ValueError):
    """A line that is not what its format says; ``str`` tells the file, the line and what is wrong with it."""

    def __init__(self, where: str, line: int, reason: str) -> None:
        super().__init__(f"{where}, line {line}: {reason}")
        self.line = line
        self.reason = reason


class _BadRow(Exception):
    """The same, of a row among those that are read together."""

    def __init__(self, row: int, reason: str) -> None:
        super().__init__(reason)
        self.row = row


# Fields. --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fields:
    """Where the fields of some lines begin in ``text`` and how long they are: (n, k) each."""

    text: Bytes
    starts: Ints
    lengths: Ints

    def of(self, columns: slice) -> Fields:
        return Fields(self.text, self.starts[:, columns], self.lengths[:, columns])

    def without(self, first: NDArray[np.bool_], last: NDArray[np.bool_] | None = None) -> Fields:
        """Without their first or last character where it says so."""
        gone = first if last is None else first.astype(np.int64) + last
        return Fields(self.text, self.starts + first, self.lengths - gone)

    def characters(self, place: int) -> tuple[Bytes, NDArray[np.bool_]]:
        """Return the character at a place of each field, and whether the field is that long."""
        return self.text[np.minimum(self.starts + place, len(self.text) - 1)], self.lengths > place

    def first_is(self, character: str) -> NDArray[np.bool_]:
        found, there = self.characters(0)
        return there & (found == ord(character))

    def refuse(self, bad: NDArray[np.bool_], first_column: int, reason: str) -> None:
        """Raise for the first field that is ``bad``, if there is one."""
        if bad.any():
            row, column = (int(index) for index in np.argwhere(bad)[0])
            start = self.starts[row, column]
            found = self.text[start : start + self.lengths[row, column]].tobytes().decode(errors="replace")
            raise _BadRow(row, f"field {first_column + column + 1} is {found!r}, not {reason}")


def split(text: Bytes, separator: str, fields: int) -> Fields:
    ends = np.flatnonzero((text == ord(separator)) | (text == LINE_FEED))
    counts = np.diff(np.flatnonzero(text[ends] == LINE_FEED), prepend=-1)
    if (counts != fields).any():
        row = int(np.flatnonzero(counts != fields)[0])
        raise _BadRow(row, f"{counts[row]} fields, not {fields}")
    starts = np.concatenate([[0], ends[:-1] + 1]) if len(ends) else ends
    return Fields(text, starts.reshape(-1, fields), (ends - starts).reshape(-1, fields))


def whole_numbers(fields: Fields, first_column: int) -> Floats:
    """Numbers, and NaN for empty fields."""
    negative = fields.first_is("-")
    digits = fields.without(negative)
    values, bad = np.zeros(digits.starts.shape, np.int64), negative & (digits.lengths == 0)
    bad |= digits.lengths > 18
    for place in range(int(digits.lengths.max(initial=0, where=~bad))):
        found, there = digits.characters(place)
        digit = _DECIMAL[found]
        bad |= there & (digit == 255)
        values = np.where(there, values * 10 + digit, values)
    fields.refuse(bad, first_column, "a whole number of at most 18 digits, or empty")
    return np.where(fields.lengths == 0, np.nan, np.where(negative, -values, values))


def hexadecimal(fields: Fields, first_column: int) -> Ints:
    """Categories that are 32 bits in hexadecimal, and MISSING for empty fields."""
    values, bad = np.zeros(fields.starts.shape, np.int64), fields.lengths > 8
    for place in range(int(fields.lengths.max(initial=0, where=~bad))):
        found, there = fields.characters(place)
        digit = _HEXADECIMAL[found]
        bad |= there & (digit == 255)
        values = np.where(there, values << 4 | digit, values)
    fields.refuse(bad, first_column, "a hexadecimal number of at most 8 digits, or empty")
    return np.where(fields.lengths == 0, MISSING, values)


def words(fields: Fields) -> Ints:
    """Categories that are words, as 32 bits that depend on all their letters, and MISSING for empty ones."""
    values = np.zeros(fields.starts.shape, np.uint64)
    for place in range(int(fields.lengths.max(initial=0))):
        found, there = fields.characters(place)
        values = np.where(there, mixed(values + found + np.uint64(1)), values)
    return np.where(fields.lengths == 0, MISSING, (values >> np.uint64(32)).astype(np.int64))


def mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """64 bits in which every bit of a value has its part, one to one."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


# Formats. -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Rows:
    """What n lines say: clicked or not (n,), numbers with NaN where missing (n, N), categories or MISSING (n, F)."""

    clicked: Floats
    numbers: Floats
    categories: Ints


@dataclass(frozen=True, slots=True)
class Format:
    """How lines are read: how many numbers and categories each has, and the function that finds them."""

    name: str
    numbers: int
    categories: int
    read: Callable[[Bytes], Rows]


def read_criteo(text: Bytes) -> Rows:
    """Label, 13 whole numbers and 26 hexadecimal categories, any of them empty, with tabs between."""
    fields = split(text, "\t", 40)
    clicked = whole_numbers(fields.of(slice(0, 1)), 0)
    fields.of(slice(0, 1)).refuse((clicked != 0) & (clicked != 1) | np.isnan(clicked), 0, "the label 0 or 1")
    numbers = whole_numbers(fields.of(slice(1, 14)), 1)
    return Rows(clicked[:, 0], numbers, hexadecimal(fields.of(slice(14, 40)), 14))


_ADULT_NUMBERS = [0, 2, 4, 10, 11, 12]
_ADULT_WORDS = [1, 3, 5, 6, 7, 8, 9, 13]


def read_adult(text: Bytes) -> Rows:
    """14 numbers and words and the label, with commas between; ``?`` is missing, labels may end in a dot.

    ``numbers`` are age, weight, years of education, capital gain and loss, and hours a week.
    """
    fields = split(text, ",", 15)
    fields = fields.without(fields.first_is(" "))
    fields = fields.without(fields.first_is("?") & (fields.lengths == 1))
    numbers = np.concatenate([whole_numbers(fields.of(slice(at, at + 1)), at) for at in _ADULT_NUMBERS], 1)
    label = fields.of(slice(14, 15))
    more = label.first_is(">")
    label.refuse(~more & ~label.first_is("<"), 14, "<=50K or >50K")
    picked = Fields(fields.text, fields.starts[:, _ADULT_WORDS], fields.lengths[:, _ADULT_WORDS])
    return Rows(more[:, 0].astype(np.float64), numbers, words(picked))


FORMATS = {
    "criteo": Format("criteo", 13, 26, read_criteo),
    "adult": Format("adult", 6, 8, read_adult),
}


# Files. ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Part:
    """The lines of a file between two bytes; ``end`` ``None`` is the file's end."""

    path: Path
    begin: int = 0
    end: int | None = None

    def fingerprint(self) -> int:
        """Of its size and its ends."""
        size = self.path.stat().st_size
        with self.path.open("rb") as file:
            found = zlib.crc32(file.read(1 << 16), size)
            file.seek(max(0, size - (1 << 16)))
            return zlib.crc32(file.read(), found)


def split_file(path: Path, held_out: int) -> tuple[Part, Part]:
    """Return what is trained on, and the last ``held_out`` bytes or so, from the start of a line."""
    size = path.stat().st_size
    with path.open("rb") as file:
        file.seek(max(0, size - held_out))
        file.readline()
        cut = file.tell()
    return Part(path, 0, cut), Part(path, cut)


class Clicks:
    """Batches of a file's lines, one after the other; ``share`` gives a worker's part of one, and knows its position.

    Args:
        part: which lines.
        form: how they are read.
        batch: lines a batch, of all workers together; the last may have fewer.
        rows: ids are hashed to ``range(rows)``; ``None`` keeps each category of each field apart, as an int64.

    A batch has ``numbers`` (B, 2 N), each as the logarithm of its size and whether it is missing; ``ids`` (B, F); and
    ``clicked`` (B,).

    Raises:
        BadLine: a line of another form; the batches behind its own can be read.
    """

    _step: int  # of the batch at hand
    _at: int  # where it begins
    _line: int
    _text: Bytes
    _ends: Ints
    _following: Iterator[tuple[Bytes, Ints]]

    def __init__(self, part: Part, form: Format, batch: int, *, rows: int | None) -> None:
        self.part, self.form, self.batch = part, form, batch
        self._rows = rows
        self.load_state_dict({"step": 0, "at": part.begin, "line": 1})

    def __iter__(self) -> Iterator[Batch]:
        """Yield all batches once, whole."""
        line = 1
        for text, ends in _batches(self.part, self.part.begin, self.batch):
            yield self._tensors(text, line)
            line += len(ends)

    def share(self, step: int, rank: int, workers: int) -> Batch:
        """Return the part of worker ``rank`` of the batch behind the first ``step`` ones; epochs follow each other."""
        if step < self._step or (step == self._step and not len(self._ends)):
            self.load_state_dict({"step": 0, "at": self.part.begin, "line": 1})
        while self._step < step:
            self._take_next()
        first, last = (len(self._ends) * (rank + more) // workers for more in (0, 1))
        begin, end = (int(self._ends[number - 1]) + 1 if number else 0 for number in (first, last))
        return self._tensors(self._text[begin:end], self._line + first)

    def _take_next(self) -> None:
        self._at, self._line = self._at + len(self._text), self._line + len(self._ends)
        batch = next(self._following, None)
        if batch is None:  # the next epoch
            self._at, self._line, self._following = self.part.begin, 1, _batches(self.part, self.part.begin, self.batch)
            batch = next(self._following, None)
        if batch is None:
            raise ValueError(f"{self.part.path} has no lines to train on")
        self._text, self._ends = batch
        self._step += 1

    def _tensors(self, share: Bytes, line: int) -> Batch:
        numbers_of_lines = None
        if self.form.name == "adult":
            share, numbers_of_lines = _without_remarks(share)
        if (share == 13).any():  # lines may end as they do on Windows
            share = np.frombuffer(share.tobytes().replace(b"\r\n", b"\n"), np.uint8)
        try:
            rows = self.form.read(share)
        except _BadRow as bad:
            row = bad.row if numbers_of_lines is None else int(numbers_of_lines[bad.row])
            name = str(self.part.path) if not self.part.begin else f"{self.part.path} from byte {self.part.begin}"
            raise BadLine(name, line + row, str(bad)) from None
        missing = np.isnan(rows.numbers)
        size = np.where(missing, 0.0, rows.numbers)
        numbers = np.concatenate([np.sign(size) * np.log1p(np.abs(size)), missing], 1)
        return {
            "numbers": torch.from_numpy(numbers.astype(np.float32)),
            "ids": torch.from_numpy(ids_of(rows.categories, self._rows)),
            "clicked": torch.from_numpy(rows.clicked.astype(np.float32)),
        }

    def state_dict(self) -> dict[str, int]:
        """Return the number of the batch at hand, or else of the first, and where it begins: byte and line.

        It may have to be shared out again.
        """
        return {"step": self._step + (not len(self._ends)), "at": self._at, "line": self._line}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Let ``share`` go on from there."""
        self._step, self._at, self._line = state["step"] - 1, state["at"], state["line"]
        self._following = _batches(self.part, self._at, self.batch)
        self._text, self._ends = np.empty(0, np.uint8), np.empty(0, np.int64)


def _batches(part: Part, begin: int, batch: int) -> Iterator[tuple[Bytes, Ints]]:
    """Return the text of each batch, and where its lines end; a last line without an end is given one."""
    end = part.path.stat().st_size if part.end is None else part.end
    text, ends = np.empty(0, np.uint8), np.empty(0, np.int64)
    while True:
        while len(ends) < batch and begin < end:
            more = np.fromfile(part.path, np.uint8, min(BLOCK, end - begin), offset=begin)  # no file stays open
            begin = begin + len(more) if len(more) else end
            text = np.concatenate([text, more])
            if begin >= end and len(text) and text[-1] != LINE_FEED:
                text = np.append(text, np.uint8(LINE_FEED))
            ends = np.flatnonzero(text == LINE_FEED)
        if not len(ends):
            return
        taken = ends[:batch]
        size = int(taken[-1]) + 1
        yield text[:size], taken
        text, ends = text[size:], ends[batch:] - size


def ids_of(categories: Ints, rows: int | None) -> Ints:
    """Return the id of each category of each field: apart from those of all other fields, then hashed to a row."""
    fields = np.arange(1, categories.shape[1] + 1, dtype=np.int64) << 33
    ids = fields + categories  # a missing one is the field's own, too
    return ids if rows is None else (mixed(ids.view(np.uint64)) % np.uint64(rows)).astype(np.int64)


def _without_remarks(share: Bytes) -> tuple[Bytes, Ints]:
    """Adult's files have empty lines and remarks that begin with a bar; which lines are left, too."""
    lines = share.tobytes().split(b"\n")[:-1]
    kept = [number for number, line in enumerate(lines) if line.strip() and not line.startswith(b"|")]
    text = b"".join(lines[number] + b"\n" for number in kept)
    return np.frombuffer(text, np.uint8), np.array(kept, np.int64)


# What a prediction is worth. ------------------------------------------------------------------------------------------


def area_under_curve(scores: Floats, clicked: Floats) -> float:
    """Return the probability that a click scores above what was not clicked, ties counting half.

    ``clicked`` may be probabilities: then it is what is to be expected.
    """
    _, place = np.unique(scores, return_inverse=True)
    yes, no = np.bincount(place, clicked), np.bincount(place, 1 - clicked)
    below = np.cumsum(no) - no
    return float((yes * (below + no / 2)).sum() / (yes.sum() * no.sum()))


def log_loss(probabilities: Floats, clicked: Floats) -> float:
    """In nats a line."""
    likely = np.where(clicked > 0.5, probabilities, 1 - probabilities)
    return float(-np.log(np.maximum(likely, 1e-12)).mean())
