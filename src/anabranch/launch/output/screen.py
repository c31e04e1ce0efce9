"""The output of rank 0, live on the launcher's screen and in its log.

::

    worker 0 ──stdout, stderr──> terminal or pipes ──> a thread ──> worker-0.log, then the launcher's stdout, stderr

Where the launcher writes to a terminal the worker gets a terminal too (a pty of the same size, passing bytes through
unchanged), so that progress bars draw as they would without a launcher. Elsewhere it gets pipes, one for each stream,
so that ``anabranch run ... > out 2> err`` keeps stdout and stderr apart; what a process writes to one and then to the
other comes to the log in that order, a line at a time.

A slow reader (``| less``) blocks rank 0, as it would without a launcher, and not the launcher's own thread. A screen
whose reader has gone (``| head``) is forgotten: the log goes on.

Where another worker takes the place of rank 0, what that writes to its own log is shown from then on.
"""

from __future__ import annotations

import fcntl
import os
import pty
import select
import termios
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from anabranch.launch.supervision.worker import open_log, write_all

_OUTPUT_FLAGS = 1  # index in the list of tcgetattr
_LOCAL_FLAGS = 3
_LOOK_SECONDS = 2.0
_LOG_SECONDS = 0.1  # between two looks at a log that grows
_READ = 1 << 20  # more than a pipe holds
_WRITE = select.PIPE_BUF  # what a pipe that is ready takes without blocking
_SHOW_CURSOR = b"\x1b[?25h"  # a progress bar hides it, and a killed one does not show it again


class _Stream:
    """One stream of the worker.

    Attributes:
        source: where its output is read.
        target: where it is shown; ``None`` once that has no reader.
        rest: the beginning of a line.
        is_log: it is another worker's log.
        grows: that is rank 0's still, so that its end is not there yet.
    """

    def __init__(self, source: int, target: int, *, is_log: bool = False) -> None:
        os.set_blocking(source, False)
        self.source = source
        self.is_log = self.grows = is_log
        self.target: int | None = target
        self.rest = b""
        self.ended = False

    def read(self) -> bytes:
        """Return what has come; nothing at the end."""
        try:
            data = b"" if self.ended else os.read(self.source, _READ)
            self.ended = not data and not self.grows
        except BlockingIOError:
            return b""
        except OSError:  # a terminal that no process has open
            self.ended = True
            return b""
        return data


