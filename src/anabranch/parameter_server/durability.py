"""What a shard keeps on disk, so that one that was killed comes back: nothing, checkpoints, or every change.

::

    start: load the newest whole checkpoint, do its log and those after it again
    change: log (ordered under the shard's lock) ──> do ──> commit ──> acknowledge
    checkpoint: begin log n+1 and copy the state under the lock; write and sync; forget the logs before n+1

A table that lies in a file has no copy: it is written under the lock, a few rows at a time, and requests wait for that.
The numbers of requests already done are kept with both, so that a request whose acknowledgement was lost with the
process is answered when it comes again, not done again.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, cast

from torch import Tensor

from anabranch import checkpoint
from anabranch.checkpoint import Group
from anabranch.deadline import Deadline
from anabranch.events import fault_point, report
from anabranch.parameter_server.push_log import PushLog, Record
from anabranch.parameter_server.shard import Shard

__all__ = ["Durability", "Keeper"]

Durability = Literal["none", "checkpoint", "log"]
_REMEMBERED = 1024  # requests a client; it has a handful outstanding at a time


class Keeper:
    """Keeps one shard's state in a directory; a context manager.

    Args:
        shard: made with ``journal=keeper.journal``, or given one by ``keep``.
        durability: ``"none"``, ``"checkpoint"`` or ``"log"``.
        directory: of this shard alone; required unless ``"none"``.
    """

    def __init__(self, durability: Durability, directory: Path | None) -> None:
        self._durability = durability
        self._directory = directory
        self._log: PushLog | None = None
        self._asking = threading.local()
        self._done: dict[bytes, deque[int]] = {}
        self._checkpointing = threading.Lock()
        self._changes = 0
        self._saved_changes = 0
        self._position = 0

    def start(self, shard: Shard) -> list[tuple[bytes, int]]:
        """Brings the shard to where it was; returns the requests that were done."""
        self._shard = shard
        if self._directory is None:
            return []
        first = 0
        found = checkpoint.read_newest(self._directory) if self._directory.is_dir() else None
        if found is not None:
            state = cast(Mapping[str, object], found.state)
            shard.load(cast(Mapping[str, object], state["shard"]), found.tensors)
            first = cast(int, state["log"])
            for epoch, sequences in cast(Mapping[bytes, Sequence[int]], state["done"]).items():
                self._done[epoch] = deque(sequences, _REMEMBERED)
        if self._durability == "log":
            for record, tensors in PushLog.read(self._directory, first):
                self._replay(shard, record, tensors)
                self._remember(record.epoch, record.sequence)
            self._log = PushLog(self._directory)
        return [(epoch, sequence) for epoch, sequences in self._done.items() for sequence in sequences]

    def _replay(self, shard: Shard, record: Record, tensors: Sequence[Tensor]) -> None:
        try:
            shard.replay(record.verb, record.payload, tensors)
        except (ValueError, TypeError, ArithmeticError) as error:
            # It failed when it was asked for too, and was not acknowledged: no reason never to start again.
            report("parameter_server.record_refused", verb=record.verb, error=str(error))

    @contextmanager
    def asked_by(self, identity: tuple[bytes, int]) -> Iterator[None]:
        """What this thread journals in the block was asked for by ``identity``."""
        self._asking.identity = identity
        try:
            yield
        finally:
            self._asking.identity = (b"", 0)

    def journal(self, verb: str, payload: bytes, tensors: Sequence[Tensor]) -> None:
        """Orders a change before it is done; called under the shard's lock."""
        epoch, sequence = getattr(self._asking, "identity", (b"", 0))
        if self._log is not None:
            self._position = self._log.append(Record(verb, payload, epoch, sequence), tensors)
        self._remember(epoch, sequence)
        self._changes += 1

    def commit(self, deadline: Deadline) -> None:
        """Returns once every change journaled so far is durable, where the log promises it."""
        if self._log is not None:
            self._log.commit(self._position, deadline)

    def checkpoint(self) -> None:
        """Writes the shard as it is now, if it has changed since it was last written."""
        if self._directory is None or self._durability == "none":
            return
        with self._checkpointing:
            with self._shard.locked():
                if self._changes == self._saved_changes:
                    return
                changes, number = self._changes, self._log.rotate() if self._log is not None else 0
                state, groups = self._shard.snapshot()
                done = {epoch: list(sequences) for epoch, sequences in self._done.items()}
                self._shard.journal_pending()
                whole = {"shard": state, "log": number, "done": done}
                if written := any(callable(group) for group in groups.values()):
                    self._write(groups, whole)
            if not written:
                self._write(groups, whole)
            fault_point("durability.before_forgetting")
            self._saved_changes = changes
            if self._log is not None:
                self._log.forget_before(number)

    def _write(self, groups: Mapping[str, Group], state: object) -> None:
        assert self._directory is not None
        fault_point("durability.before_checkpoint")
        checkpoint.write(self._directory, groups, state, step=self._saved_changes + 1)

    def close(self) -> None:
        """Closes the log, with all of it on the disk."""
        if self._log is not None:
            self._log.close()

    def _remember(self, epoch: bytes, sequence: int) -> None:
        if epoch:
            self._done.setdefault(epoch, deque(maxlen=_REMEMBERED)).append(sequence)
