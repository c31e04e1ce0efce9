"""Rank 0's output, live on the launcher's screen and in its log.

::

    worker 0 ──stdout, stderr──> terminal or pipe ──> copier ──> the launcher's stdout, stderr
                                                         └─────> worker-0.log

Where the launcher writes to a terminal the worker gets a terminal too (a pty of the same size, passing bytes through
unchanged), so that progress bars draw as they would without a launcher. Elsewhere it gets pipes, one for each stream,
so that ``anabranch run ... > file`` keeps stdout and stderr apart.

A slow reader (``| less``) blocks rank 0, as it would without a launcher. The launcher never does, even when stopped:
copying is done by another process, see ``copier.py``. The launcher has the sources open too, so that nothing is lost
when the copier is killed: another one continues.
"""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

from anabranch.launch.output import copier

__all__ = ["Screen"]

_OUTPUT_FLAGS = 1  # index in the list of tcgetattr
_LOCAL_FLAGS = 3
_SIZE = "HHHH"  # lines, columns, and the same in pixels
_ANSWER_SECONDS = 2.0
_LATE_ANSWERS = 64


class Screen:
    """Copies one worker's output to this process's stdout and stderr, and to a log; a context manager.

    Leaving it copies all pending output.

    Args:
        log: the file, made again.
        goes_on: keep its content.
        pictures: whether ``draw`` is to be used; on a terminal alone.

    Attributes:
        stdout: the worker's stdout.
        stderr: the worker's stderr.
        log: the path of the log.
        pidfd: of the copier; readable when that has ended, and ``revive`` is due.
    """

    def __init__(self, log: Path, *, goes_on: bool = False, pictures: bool = False) -> None:
        self.log = str(log)
        self._terminal = os.isatty(1) and os.isatty(2)
        if self._terminal:
            source, self.stdout = pty.openpty()
            self.stderr = self.stdout
            _pass_through(self.stdout)
            self._targets = {source: 1}
        else:
            out, self.stdout = os.pipe()
            err, self.stderr = os.pipe()
            self._targets = {out: 1, err: 2}
        self._given = {self.stdout, self.stderr}
        if not goes_on:
            log.write_bytes(b"")
        self._log = log.open("ab", buffering=0)
        self._picture_lines = 0
        self._pictures = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) if pictures else None
        for end in self._pictures or ():
            end.setblocking(False)
        self._copier, self._channel = self._start()
        self.pidfd = os.pidfd_open(self._copier.pid)
        self.fit()

    def revive(self) -> None:
        """Start another copier in place of one that was killed."""
        self._channel.close()
        os.close(self.pidfd)
        self._reap()
        self._copier, self._channel = self._start()
        self.pidfd = os.pidfd_open(self._copier.pid)

    def fit(self) -> None:
        """Give the worker's terminal the size of ours."""
        if not self._terminal:
            return
        with suppress(OSError):  # ours was closed
            lines, *others = struct.unpack(_SIZE, fcntl.ioctl(1, termios.TIOCGWINSZ, bytes(8)))
            size = struct.pack(_SIZE, max(lines - self._picture_lines, 0), *others)
            for source in self._targets:
                fcntl.ioctl(source, termios.TIOCSWINSZ, size)

    def draw(self, lines: Sequence[str]) -> None:
        """Keep these lines at the bottom of the terminal and the worker's output above them; on any thread.

        Skipped if the copier has not taken the last ones yet.
        """
        assert self._pictures is not None, "made without pictures"
        with suppress(OSError):
            self._pictures[0].send("\n".join(lines).encode())
        if len(lines) > self._picture_lines:
            self._picture_lines = len(lines)
            self.fit()

    def started(self) -> None:
        """Close the worker's ends here: from now on their last holder's death is the end of the stream."""
        for descriptor in self._given:
            os.close(descriptor)
        self._given = set()

    @contextmanager
    def unattended(self) -> Iterator[None]:
        """While the block runs, output goes only to the log, and this process is stopped."""
        self._order(copier.HIDE)
        try:
            yield
        finally:
            self._order(copier.SHOW)
            self.fit()

    def finish_line(self) -> None:
        """Show pending output, and start a new line if the worker left one unfinished, such as a progress bar."""
        self._order(copier.FINISH_LINE)

    def _start(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        ours, theirs = socket.socketpair()
        ours.settimeout(_ANSWER_SECONDS)
        log = self._log.fileno()
        pictures = -1 if self._pictures is None else self._pictures[1].fileno()
        drawn = str(int(self._picture_lines > 0))
        pairs = [str(number) for pair in self._targets.items() for number in pair]
        with theirs:
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-I",
                    "-S",
                    copier.__file__,
                    str(log),
                    str(int(self._terminal)),
                    str(pictures),
                    drawn,
                    *pairs,
                ],
                stdin=theirs.fileno(),
                pass_fds=(log, *self._targets, *filter(lambda number: number >= 0, [pictures])),
                start_new_session=True,
            )
        return process, ours

    def _order(self, letter: bytes) -> None:
        # A killed one is revived by the supervisor; a slow one is not waited for.
        with suppress(OSError):
            if select.select([self._channel], [], [], 0)[0]:
                self._channel.recv(_LATE_ANSWERS)
            self._channel.sendall(letter)
            self._channel.recv(1)

    def _reap(self) -> None:
        while True:
            with suppress(subprocess.TimeoutExpired):
                self._copier.wait(_ANSWER_SECONDS)
                return

    def __enter__(self) -> Screen:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.started()
            if self._copier.poll() is not None:
                self.revive()
            with suppress(OSError):
                self._channel.sendall(copier.END)
            self._copier.send_signal(signal.SIGCONT)  # one that was frozen
            self._reap()  # as long as the screen's reader takes
        finally:
            self._channel.close()
            for end in self._pictures or ():
                end.close()
            for descriptor in (self.pidfd, *self._targets):
                os.close(descriptor)
            self._log.close()


def _pass_through(terminal: int) -> None:
    """No translation of newlines and no echo here: the real terminal does both."""
    modes = termios.tcgetattr(terminal)
    modes[_OUTPUT_FLAGS] &= ~termios.OPOST
    modes[_LOCAL_FLAGS] &= ~termios.ECHO
    termios.tcsetattr(terminal, termios.TCSANOW, modes)
