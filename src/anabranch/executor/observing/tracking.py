"""``Executor.track``: the progress of a loop, on one line of the terminal, or without one a line every few seconds.

Rank 0 writes to its stderr, which ``anabranch run`` shows. On a terminal the line is redrawn in place, and output of
the script goes above it. Where ``anabranch run`` draws its own screen the line is part of that, and nothing is written
here.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass
from typing import Protocol, TextIO, TypeVar, cast, overload

from anabranch.deadline import minutes_and_seconds
from anabranch.record.process import PROGRESS_VARIABLE

__all__ = ["Progress", "TextStream"]

_T = TypeVar("_T")

_REDRAW = 0.25  # seconds between two drawings on a terminal
_REPEAT = 5.0  # seconds between two lines elsewhere
_CLEAR = "\r\x1b[K"
_COLUMNS = 80


class TextStream(Protocol):
    """The part of a text file that progress is written to."""

    def write(self, text: str, /) -> int: ...

    def flush(self) -> None: ...

    def isatty(self) -> bool: ...

    def fileno(self) -> int: ...


@dataclass(slots=True)
class _Loop:
    """One loop in progress."""

    label: str | None
    total: int | None
    started: float
    done: int = 0

    def count(self) -> str:
        """Return the label and the count, such as ``epoch 3/10``."""
        count = str(self.done) if self.total is None else f"{self.done}/{self.total}"
        return f"{self.label} {count}" if self.label else count

    def line(self, now: float) -> str:
        """Return the count, the rate and the time left."""
        parts = [self.count()]
        if self.total:
            parts[0] += f" {100 * self.done // self.total}%"
        seconds = now - self.started
        if self.done and seconds > 0:
            rate = self.done / seconds
            parts.append(f"{rate:.1f}/s" if rate >= 1 else f"{1 / rate:.1f} s each")
            if self.total is not None:
                left = max(0, self.total - self.done) / rate
                parts.append(
                    f"{minutes_and_seconds(left)} left"
                    if self.done < self.total
                    else f"took {minutes_and_seconds(seconds)}"
                )
        return " · ".join(parts)


class Progress:
    """The tracked loops of one executor, one inside the other.

    Args:
        shown: whether this process shows them: rank 0.
        stream: where; ``sys.stderr`` by default.
        clock: seconds.
    """

    def __init__(
        self, shown: bool, stream: TextStream | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._shown = shown
        self._stream = stream
        self._clock = clock
        self._loops: list[_Loop] = []
        self._next = 0.0
        self._drawn = False
        self._mid_line = False  # the script has printed the beginning of a line
        self._replaced: dict[str, tuple[TextIO, TextIO]] = {}
        self._style = os.environ.get(PROGRESS_VARIABLE, "")

    def loops(self) -> list[dict[str, object]]:
        """Return how far the loops are, for the process's record."""
        now = self._clock()
        return [
            {"label": loop.label, "done": loop.done, "total": loop.total, "seconds": now - loop.started}
            for loop in tuple(self._loops)
        ]

    @overload
    def track(self, over: int, label: str | None = None) -> Iterator[int]: ...

    @overload
    def track(self, over: Iterable[_T], label: str | None = None) -> Iterator[_T]: ...

    def track(self, over: int | Iterable[_T], label: str | None = None) -> Iterator[int] | Iterator[_T]:
        """Return an iterator over ``over`` that shows its progress.

        Raises:
            TypeError, ValueError: no number of at least 0, and nothing to iterate over; a label that is not a string.
        """
        if isinstance(over, bool) or not isinstance(over, int | Iterable):
            raise TypeError(f"track takes something to iterate over, or a number of rounds, got {over!r}")
        if isinstance(over, int) and over < 0:
            raise ValueError(f"track takes a number of rounds of at least 0, got {over}")
        if not isinstance(label, str | None):
            raise TypeError(f"label is a string, got {label!r}")
        items = cast("Iterable[_T]", range(over)) if isinstance(over, int) else over
        return self._rounds(items, label) if self._shown else iter(items)

    def _rounds(self, items: Iterable[_T], label: str | None) -> Iterator[_T]:
        loop = _Loop(label, _length(items), self._clock())
        if not self._loops:
            self._begin(loop.started)
        self._loops.append(loop)
        try:
            for item in items:
                yield item
                loop.done += 1
                now = self._clock()
                if now >= self._next:
                    self._show(now)
        finally:
            self._end(loop)

    def _begin(self, now: float) -> None:
        if self._terminal():
            self._next = now
            self._put_prints_above()
        else:
            self._next = now + _REPEAT

    def _end(self, loop: _Loop) -> None:
        if loop not in self._loops:
            return
        now = self._clock()
        outermost = self._loops[0] is loop
        if outermost and (self._terminal() or now - loop.started >= _REPEAT):
            del self._loops[1:]
            self._show(now, ends=True)
        self._loops.remove(loop)
        if outermost:
            self._restore_prints()
            if self._drawn:
                self._write("\n")
            self._drawn = False

    def _show(self, now: float, *, ends: bool = False) -> None:
        if not self._loops or self._mid_line:
            return
        if self._style == "screen" and not ends:
            self._next = float("inf")
            return
        line = " · ".join([*(loop.count() for loop in self._loops[:-1]), self._loops[-1].line(now)])
        if self._terminal():
            self._next = now + _REDRAW
            room = self._columns() - 1
            self._write(f"{_CLEAR}{line if len(line) <= room else '…' + line[1 - room :]}")
            self._drawn = True
        else:
            self._next = now + _REPEAT
            self._write(f"{line}\n")

    def _out(self) -> TextStream:
        if self._stream is not None:
            return self._stream
        return self._replaced["stderr"][0] if "stderr" in self._replaced else sys.stderr

    def _terminal(self) -> bool:
        out = cast("TextStream | None", self._out())
        return not self._style and out is not None and out.isatty()

    def _columns(self) -> int:
        try:
            return os.get_terminal_size(self._out().fileno()).columns or _COLUMNS
        except (OSError, ValueError):
            return _COLUMNS

    def _write(self, text: str) -> None:
        out = cast("TextStream | None", self._out())
        if out is None:
            return
        try:
            out.write(text)
            out.flush()
        except (OSError, ValueError):  # a terminal that was closed ends no training
            self._shown = False

    # What the script prints meanwhile.

    def _put_prints_above(self) -> None:
        for name in ("stdout", "stderr"):
            stream = cast("TextIO | None", getattr(sys, name))
            if self._stream is None and stream is not None and stream.isatty():
                above = cast(TextIO, _Above(stream, self._make_room))
                self._replaced[name] = stream, above
                setattr(sys, name, above)

    def _restore_prints(self) -> None:
        for name, (stream, above) in self._replaced.items():
            if getattr(sys, name) is above:
                setattr(sys, name, stream)
        self._replaced = {}

    def _make_room(self, text: str) -> None:
        """Remove the line before the script prints ``text``."""
        if self._drawn:
            self._drawn = False
            self._write(_CLEAR)
        if text:
            self._mid_line = not text.endswith("\n")


class _Above:
    """A stream of the script while a line is drawn on its terminal: the line is moved below the output."""

    def __init__(self, stream: TextIO, make_room: Callable[[str], None]) -> None:
        self._of = stream
        self._make_room = make_room

    def write(self, text: str) -> int:
        self._make_room(text)
        return self._of.write(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> object:
        return getattr(self._of, name)


def _length(items: Iterable[object]) -> int | None:
    try:
        return len(items) if isinstance(items, Sized) else None
    except TypeError:  # a DataLoader over an iterable dataset has a method that raises
        return None
