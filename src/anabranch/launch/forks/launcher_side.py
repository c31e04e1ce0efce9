"""The launcher's side of the fork server: starting it, requesting processes, and ending it.

A fork has the fork server's interpreter, libraries and everything that those read from the environment when they were
loaded. So a process whose environment differs there is started without forking, like all processes of a job with a GPU:
a CUDA driver does not survive a fork.
"""

from __future__ import annotations

import atexit
import os
import select
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from anabranch.launch.python_program import PythonProgram
from anabranch.launch.socket_messages import channel, send
from anabranch.record.process import STATUS_VARIABLE, TRACE_VARIABLE

# Without the current directory, which `-c` puts first.
_CODE = (
    "import sys; sys.path[:1] == [''] and sys.path.pop(0); from anabranch.launch.forks.fork_server import main; main()"
)
_SECONDS = 240.0  # for a fork; the first waits for the import of torch, from a cold disk, while other jobs run
_END_SECONDS = 5.0
_LONGEST_REPORT = 4096
# Bytes of arguments that the server is started with so that its forks can show theirs; what is longer is cut. And how
# much larger than the server's a fork's environment may be.
_ARGUMENTS_ROOM, _ENVIRONMENT_ROOM = 1 << 12, 1 << 14
# Left to each fork: the server has values from which every fork can be set.
_LEFT_OPEN = ("OMP_NUM_THREADS", "PYTHONFAULTHANDLER", STATUS_VARIABLE, TRACE_VARIABLE)

# Each of these exists if a driver is loaded: NVIDIA's, NVIDIA's under WSL, AMD's.
_DRIVERS = (Path("/dev/nvidiactl"), Path("/dev/dxg"), Path("/dev/kfd"))

# Read when the interpreter, the C library, torch, NumPy or numba is loaded.
_READ_AT_START = (
    *("PYTHON", "LD_", "GLIBC_", "MALLOC_", "LC_", "LANG", "VIRTUAL_ENV"),
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "GOTO_", "NPY_", "NUMPY_", "NUMBA_"),
    *("TORCH", "PYTORCH", "ATEN_", "DNNL_", "ONEDNN_", "CUDA", "NVIDIA_", "NCCL_", "HIP_", "ROCR_", "ASAN_", "TSAN_"),
)
# ... except for these, which are read when they are needed, or which a fork sets itself.
_READ_LATER = (
    *("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "PYTHONFAULTHANDLER", "PYTHONUNBUFFERED"),
    *("TORCHELASTIC_", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCHINDUCTOR_CACHE_DIR", "TORCH_HOME"),
    # Set by importing scikit-learn: a second copy of Intel's OpenMP may be loaded, and none is set up again in a fork.
    # Neither makes a started process differ from a fork.
    *("KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"),
)
# If these are set at all, each process is bound to processors, or monitored, from its start.
_FROM_THE_START = ("OMP_", "GOMP_", "KMP_", "COVERAGE_PROCESS_", "COV_CORE_")


class ForkServerError(Exception):
    """The fork server could not be started, or did not return a process."""


class ForkServer:
    """A fork server of this process; a context manager.

    It starts in the background; the first ``fork`` waits until it has.

    Args:
        environment: its own; those of its forks may differ as far as ``why_not_forked`` allows.

    Attributes:
        environment: the same.
        pid: its process.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = dict(environment)
        settled = {name: value for name, value in environment.items() if name not in _LEFT_OPEN}
        settled |= {"OPENBLAS_NUM_THREADS": "1", "ANABRANCH_ROOM": "x" * _ENVIRONMENT_ROOM}
        self._channel, theirs = channel()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-c", _CODE, " " * _ARGUMENTS_ROOM],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                env=settled,
                start_new_session=True,
            )
        self.pid = self._process.pid

    @property
    def running(self) -> bool:
        """True while its process lives."""
        return self._process.poll() is None

    def fork(
        self, name: str, program: PythonProgram, environment: Mapping[str, str], stdin: int, stdout: int, stderr: int
    ) -> int:
        """Run ``program`` in a fork that is a child of this process, and return its process id.

        This process must be a subreaper, see ``adopt_orphans``.

        Raises:
            ForkServerError: there is no such process.
        """
        role = {
            "name": name,
            "program": asdict(program),
            "environment": dict(environment),
            "cwd": os.getcwd(),
            "launcher": os.getpid(),
        }
        reader, report = os.pipe()
        with open(reader, "rb", buffering=0) as answer:
            with open(report, "wb"):
                try:
                    send(self._channel, role, (stdin, stdout, stderr, report))
                except OSError as error:
                    if isinstance(error, ConnectionError):
                        self._end()
                    raise ForkServerError(f"the fork server got neither program nor environment: {error}") from None
            if not select.select([reader], [], [], _SECONDS)[0]:
                self._end()
                raise ForkServerError(f"the fork server did not answer in {_SECONDS:.0f} s")
            text = answer.read(_LONGEST_REPORT).decode(errors="replace")
        if not text.isdecimal():
            raise ForkServerError(text or ("its fork died" if self.running else "the fork server died"))
        return int(text)

    def _end(self) -> None:
        """End one that is of no use any more, so that nobody asks it again."""
        with suppress(subprocess.TimeoutExpired):
            self.close()

    def close(self) -> None:
        """End it, which keeps nothing; its forks continue to run."""
        self._channel.close()
        self._process.kill()
        self._process.wait(timeout=_END_SECONDS)

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_kept: ForkServer | None = None
_keeping = threading.Lock()


def kept_fork_server(environment: Mapping[str, str]) -> ForkServer:
    """Return the fork server that this process keeps until it ends, started now if there is none."""
    global _kept
    with _keeping:
        if _kept is None or not _kept.running:
            _kept = ForkServer(environment)
            atexit.register(_kept.close)
        return _kept


def why_no_fork_server(environment: Mapping[str, str]) -> str | None:
    """Return the reason why no process of a job with ``environment`` can be forked; ``None`` if they can."""
    if environment.get("CUDA_VISIBLE_DEVICES") not in ("", "-1") and any(path.exists() for path in _DRIVERS):
        return "a GPU is visible, and its driver does not survive a fork"
    for name in environment:
        if name.startswith(_FROM_THE_START) and not name.startswith(_READ_LATER):
            return f"{name} is set, which is read at process start"
    return None


def why_not_forked(program: PythonProgram, environment: Mapping[str, str], server: Mapping[str, str]) -> str | None:
    """Return the reason why ``program`` cannot be forked by a fork server with another environment; ``None`` if it
    can.
    """
    for name in sorted(environment.keys() | server.keys()):
        settled = name.startswith(_READ_AT_START) and not name.startswith(_READ_LATER)
        if settled and environment.get(name) != server.get(name):
            return f"{name} differs from the fork server's and is read at process start"
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        text = environment.get(name)
        if text is not None and not (text.isascii() and text.isdecimal() and int(text) > 0):
            return f"{name}={text!r} is not a plain number"
    if not program.is_module and not program.target.endswith(".py"):
        return f"{program.target!r} may be a directory or an archive"
    return None
