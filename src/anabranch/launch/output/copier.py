"""Copies rank 0's output to the screen and to its log; run as a program by ``screen.py``, without Anabranch.

    python copier.py LOG TERMINAL PICTURES DRAWN SOURCE TARGET [SOURCE TARGET]

All are descriptors but TERMINAL, which is 1 where the screen is one, and DRAWN, which is 1 where another copier has
drawn pictures before this one; PICTURES is -1 where none are drawn. It is a separate process, in its own session, so
that rank 0 never waits for a stopped launcher: neither Ctrl-Z nor SIGSTOP of the launcher reaches it. Its stdin is the
channel to the launcher, which sends one letter at a time and reads ``DONE`` for each.

A picture is at the bottom of the terminal, below the region in which rank 0's output scrolls::

    1 ┌────────────────────────┐
      │ what rank 0 prints     │  the terminal's scrolling region: rank 0 draws its own progress bars here
      │ Loading: 40%|████  ▏   │  <- the cursor, always
    n └────────────────────────┘
      ── anabranch · 2 workers    the picture, drawn from outside the region, the cursor put back afterwards
      worker 0  running
"""

from __future__ import annotations

import os
import re
import select
import sys
from contextlib import suppress

__all__ = ["Copier", "DONE", "END", "FINISH_LINE", "HIDE", "Pane", "SHOW"]

FINISH_LINE = b"l"
"""Copy what has come, and go to a new line if that ends in the middle of one."""

HIDE = b"h"
"""From now on to the log alone."""

SHOW = b"s"
"""On the screen again, too."""

END = b"e"
"""Copy what has come, however long the screen's reader takes, and end. Without it the launcher was killed."""

DONE = b"."

_CHUNK = select.PIPE_BUF  # bytes that a ready pipe accepts without blocking
_LOG_CHUNK = 1 << 16
_ROOM_MILLISECONDS = 1000
_MOST_OF_A_PICTURE = 1 << 17
_TEXT_LINES = 3  # of a terminal, without which there is no picture
_SAVE, _RESTORE, _ALL_SCROLLS, _CLEAR_BELOW, _DOWN = b"\x1b7", b"\x1b8", b"\x1b[r", b"\x1b[J", b"\x1bD"
# A complete escape sequence; one may arrive in two pieces.
_WHOLE = re.compile(rb"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)|[ -/]*[0-Z\\^-~])")
_TAIL = 128
_SHOW_CURSOR = b"\x1b[?25h"  # a progress bar hides it, and a killed one does not show it again


class Pane:
    """The picture at the bottom of a terminal.

    Args:
        target: the terminal.
        drawn: whether another picture was drawn there before.
    """

    def __init__(self, target: int, drawn: bool) -> None:
        self._target = target
        self._drawn = drawn
        self._size = (0, 0)
        self._reserved = 0
        self._tail = b""

    def passed(self, data: bytes) -> None:
        """Record rank 0's output."""
        self._tail = (self._tail + data)[-_TAIL:]

    def draw(self, lines: list[bytes]) -> None:
        """Put these lines where the last ones were, unless rank 0 is in the middle of an escape sequence."""
        size = os.get_terminal_size(self._target)
        count = max(len(lines), self._reserved)
        if not lines or size.lines < count + _TEXT_LINES:
            self.remove()
            return
        if not _is_whole(self._tail):
            return
        out = b""
        if size != self._size:
            out, self._reserved, count = _SAVE + _ALL_SCROLLS + _RESTORE + _CLEAR_BELOW, 0, len(lines)
        if more := count - self._reserved:
            out += _DOWN * more + b"\x1b[%dA" % more
        top = size.lines - count
        out += _SAVE + b"\x1b[0m\x1b[1;%dr" % top
        for place in range(count):
            line = lines[place] if place < len(lines) else b""
            out += b"\x1b[%d;1H%s\x1b[0m\x1b[K" % (top + 1 + place, line)
        _write(self._target, out + _RESTORE)
        self._size, self._reserved, self._drawn = size, count, True

    def remove(self) -> None:
        """Restore the terminal as if there had been no picture."""
        if self._drawn:
            _write(self._target, _SAVE + _ALL_SCROLLS + _RESTORE + _CLEAR_BELOW)
        self._size, self._reserved, self._drawn = (0, 0), 0, False


def _is_whole(tail: bytes) -> bool:
    """Return True if ``tail`` does not end in the middle of a character or an escape sequence."""
    begin = tail.rfind(b"\x1b")
    if begin >= 0 and tail[begin - 1 : begin + 2] == b"\x1b\x1b\\":
        return True
    if begin >= 0 and not _WHOLE.match(tail, begin) and not tail.endswith(b"\x1b\\"):
        return False
    for back in range(1, min(4, len(tail)) + 1):
        first = tail[-back]
        if first >= 0xC0:
            return back >= (2 if first < 0xE0 else 3 if first < 0xF0 else 4)
        if first < 0x80:
            break
    return True


