"""Rank 0's output, live on the launcher's screen and in its log.

::

    worker 0 ──stdout, stderr──> terminal or pipe ──> launcher ──> its own stdout, stderr
                                                         └───────> worker-0.log

Where the launcher writes to a terminal the worker gets a terminal too (a pty of the same size, passing bytes through
unchanged), so that progress bars draw as they would without a launcher. Elsewhere it gets pipes, one for each stream,
so that ``anabranch run ... > file`` keeps stdout and stderr apart.
"""

from __future__ import annotations

import fcntl
import os
import pty
import termios
from contextlib import suppress
from pathlib import Path
from types import TracebackType

__all__ = ["Screen"]

_CHUNK = 1 << 16
_OUTPUT_FLAGS = 1  # index in the list of tcgetattr
_LOCAL_FLAGS = 3
_SHOW_CURSOR = b"\x1b[?25h"  # a progress bar hides it, and one that was killed does not show it again


class Screen:
    """Copies what one worker writes to this process's stdout and stderr, and to a log.

    Attributes:
        stdout: what the worker gets as its stdout.
        stderr: what the worker gets as its stderr.
        sources: descriptors to ``copy`` from whenever they are readable.
    """

    def __init__(self, log: Path) -> None:
        self._terminal = os.isatty(1) and os.isatty(2)
        self._targets: dict[int, int] = {}
        if self._terminal:
            source, self.stdout = pty.openpty()
            self.stderr = self.stdout
            _pass_through(self.stdout)
            self._targets[source] = 1
        else:
            source, self.stdout = os.pipe()
            self._targets[source] = 1
            source, self.stderr = os.pipe()
            self._targets[source] = 2
        for source in self._targets:
            os.set_blocking(source, False)
        self._log = log.open("ab", buffering=0)
        self._mid_line = False
        self.fit()

    @property
    def sources(self) -> tuple[int, ...]:
        """Descriptors to watch."""
        return tuple(self._targets)

    def fit(self) -> None:
        """Gives the worker's terminal the size of ours."""
        if self._terminal:
            size = fcntl.ioctl(1, termios.TIOCGWINSZ, bytes(8))
            fcntl.ioctl(self.sources[0], termios.TIOCSWINSZ, size)

    def started(self) -> None:
        """Closes the worker's ends here: from now on their last holder's death is the end of the stream."""
        for descriptor in {self.stdout, self.stderr}:
            os.close(descriptor)

    def copy(self, source: int) -> bool:
        """Copies what has come from ``source``; False once nothing more can come."""
        try:
            data = os.read(source, _CHUNK)
        except BlockingIOError:
            return True
        except OSError:  # a terminal without a holder answers EIO
            return False
        if not data:
            return False
        self._log.write(data)
        target = self._targets[source]
        if target >= 0 and not _write(target, data):
            self._targets[source] = -1  # nobody reads our output any more (`| head`): the log goes on
        self._mid_line = not data.endswith(b"\n")
        return True

    def finish_line(self) -> None:
        """Goes to a new line if the worker left one unfinished, a progress bar say."""
        if self._mid_line:
            _write(2, b"\n")
        self._mid_line = False

    def drain(self) -> None:
        """Copies all that was written until now."""
        for source in self.sources:
            position = -1
            while position != self._log.tell():
                position = self._log.tell()
                if not self.copy(source):
                    break

    def __enter__(self) -> Screen:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.finish_line()
        if self._terminal:
            _write(1, _SHOW_CURSOR)
        for source in self.sources:
            os.close(source)
        self._log.close()


def _pass_through(terminal: int) -> None:
    """No translation of newlines and no echo here: the real terminal does both."""
    modes = termios.tcgetattr(terminal)
    modes[_OUTPUT_FLAGS] &= ~termios.OPOST
    modes[_LOCAL_FLAGS] &= ~termios.ECHO
    termios.tcsetattr(terminal, termios.TCSANOW, modes)


def _write(target: int, data: bytes) -> bool:
    view = memoryview(data)
    with suppress(BrokenPipeError):
        while view:
            view = view[os.write(target, view) :]
        return True
    return False
