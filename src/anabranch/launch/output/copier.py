"""Copies rank 0's output to the screen and to its log; run as a program by ``screen.py``, without Anabranch.

    python copier.py LOG TERMINAL SOURCE TARGET [SOURCE TARGET]

All are descriptors but TERMINAL, which is 1 where the screen is one. A process of its own, in a session of its own, so
that rank 0 never waits for a launcher that stands still: neither Ctrl-Z nor SIGSTOP of the launcher reaches it. Its
stdin is the channel to the launcher, which sends one letter at a time and reads ``DONE`` for each.
"""

from __future__ import annotations

import os
import select
import sys
from contextlib import suppress

__all__ = ["Copier", "DONE", "END", "FINISH_LINE", "HIDE", "SHOW"]

FINISH_LINE = b"l"
"""Copy what has come, and go to a new line if that ends in the middle of one."""

HIDE = b"h"
"""From now on to the log alone."""

SHOW = b"s"
"""On the screen again, too."""

END = b"e"
"""Copy what has come, however long the screen's reader takes, and end. Without it the launcher was killed."""

DONE = b"."

_CHUNK = select.PIPE_BUF  # what a pipe that is ready takes without blocking
_LOG_CHUNK = 1 << 16
_ROOM_MILLISECONDS = 1000
_SHOW_CURSOR = b"\x1b[?25h"  # a progress bar hides it, and one that was killed does not show it again


class Copier:
    """One run of the program.

    Args:
        channel: to the launcher.
        log: takes everything.
        targets: descriptors to copy from, each with the one that it is shown on.
        terminal: whether those are a terminal.
    """

    def __init__(self, channel: int, log: int, targets: dict[int, int], terminal: bool) -> None:
        self._channel = channel
        self._log = log
        self._targets = targets
        self._terminal = terminal
        self._open = set(targets)  # sources that have not ended
        self._unread: set[int] = set()  # targets without a reader (`| head`): the log goes on
        self._shown = True
        self._log_lost = False
        self._mid_line = False
        for source in targets:
            os.set_blocking(source, False)

    def run(self) -> None:
        """Copy until it is told to end, or nobody is left to tell it."""
        while True:
            ready = self._wait()
            for source in sorted(self._open & ready):
                self._copy(source)
            if self._channel in ready and self._obey(self._order()):
                return

    def _wait(self) -> set[int]:
        poller = select.poll()
        poller.register(self._channel, select.POLLIN)
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
        """Do what the launcher asks for; True if that is to end."""
        if order == END:
            for source in sorted(self._open):
                while self._copy(source):
                    pass
        else:
            self._shown = self._shown and order != b""  # nobody waits for a reader on behalf of a dead launcher
            for source in sorted(self._open):
                while not self._blocked(source) and self._copy(source):
                    pass
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

    def _visible(self, target: int) -> bool:
        return self._shown and target not in self._unread

    def _blocked(self, source: int) -> bool:
        """Tell whether what comes from ``source`` could not be shown now without waiting for the screen's reader."""
        target = self._targets[source]
        return self._visible(target) and not _has_room(target, 0)

    def _copy(self, source: int) -> bool:
        """Copy some of what has come from ``source``; False if there was nothing."""
        target = self._targets[source]
        try:
            data = os.read(source, _CHUNK if self._visible(target) else _LOG_CHUNK)
        except BlockingIOError:
            return False
        except OSError:  # a terminal that nobody holds any more
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
            try:
                _write(target, data)
            except OSError:  # a pipe that nobody reads any more, a terminal that was closed, a full disk
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
        except BlockingIOError:  # somebody we share it with has made it non-blocking
            _has_room(target, _ROOM_MILLISECONDS)


if __name__ == "__main__":
    numbers = [int(argument) for argument in sys.argv[1:]]
    Copier(0, numbers[0], dict(zip(numbers[2::2], numbers[3::2], strict=True)), bool(numbers[1])).run()
