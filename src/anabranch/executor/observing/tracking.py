"""``Executor.track``: the progress of a loop, on one line of the terminal, or without one a line every few seconds.

Rank 0 writes to its stderr, which ``anabranch run`` shows. On a terminal rich redraws the line in place, and output of
the script goes above it.
"""

from __future__ import annotations

import math
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

from anabranch.deadline import minutes_and_seconds

if TYPE_CHECKING:
    from rich.live import Live

_REDRAW = 0.25  # seconds between two drawings on a terminal
_REPEAT = 5.0  # seconds between two lines elsewhere


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
            if self.total is not None and self.done < self.total:
                parts.append(f"{minutes_and_seconds((self.total - self.done) / rate)} left")
            elif self.total is not None:
                parts.append(f"took {minutes_and_seconds(seconds)}")
        return " · ".join(parts)


class Progress:
    """The tracked loops of one executor, one inside the other.

    Args:
        shown: whether this process shows them: rank 0; may be set.
        stream: where; ``sys.stderr`` by default.
        clock: seconds.
    """

    def __init__(self, shown: bool, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.shown = shown
        self._stream = stream
        self._clock = clock
        self._loops: list[_Loop] = []
        self._next = 0.0
        self._live: Live | None = None

    def loops(self) -> list[dict[str, object]]:
        """Return how far the loops are, for the process's record."""
        now = self._clock()
        return [
            {"label": loop.label, "done": loop.done, "total": loop.total, "seconds": now - loop.started}
            for loop in tuple(self._loops)
        ]

    def track(self, over: int | Iterable[Any], label: str | None = None) -> Iterator[Any]:
        """Return an iterator over ``over`` that shows its progress.

        Raises:
            TypeError, ValueError: no number of at least 0, and nothing to iterate over.
        """
        if isinstance(over, bool) or not isinstance(over, int | Iterable):
            raise TypeError(f"track takes something to iterate over, or a number of rounds, got {over!r}")
        if isinstance(over, int) and over < 0:
            raise ValueError(f"track takes a number of rounds of at least 0, got {over}")
        items = range(over) if isinstance(over, int) else over
        return self._rounds(items, label) if self.shown else iter(items)

    def _rounds(self, items: Iterable[object], label: str | None) -> Iterator[object]:
        loop = _Loop(label, _length(items), self._clock())
        if not self._loops:
            self._live = _live(self._stream)
            self._next = loop.started + (0.0 if self._live is not None else _REPEAT)
        self._loops.append(loop)
        try:
            for item in items:
                yield item
                loop.done += 1
                if self._clock() >= self._next:
                    self._show()
        finally:
            self._end(loop)

    def _end(self, loop: _Loop) -> None:
        if loop not in self._loops:
            return  # the loop around it was left first
        if loop is self._loops[0]:
            del self._loops[1:]
            if self._live is not None or self._clock() - loop.started >= _REPEAT:
                self._show()
            live, self._live = self._live, None
            with suppress(OSError, ValueError):
                if live is not None:
                    live.stop()
        self._loops.remove(loop)

    def _show(self) -> None:
        now = self._clock()
        line = " · ".join([*(loop.count() for loop in self._loops[:-1]), self._loops[-1].line(now)])
        self._next = now + (_REPEAT if self._live is None else _REDRAW)
        try:
            if self._live is None:
                stream = self._stream or sys.stderr
                stream.write(f"{line}\n")
                stream.flush()
            else:
                from rich.text import Text  # it was imported with the live line

                self._live.update(Text(line, no_wrap=True, overflow="ellipsis"), refresh=True)
        except (AttributeError, OSError, ValueError):  # a terminal that was closed, or is none, ends no training
            self._next = math.inf


def _live(stream: TextIO | None) -> Live | None:
    """Return a line on the terminal, which the script's output goes above; ``None`` where there is no terminal."""
    drawn = random.getstate()  # from which rich draws as it is imported
    from rich.console import Console
    from rich.live import Live

    random.setstate(drawn)
    # What the script prints goes through it as it is.
    console = Console(file=stream or sys.stderr, soft_wrap=True, markup=False, emoji=False, highlight=False)
    if not console.is_terminal:
        return None
    out, err = (stream is not None and stream.isatty() for stream in (sys.stdout, sys.stderr))
    live = Live(console=console, auto_refresh=False, redirect_stdout=out, redirect_stderr=err)
    with suppress(OSError, ValueError):
        live.start()
    return live


def _length(items: Iterable[object]) -> int | None:
    try:
        return len(items) if isinstance(items, Sized) else None
    except TypeError:  # a DataLoader over an iterable dataset has a method that raises
        return None