class Copier:
    """One run of the program.

    Args:
        channel: to the launcher.
        log: takes everything.
        targets: descriptors to copy from, each with the one that it is shown on.
        terminal: whether those are a terminal.
        pictures: where pictures come from, one a packet; -1 without any.
        drawn: whether a picture is there already.
    """

    def __init__(
        self,
        channel: int,
        log: int,
        targets: dict[int, int],
        terminal: bool,
        pictures: int = -1,
        drawn: bool = False,
    ) -> None:
        self._channel = channel
        self._log = log
        self._targets = targets
        self._terminal = terminal
        self._open = set(targets)  # sources that have not ended
        self._unread: set[int] = set()  # targets without a reader (`| head`): the log continues
        self._shown = True
        self._log_lost = False
        self._mid_line = False
        self._pictures = pictures
        self._pane = Pane(1, drawn) if pictures >= 0 else None
        for source in targets:
            os.set_blocking(source, False)

    def run(self) -> None:
        """Copy until the launcher ends it, or is gone."""
        while True:
            ready = self._wait()
            for source in sorted(self._open & ready):
                self._copy(source)
            if self._pictures in ready:
                self._draw()
            if self._channel in ready and self._obey(self._order()):
                return

    def _wait(self) -> set[int]:
        poller = select.poll()
        poller.register(self._channel, select.POLLIN)
        if self._pictures >= 0:
            poller.register(self._pictures, select.POLLIN)
        for source in self._open:
            if self._blocked(source):
                poller.register(self._targets[source], select.POLLOUT)
            else:
                poller.register(source, select.POLLIN)
        return {descriptor for descriptor, _ in poller.poll()}  # the channel ends with the launcher

    def _order(self) -> bytes:
        try:
            return os.read(self._channel, 1)
        except ConnectionError:  # the launcher was killed before it had read an answer
            return b""

    def _obey(self, order: bytes) -> bool:
        """Execute the launcher's request; return True if it is to end."""
        if order == END:
            for source in sorted(self._open):
                while self._copy(source):
                    pass
        else:
            self._shown = self._shown and order != b""  # do not wait for a reader after the launcher has died
            for source in sorted(self._open):
                while not self._blocked(source) and self._copy(source):
                    pass
        if order in (HIDE, END, b""):
            self._remove_picture()
        if self._mid_line and self._terminal:
            self._show(2, b"\n")
        self._mid_line = False
        if order == END and self._terminal:
            self._show(1, _SHOW_CURSOR)
        if order in (HIDE, SHOW):
            self._shown = order == SHOW
        if order in (b"", END):
            return True
        with suppress(ConnectionError):
            os.write(self._channel, DONE)
        return False

    def _draw(self) -> None:
        """Draw the newest picture, if the terminal takes it now."""
        newest = b""
        with suppress(BlockingIOError):
            while packet := os.read(self._pictures, _MOST_OF_A_PICTURE):
                newest = packet
            self._pictures = -1  # the launcher was killed
        if self._pane is not None and newest and self._visible(1) and _has_room(1, 0):
            with suppress(OSError):  # a terminal that was closed
                self._pane.draw(newest.split(b"\n"))

    def _remove_picture(self) -> None:
        if self._pane is not None:
            with suppress(OSError):
                self._pane.remove()

    def _visible(self, target: int) -> bool:
        return self._shown and target not in self._unread

    def _blocked(self, source: int) -> bool:
        """Return True if output of ``source`` could not be shown now without waiting for the screen's reader."""
        target = self._targets[source]
        return self._visible(target) and not _has_room(target, 0)

    def _copy(self, source: int) -> bool:
        """Copy some pending output of ``source``; False if there was none."""
        target = self._targets[source]
        try:
            data = os.read(source, _CHUNK if self._visible(target) else _LOG_CHUNK)
        except BlockingIOError:
            return False
        except OSError:  # a terminal without a process
            data = b""
        if not data:
            self._open.discard(source)
            return False
        self._keep(data)
        self._show(target, data)
        self._mid_line = self._shown and not data.endswith(b"\n")
        return True

    def _keep(self, data: bytes) -> None:
        if self._log_lost:
            return
        try:
            _write(self._log, data)
        except OSError as error:
            self._log_lost = True
            name = os.readlink(f"/proc/self/fd/{self._log}")
            self._show(2, f"anabranch: {name} ends here: {error.strerror}\n".encode())

    def _show(self, target: int, data: bytes) -> None:
        if self._visible(target):
            if self._pane is not None:
                self._pane.passed(data)
            try:
                _write(target, data)
            except OSError:  # a pipe without a reader, a closed terminal, a full disk
                self._unread.add(target)


def _has_room(target: int, milliseconds: int) -> bool:
    poller = select.poll()
    poller.register(target, select.POLLOUT)
    return bool(poller.poll(milliseconds))


def _write(target: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(target, view) :]
        except BlockingIOError:  # another process that shares it has made it non-blocking
            _has_room(target, _ROOM_MILLISECONDS)


if __name__ == "__main__":
    numbers = [int(argument) for argument in sys.argv[1:]]
    pairs = dict(zip(numbers[4::2], numbers[5::2], strict=True))
    Copier(0, numbers[0], pairs, bool(numbers[1]), numbers[2], bool(numbers[3])).run()
