"""Turns a fork of the fork server into a process that looks like a newly started one to its script."""

from __future__ import annotations

import faulthandler
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing import current_process
from pathlib import Path

from anabranch.held_error import hold_back_errors
from anabranch.launch.forks.main_script import run_as_main
from anabranch.launch.forks.thread_limits import limit_threads
from anabranch.launch.forks.title import set_title
from anabranch.launch.python_program import PythonProgram
from anabranch.launch.socket_messages import Message
from anabranch.launch.supervision.parent_death import prctl
from anabranch.record.process import record_process

__all__ = ["ForkedProcess", "ignored_signals", "umask"]

_PR_SET_PDEATHSIG = 1
_ADOPTION_SECONDS = 20.0
_AUTHENTICATION_KEY_BYTES = 32
# The interpreter ignores these in every process.
_PYTHONS_OWN = {signal.SIGPIPE, signal.SIGXFSZ}


@dataclass(frozen=True, slots=True)
class ForkedProcess:
    """A process that the launcher requested, and the settings that it inherits from the launcher.

    Attributes:
        name: in ``ps`` and ``top``.
        program: what it runs.
        environment: complete.
        launcher: the process that is to be its parent.
        ignored: the signals that the launcher ignores.
        blocked: the signals that it blocks.
        umask: the permissions that it takes from new files.
        stdio: its stdin, stdout and stderr.
        directory: where it starts.
        report: receives its process id once it runs on its own, or the reason why it does not.
    """

    name: str
    program: PythonProgram
    environment: dict[str, str]
    launcher: int
    ignored: tuple[int, ...]
    blocked: tuple[int, ...]
    umask: int
    stdio: tuple[int, int, int]
    directory: int
    report: int

    @classmethod
    def from_message(cls, message: Message, descriptors: Sequence[int]) -> ForkedProcess:
        """Return the role that ``to_message`` wrote, with the descriptors that came along."""
        stdin, stdout, stderr, directory, report = descriptors
        facts = dict(message)
        program = dict(facts.pop("program"))  # type: ignore[call-overload]
        return cls(
            program=PythonProgram(**{**program, "arguments": tuple(program["arguments"])}),
            stdio=(stdin, stdout, stderr),
            directory=directory,
            report=report,
            **facts,  # type: ignore[arg-type]
        )

    def to_message(self) -> tuple[Message, list[int]]:
        """Its form as a message to the fork server."""
        message: Message = {
            "name": self.name,
            "program": asdict(self.program),
            "environment": self.environment,
            "launcher": self.launcher,
            "ignored": self.ignored,
            "blocked": self.blocked,
            "umask": self.umask,
        }
        return message, [*self.stdio, self.directory, self.report]

    def close(self) -> None:
        """Close the descriptors that came with it."""
        for descriptor in (*self.stdio, self.directory, self.report):
            os.close(descriptor)

    def refuse(self, why: str) -> None:
        """Tell the launcher, if it is still alive, that the process was not created."""
        with suppress(OSError):
            os.write(self.report, f"error {why}".encode())

    def take_over(self) -> None:
        """Turn this fork into the role's process."""
        try:
            os.setsid()
            self._tie_to_launcher()
            self._set_state()
            os.write(self.report, str(os.getpid()).encode())
        except Exception as error:  # noqa: BLE001 any error is reported to the launcher
            self.refuse(f"{type(error).__name__}: {error}")
            os._exit(1)
        os.close(self.report)

    def run(self) -> None:
        """Run the program; exceptions go to the interpreter, as usual."""
        run_as_main(self.program)

    def _tie_to_launcher(self) -> None:
        """From now on the kernel kills this process when the launcher dies."""
        end = time.monotonic() + _ADOPTION_SECONDS
        while os.getppid() != self.launcher:
            if time.monotonic() > end:
                raise TimeoutError(f"the launcher (pid {self.launcher}) is gone")
            time.sleep(0.0002)
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != self.launcher:
            raise ProcessLookupError(f"the launcher (pid {self.launcher}) is gone")

    def _set_state(self) -> None:
        for target, descriptor in enumerate(self.stdio):
            os.dup2(descriptor, target)
            os.close(descriptor)
        os.fchdir(self.directory)
        os.close(self.directory)
        os.umask(self.umask)
        _set_signals(self.ignored, self.blocked)
        os.environ.clear()
        os.environ.update(self.environment)
        hold_back_errors()
        set_title(self.name, self.program.command, self.environment)
        time.tzset()
        tempfile.tempdir = None
        _seed_anew()
        limit_threads(self.environment)
        if self.environment.get("PYTHONFAULTHANDLER"):
            faulthandler.enable()
        record_process()


def ignored_signals() -> tuple[int, ...]:
    """Return the signals that this process and its children ignore."""
    return tuple(sorted(number for number in _changeable_signals() if signal.getsignal(number) is signal.SIG_IGN))


def umask() -> int:
    """Return the permissions that this process takes from new files, read without setting them for a moment."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("Umask:"):
            return int(line.split()[1], 8)
    raise AssertionError("/proc/self/status has no Umask")


def _changeable_signals() -> set[signal.Signals]:
    fixed = {signal.SIGKILL, signal.SIGSTOP, *_PYTHONS_OWN}
    return {signal.Signals(number) for number in signal.valid_signals() if number in set(signal.Signals)} - fixed


def _set_signals(ignored: Sequence[int], blocked: Sequence[int]) -> None:
    for number in _changeable_signals():
        usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        wanted = signal.SIG_IGN if number in ignored else usual
        if signal.getsignal(number) is not wanted:
            signal.signal(number, wanted)
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _seed_anew() -> None:
    """Forks share their server's generators, while each started process has its own seeds."""
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()
    current_process().authkey = os.urandom(_AUTHENTICATION_KEY_BYTES)
