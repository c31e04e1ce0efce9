"""Experts that survive their server: each one's state in its own directory, saved in parallel with training.

A copy is taken between two batches, so training stops only for the copy, which is written on another thread. The
requests applied to an expert are saved with its state: a caller whose answer was lost in the crash retries, and the
restarted server knows whether the update is in the state it loaded.
"""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from pathlib import Path
from typing import cast

from anabranch.checkpoint import join, read_newest, split, write
from anabranch.checkpoint.generations import FileLock
from anabranch.errors import CheckpointError
from anabranch.experts.server.backend import ExpertBackend
from anabranch.record.spans import fault_point
from anabranch.transport.server.connection import RequestIdentity

_FILE = "lock"
_READ_ONLY = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})
_GROUP = "expert"
# Requests remembered for each expert. A live client settles all but those it waits for, so it never reaches this bound,
# which limits the records of dead clients.
_MOST_APPLIED = 10_000


class Persistence:
    """The saved states of some experts.

    Args:
        directory: the parent of a directory for each uid.
        backends: the experts, by uid.
        paused: a context in which no batch runs.
    """

    def __init__(
        self,
        directory: Path,
        backends: Mapping[str, ExpertBackend],
        *,
        paused: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._directory = directory
        self._backends = backends
        self._paused = paused
        self._saving = threading.Lock()  # the saver, and a server that lingers
        self._applied: dict[str, dict[RequestIdentity, None]] = {uid: {} for uid in backends}
        self._saved: dict[str, int] = {}

    def claim(self) -> AbstractContextManager[object]:
        """Make this the only server that saves these experts here, until the returned block is left.

        Raises:
            CheckpointError: another server saves one of them here.
        """
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with ExitStack() as locks:
            for uid in self._backends:
                locks.enter_context(lock(self._directory / uid, uid))
            return locks.pop_all()

    def load(self) -> list[RequestIdentity]:
        """Load the saved state of every expert that has one; returns the requests applied to those states.

        Raises:
            CheckpointError: a checkpoint is damaged, or of another module or optimizer.
        """
        restored: list[RequestIdentity] = []
        for uid, backend in self._backends.items():
            # A server killed during its first saving leaves a directory without a saved state.
            checkpoint = read_newest(self._directory / uid)
            if checkpoint is None:
                continue
            state = cast(dict[str, object], join(checkpoint.state, checkpoint.tensors(_GROUP)))
            try:
                backend.load_state_dict(cast(Mapping[str, object], state["backend"]))
            except (RuntimeError, ValueError, KeyError) as error:
                raise CheckpointError(f"the checkpoint of {uid} belongs to another module: {error}") from error
            applied = cast(list[tuple[bytes, int]], state["applied"])
            self._applied[uid] = dict.fromkeys(applied)
            self._saved[uid] = backend.updates
            restored += applied
        return restored

    def note_applied(self, uid: str, identity: RequestIdentity, settled: int) -> None:
        """Record a request applied to ``uid``; its client will never repeat a request below ``settled``."""
        applied = self._applied[uid]
        epoch = identity[0]
        for old in [old for old in applied if old[0] == epoch and old[1] < settled]:
            del applied[old]
        applied[identity] = None
        while len(applied) > _MOST_APPLIED:
            del applied[next(iter(applied))]

    def save(self) -> None:
        """Save every expert that was updated since it was last saved; durable when it returns.

        Raises:
            CheckpointError: the disk is full or failing; earlier checkpoints are untouched.
        """
        with self._saving:
            for uid, backend in self._backends.items():
                if self._saved.get(uid) == backend.updates:
                    continue
                with self._paused():
                    updates = backend.updates
                    state, tensors = split({"backend": backend.state_dict(), "applied": list(self._applied[uid])})
                    copies = {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
                fault_point("experts.copied")
                write(self._directory / uid, {_GROUP: copies}, state, step=updates)
                self._saved[uid] = updates


def lock(directory: Path, uid: str) -> AbstractContextManager[object]:
    """Make this the only server that saves an expert in ``directory``, until the lock is closed.

    >>> import tempfile
    >>> directory = Path(tempfile.mkdtemp()) / "ffn.0"
    >>> with lock(directory, "ffn.0"):
    ...     try:
    ...         lock(directory, "ffn.0")
    ...     except CheckpointError as error:
    ...         print(str(error).partition(": ")[2].partition(" (")[0])
    another server saves ffn.0 here

    Args:
        directory: the expert's; made if it does not exist. One that may only be read has no lock: nobody saves there,
            and any number of servers may serve a frozen expert from it.
        uid: the expert, for messages.

    Raises:
        CheckpointError: another server has the directory, or it cannot be made or locked.
    """
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
        own = FileLock(os.open(directory / _FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
    except BlockingIOError:
        raise CheckpointError(
            f"{directory}: another server saves {uid} here ({_holder(directory)}); two servers on one directory would "
            "overwrite each other's state: stop that one, or give each its own checkpoint_dir (--checkpoint-dir)"
        ) from None
    except OSError as error:
        if error.errno in _READ_ONLY and directory.is_dir():
            return nullcontext()
        cure = f"give one that user {os.geteuid()} may write to and that can be locked"
        raise CheckpointError(f"the checkpoint directory of {uid} cannot be used: {error}; {cure}") from error
    with suppress(OSError):  # only for messages
        os.ftruncate(own.descriptor, 0)
        os.pwrite(own.descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    return own


def _holder(directory: Path) -> str:
    try:
        return (directory / _FILE).read_text(errors="replace").strip() or "its process is unknown"
    except OSError:
        return "its process is unknown"