class Screen:
    """Copies one worker's output to a log, and to this process's stdout and stderr; a context manager.

    Leaving it copies all pending output.

    Args:
        log: the file, made again.
        tell: shows a line of the launcher.
        goes_on: keep the log's content.

    Attributes:
        stdout: the worker's stdout.
        stderr: the worker's stderr.
    """

    def __init__(self, log: Path, tell: Callable[[str], None] = lambda line: None, *, goes_on: bool = False) -> None:
        self._terminal = os.isatty(1) and os.isatty(2)
        if self._terminal:
            source, self.stdout = pty.openpty()
            self.stderr = self.stdout
            _pass_through(self.stdout)
            self._streams = [_Stream(source, 1)]
        else:
            out, self.stdout = os.pipe()
            err, self.stderr = os.pipe()
            self._streams = [_Stream(out, 1), _Stream(err, 2)]
        self._ends = {self.stdout, self.stderr}
        self._log = open_log(log, anew=not goes_on)
        self._name = log
        self._tell = tell
        self._lines: deque[str] = deque()
        self._wakes, self._wake = os.pipe()
        self._ending = False
        self._mid_line = False
        self._thread = threading.Thread(target=self._run, name="anabranch-screen", daemon=True)
        self.fit()

    def fit(self) -> None:
        """Give the worker's terminal the size of ours."""
        with suppress(OSError):  # ours was closed
            if self._terminal:
                size = fcntl.ioctl(1, termios.TIOCGWINSZ, bytes(8))
                fcntl.ioctl(self._streams[0].source, termios.TIOCSWINSZ, size)

    def started(self) -> None:
        """Close the worker's ends here: from now on their last holder's death is the end of the stream."""
        for descriptor in self._ends:
            os.close(descriptor)
        self._ends = set()

    def say(self, line: str) -> None:
        """Show a line of the launcher after the output that was written before; does not wait for it."""
        self._lines.append(line)
        os.write(self._wake, b"\0")

    def follow(self, log: Path) -> None:
        """Show, too, what is written to the log of another worker from now on."""
        with suppress(OSError):  # its folder was removed
            source = os.open(log, os.O_RDONLY)
            os.lseek(source, 0, os.SEEK_END)
            for before in self._streams:
                before.grows = False  # its worker is lost, and another may write there, or be rank 0 again
            self._streams = [*self._streams, _Stream(source, 1, is_log=True)]
            os.write(self._wake, b"\0")

    def _run(self) -> None:
        while True:
            ending, lines = self._ending, len(self._lines)  # what was written before them is there by now
            if self._copy():
                continue
            self._finish_lines()
            if self._lines:
                self._say(lines)
                continue  # not to the poll: the end may have come with these lines, and wakes it once
            if ending:
                return
            poller = select.poll()
            poller.register(self._wakes, select.POLLIN)
            for stream in self._streams:
                if not stream.ended and not stream.is_log:  # a file is always ready
                    poller.register(stream.source, select.POLLIN)
                elif stream.ended and stream.is_log and stream.source >= 0:  # of a former rank 0
                    os.close(stream.source)
                    stream.source = -1
            grows = any(stream.grows for stream in self._streams)
            for descriptor, _ in poller.poll(_LOG_SECONDS * 1000 if grows else None):
                if descriptor == self._wakes:
                    os.read(self._wakes, _WRITE)

    def _copy(self) -> bool:
        """Copy what has come; return True if anything has.

        The last stream is read first: what the worker wrote to stdout before is then in the pipe.
        """
        streams = self._streams
        read = [stream.read() for stream in reversed(streams)][::-1]
        for number, (stream, data) in enumerate(zip(streams, read, strict=True)):
            data = stream.rest + data
            whole = len(data) if self._terminal or any(read[number + 1 :]) else data.rfind(b"\n") + 1
            stream.rest = data[whole:]
            self._write(stream, data[:whole])
        return any(read)

    def _finish_lines(self) -> None:
        for stream in self._streams:
            self._write(stream, stream.rest)
            stream.rest = b""

    def _write(self, stream: _Stream, data: bytes) -> None:
        if not data:
            return
        self._mid_line = not data.endswith(b"\n")
        try:
            if not stream.is_log:
                write_all(self._log.fileno(), data)
        except OSError as error:
            self._log.close()
            self._log = open_log(Path(os.devnull), anew=False)
            self._lines.append(f"{self._name} ends here: {error.strerror}")
        view = memoryview(data)
        while view and stream.target is not None:
            try:
                if self._has_room(stream.target):
                    view = view[os.write(stream.target, view[:_WRITE]) :]
            except BlockingIOError:  # another process that shares it has made it non-blocking
                continue
            except OSError:  # a pipe without a reader, a closed terminal, a full disk
                stream.target = None

    def _has_room(self, target: int) -> bool:
        """Wait until the reader takes more; meanwhile the launcher's lines are shown."""
        poller = select.poll()
        poller.register(target, select.POLLOUT)
        poller.register(self._wakes, select.POLLIN)
        ready = {descriptor for descriptor, _ in poller.poll()}
        if target not in ready:
            os.read(self._wakes, _WRITE)
            self._say(len(self._lines))
        return target in ready

    def _say(self, lines: int) -> None:
        """Show the launcher's first lines; later ones follow output that may not be copied yet."""
        if not lines:
            return
        if self._mid_line and self._terminal and (target := self._streams[0].target) is not None:
            with suppress(OSError):
                os.write(target, b"\n")
        self._mid_line = False
        for _ in range(lines):
            self._tell(self._lines.popleft())

    def __enter__(self) -> Screen:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.started()
        self._ending = True
        os.write(self._wake, b"\0")
        while self._thread.is_alive():  # as long as the screen's reader takes
            self._thread.join(_LOOK_SECONDS)
        if self._terminal:
            with suppress(OSError):
                os.write(1, (b"\n" if self._mid_line else b"") + _SHOW_CURSOR)
        for descriptor in (self._wake, self._wakes, *(one.source for one in self._streams if one.source >= 0)):
            os.close(descriptor)
        self._log.close()


def _pass_through(terminal: int) -> None:
    """No translation of newlines and no echo here: the real terminal does both."""
    modes = termios.tcgetattr(terminal)
    modes[_OUTPUT_FLAGS] &= ~termios.OPOST
    modes[_LOCAL_FLAGS] &= ~termios.ECHO
    termios.tcsetattr(terminal, termios.TCSANOW, modes)
