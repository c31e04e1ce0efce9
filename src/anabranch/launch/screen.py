"""Rank 0's output, live on the launcher's screen and in its log.

::

    worker 0 ──stdout, stderr──> terminal or pipe ──> launcher ──> its own stdout, stderr
                                                         └───────> worker-0.log

Where the launcher writes to a terminal the worker gets a terminal too (a pty of the same size, passing bytes through
unchanged), so that progress bars draw as they would without a launcher. Elsewhere it gets pipes, one for each stream,
so that ``anabranch run ... > file`` keeps stdout and stderr apart.

A reader that does not keep up (``| less``) holds rank 0 back, as it would without a launcher, and never the launcher,
which has failures and signals to see to. A launcher that stands still (Ctrl-Z) leaves the log to another process.
"""

from __future__ import annotations

import fcntl
import os
import pty
import select
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from anabranch.launch import unattended

__all__ = ["Screen"]

_CHUNK = select.PIPE_BUF  # what a pipe that is ready takes without blocking
_ROOM_SECONDS = 1.0
_OUTPUT_FLAGS = 1  # index in the list of tcgetattr
_LOCAL_FLAGS = 3
_END_SECONDS = 5.0
_SHOW_CURSOR = b"\x1b[?25h"  # a progress bar hides it, and one that was killed does not show it again


class Screen:
    """Copies what one worker writes to this process's stdout and stderr, and to a log; a context manager.

    Leaving it copies what has come until then.

    Attributes:
        stdout: what the worker gets as its stdout.
        stderr: what the worker gets as its stderr.
        targets: descriptors to ``copy`` from, each with the descriptor of ours it is shown on.
    """

    def __init__(self, log: Path) -> None:
        self._terminal = os.isatty(1) and os.isatty(2)
        self.targets: dict[int, int] = {}
        if self._terminal:
            source, self.stdout = pty.openpty()
            self.stderr = self.stdout
            _pass_through(self.stdout)
            self.targets[source] = 1
        else:
            source, self.stdout = os.pipe()
            self.targets[source] = 1
            source, self.stderr = os.pipe()
            self.targets[source] = 2
        for source in self.targets:
            os.set_blocking(source, False)
        self._given = {self.stdout, self.stderr}
        self._log = log.open("wb", buffering=0)
        self._unread: set[int] = set()  # targets whose reader is gone (`| head`): the log goes on
        self._log_lost = False
        self._mid_line = False
        self.fit()

    def fit(self) -> None:
        """Gives the worker's terminal the size of ours."""
        if self._terminal:
            size = fcntl.ioctl(1, termios.TIOCGWINSZ, bytes(8))
            for source in self.targets:
                fcntl.ioctl(source, termios.TIOCSWINSZ, size)

    def started(self) -> None:
        """Closes the worker's ends here: from now on their last holder's death is the end of the stream."""
        for descriptor in self._given:
            os.close(descriptor)
        self._given = set()

    def blocked(self, source: int) -> bool:
        """Whether what comes from ``source`` could not be shown now without waiting for our reader."""
        return not select.select([], [self.targets[source]], [], 0)[1]

    def copy(self, source: int) -> bool:
        """Copies some of what has come from ``source``; False if there was nothing."""
        try:
            data = os.read(source, _CHUNK)
        except OSError:  # nothing yet, or EIO: a terminal that nobody holds any more
            return False
        self._keep(data)
        self._show(self.targets[source], data)
        self._mid_line = bool(data) and not data.endswith(b"\n")
        return bool(data)

    @property
    def log(self) -> str:
        """The path of the log."""
        return str(self._log.name)

    @contextmanager
    def unattended(self) -> Iterator[None]:
        """While the block runs another process copies what comes, to the log alone: this one is to stand still."""
        log, sources = self._log.fileno(), list(self.targets)
        command = [sys.executable, "-I", "-S", unattended.__file__, *map(str, (log, *sources))]
        with subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(log, *sources),
            start_new_session=True,
        ) as copier:
            try:
                yield
            finally:
                assert copier.stdin is not None
                copier.stdin.close()
                try:
                    copier.wait(_END_SECONDS)
                except subprocess.TimeoutExpired:
                    copier.kill()
        self.fit()

    def finish_line(self) -> None:
        """Goes to a new line if the worker left one unfinished on the terminal, a progress bar say."""
        if self._mid_line and self._terminal:
            self._show(2, b"\n")
        self._mid_line = False

    def _keep(self, data: bytes) -> None:
        if self._log_lost:
            return
        try:
            _write(self._log.fileno(), data)
        except OSError as error:
            self._log_lost = True
            self._show(2, f"anabranch: {self._log.name} ends here: {error.strerror}\n".encode())

    def _show(self, target: int, data: bytes) -> None:
        if target not in self._unread:
            try:
                _write(target, data)
            except BrokenPipeError:
                self._unread.add(target)

    def __enter__(self) -> Screen:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.started()
            for source in self.targets:
                while self.copy(source):
                    pass
            self.finish_line()
            if self._terminal:
                self._show(1, _SHOW_CURSOR)
        finally:
            for source in self.targets:
                os.close(source)
            self._log.close()


def _pass_through(terminal: int) -> None:
    """No translation of newlines and no echo here: the real terminal does both."""
    modes = termios.tcgetattr(terminal)
    modes[_OUTPUT_FLAGS] &= ~termios.OPOST
    modes[_LOCAL_FLAGS] &= ~termios.ECHO
    termios.tcsetattr(terminal, termios.TCSANOW, modes)


def _write(target: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(target, view) :]
        except BlockingIOError:  # somebody we share it with has made it non-blocking
            select.select([], [target], [], _ROOM_SECONDS)
