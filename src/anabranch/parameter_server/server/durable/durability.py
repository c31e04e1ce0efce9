"""State of a shard on disk, from which it restarts after being killed: nothing, checkpoints, or every change.

::

    start: own the directory, load the newest whole checkpoint, replay its log and those after it
    change: log (ordered under the shard's lock) ──> do ──> commit ──> acknowledge
    checkpoint: begin log n+1 and copy the state under the lock; write and sync; delete the logs of the one before

Under ``"checkpoint"`` the log holds only the creation and removal of tables, which is little, and no pushes: those
since the last checkpoint are lost when the process is killed. The shard knows their number from the count in the
directory's ``owner`` file, and reports to each client its own (``acknowledged.py``).

A table in a file is not copied: it is written under the lock, a few rows at a time, and requests wait for that.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, cast

from torch import Tensor

from anabranch import checkpoint
from anabranch.checkpoint import Checkpoint, Group
from anabranch.checkpoint.generations import complete_generations, set_generation_aside
from anabranch.checkpoint.regular_file import Unreadable
from anabranch.deadline import Deadline
from anabranch.errors import CheckpointError, RolledBack
from anabranch.parameter_server.expected_state import ExpectedState
from anabranch.parameter_server.server.durable.acknowledged import Acknowledged
from anabranch.parameter_server.server.durable.log_format import Record
from anabranch.parameter_server.server.durable.ownership import DirectoryContents, Ownership
from anabranch.parameter_server.server.durable.push_log import PushLog
from anabranch.parameter_server.server.durable.recovery import LogReader
from anabranch.parameter_server.server.shard import Shard
from anabranch.record.fault_points import fault_point
from anabranch.record.spans import mark
from anabranch.transport.server.once import RequestIdentity

__all__ = ["Durability", "ShardPersistence"]

Durability = Literal["none", "checkpoint", "log"]
_log = logging.getLogger("anabranch.parameter_server")
_NOBODY: RequestIdentity = (b"", 0)
# Changes that clients do not request again after a restart: logged under "checkpoint" too.
_ALWAYS_LOGGED = frozenset({"init", "join", "drop", "restore"})
# Errors of a change that failed the first time too, and was not acknowledged: no reason to refuse to start. A pull may
# also lack memory; without it, a later push admits its own ids.
_REFUSED = (ValueError, TypeError, ArithmeticError)
_REFUSED_PULL = (*_REFUSED, MemoryError, RuntimeError, OSError)
# A client's count that the shard had forgotten and got back from the client: the record's sequence.
_ADOPTED = "adopted"

_CHOICES = "restore its files from a copy, or start with --repair, which continues with what is left"


class ShardPersistence:
    """Keeps one shard's state in a directory, which it owns until ``close``.

    Args:
        durability: ``"none"``, ``"checkpoint"`` or ``"log"``.
        directory: of this shard alone; required unless ``"none"``.
        repair: use the readable part of a damaged log or of lost checkpoints, and set the rest aside.

    Raises:
        CheckpointError: another server holds the directory.
    """

    def __init__(self, durability: Durability, directory: Path | None, *, repair: bool = False) -> None:
        self._durability = durability
        self._directory = directory
        self._repair = repair
        self._owner = None if directory is None else Ownership(directory, repair=repair)
        self._log: PushLog | None = None
        self._asking = threading.local()
        self._done = Acknowledged()
        self._life = _new_life()
        self._checkpointing = threading.Lock()
        self._pending = False
        self._touched = 0
        self._saved_touched = 0
        self._changes = 0
        self._position = 0
        self._forget_before = 0
        self._lost: str | None = None  # checkpoints that a repair continues without
        self._damaged: list[int] = []  # their generations

    @property
    def life(self) -> int:
        """A number that changes when the shard is restored with less than it had acknowledged."""
        return self._life

    @property
    def has_checkpoint(self) -> bool:
        """True if there is a checkpoint, or none is kept."""
        return self._owner is None or self._owner.position.saved >= 0

    def start(self, shard: Shard) -> list[RequestIdentity]:
        """Restore the shard's state; returns the applied requests.

        Raises:
            CheckpointError: the files are damaged, and ``repair`` was not requested; or they may not be read.
        """
        self._shard = shard
        if self._directory is None or self._owner is None:
            return []
        known, after = self._owner.found, self._load(shard)
        reader = LogReader(self._directory, after, known, repair=self._repair)
        for record, tensors in reader:
            self._replay(shard, record, tensors)
        if reader.lost is not None:
            reader.repair()
        self._set_checkpoints_aside()
        self._log = PushLog(self._directory, self._owner, reader.end)
        missing = reader.known.changes - self._changes
        damaged = reader.lost or self._owner.lost
        if missing > 0:
            _log.warning(
                "%s: restored from the last checkpoint; %d changes acknowledged since then are lost",
                self._directory, missing,
            )  # fmt: skip
        if self._owner.lost is not None:
            _log.warning("%s; the log is used as it is", self._owner.lost)
        if missing > 0 or damaged is not None:
            mark("parameter_server.rolled_back", path=str(self._directory), changes=missing)
            self._life = _new_life()
            self._done.note_loss()
        if missing > 0 or damaged is not None or self._lost is not None:
            self._touched += 1
            self.checkpoint()
        self._owner.note(changes=self._changes)
        return list(self._done.identities())

    def _load(self, shard: Shard) -> DirectoryContents | None:
        """Load the newest complete checkpoint; returns the log position after it."""
        assert self._directory is not None
        found = self._find()
        if found is None:
            return None
        state = cast(Mapping[str, object], found.state)
        if (owner := state["of"]) != self._directory.name:
            raise CheckpointError(
                f"{self._directory}: the checkpoint here was written as {owner}; each shard has its own directory, so "
                "restore the one that was here"
            )
        shard.load(cast(Mapping[str, object], state["shard"]), found.tensors)
        self._done.load(state)
        self._changes = cast(int, state["changes"])
        self._life = cast(int, state["life"])
        file = cast(int, state["log"])
        self._forget_before = file
        return DirectoryContents(file, cast(int, state["records"]), cast(int, state["chain"]))

    def _find(self) -> Checkpoint | None:
        """Return the newest complete checkpoint; ``None`` if there is none yet or, under ``repair``, none left."""
        assert self._directory is not None
        assert self._owner is not None
        generations, saved = complete_generations(self._directory), self._owner.position.saved
        found: Checkpoint | None = None
        lost: str | None = None
        if not generations and saved >= 0:
            lost = f"{self._directory}: a checkpoint of {saved} changes was written here and is missing"
        try:
            found = checkpoint.read(self._directory) if generations else None
        except Unreadable:
            raise
        except CheckpointError as error:
            lost = str(error)
        if lost is not None and not self._repair:
            raise CheckpointError(f"{lost}; {_CHOICES}")
        damaged = [number for number in generations if found is None or number > found.generation]
        if self._repair and (damaged or lost is not None):
            self._damaged = damaged
            self._lost = lost or f"{self._directory}: {damaged} of its checkpoints are damaged"
        return found

    def _set_checkpoints_aside(self) -> None:
        """Make room for a new one, and report what was set aside; after reading the log, which may refuse the start."""
        if self._lost is None or self._directory is None:
            return
        for generation in self._damaged:
            set_generation_aside(self._directory, generation)
        where = f"; unusable files were moved to {self._directory / 'set-aside'}" if self._damaged else ""
        _log.warning("%s%s; a new checkpoint is written", self._lost, where)
        mark("parameter_server.checkpoint_repaired", path=str(self._directory), generations=len(self._damaged))

    def _replay(self, shard: Shard, record: Record, tensors: Sequence[Tensor]) -> None:
        if record.verb == _ADOPTED:
            if self._done.pushes(record.epoch) is None:
                self._done.adopt(record.epoch, record.sequence)
            return
        refused = _REFUSED_PULL if record.verb == "pull" else _REFUSED
        try:
            shard.replay(record.verb, record.payload, tensors, record.epoch)
        except refused as error:
            mark("parameter_server.record_refused", verb=record.verb, error=str(error))
        else:
            self._count((record.epoch, record.sequence), record.verb)

    @contextmanager
    def asked_by(self, identity: RequestIdentity) -> Iterator[None]:
        """Attribute changes that this thread journals in the block to the request ``identity``."""
        self._asking.identity, self._asking.place = identity, 0
        try:
            yield
        finally:
            self._asking.identity = _NOBODY

    def journal(self, verb: str, payload: bytes, tensors: Sequence[Tensor]) -> None:
        """Append a change before it is applied; called under the shard's lock."""
        # A held step is applied by whichever request comes last, and is not part of it.
        identity = _NOBODY if verb == "step" else getattr(self._asking, "identity", _NOBODY)
        logged = self._durability == "log" or verb in _ALWAYS_LOGGED or self._pending
        if self._log is not None and logged:
            self._position = self._log.append(Record(verb, payload, *identity), tensors)
        self._count(identity, verb)
        self._touched += 1

    def take_back(self) -> None:
        """Remove the last journaled change, which was refused when it was applied; called under the shard's lock."""
        identity = getattr(self._asking, "identity", _NOBODY)
        if identity[0]:
            self._done.take_back(identity)
            self._changes -= 1

    def _count(self, identity: RequestIdentity, verb: str) -> None:
        if identity[0]:
            self._asking.place = self._done.add(identity, push=verb == "push")
            self._changes += 1

    def place(self, identity: RequestIdentity | None = None) -> int:
        """Return the place of ``identity``'s push among its client's, from 1; by default of this thread's last push."""
        return cast(int, self._asking.place) if identity is None else self._done.place(identity)

    def check(self, expected: ExpectedState) -> None:
        """Raise if the shard holds fewer of a client's pushes than it acknowledged.

        Raises:
            RolledBack: some of its pushes are lost; gives their number.
        """
        holds = self._done.pushes(expected.epoch)
        if holds is None and expected.pushes:
            holds = self._adopt(expected)
        lost = max(expected.pushes - (holds or 0), 0)
        if lost or (expected.life and expected.life != self._life):
            others = "" if lost else ", but pushes of other workers are"
            raise RolledBack(
                f"this shard came back without changes that it had acknowledged: {lost} pushes of this client are "
                f"lost{others}; it is at step {self._shard.current_step()} of its life {self._life:x}",
                lost=lost,
            )

    def _adopt(self, expected: ExpectedState) -> int:
        """Return the count of a forgotten client, as the client reports it.

        Raises:
            RolledBack: it is unknown whether the shard still holds that many.
        """
        if self._done.doubtful:
            raise RolledBack(
                "this shard came back without changes that it had acknowledged, and too many other clients have pushed "
                f"since this one did: it is unknown how many of its {expected.pushes} pushes are lost; it is at "
                f"step {self._shard.current_step()} of its life {self._life:x}",
                lost=None,
            )
        with self._shard.locked():
            holds = self._done.pushes(expected.epoch)
            if holds is None:
                # Under "checkpoint" a count logged after it would hide the loss of pushes that came after it.
                if self._log is not None and self._durability == "log":
                    self._position = self._log.append(Record(_ADOPTED, b"", expected.epoch, expected.pushes), ())
                self._done.adopt(expected.epoch, expected.pushes)
                self._touched += 1
                holds = expected.pushes
            return holds

    def commit(self, deadline: Deadline) -> None:
        """Wait until every change journaled so far is as durable as promised."""
        if self._log is not None and self._owner is not None:
            self._log.commit(self._position, deadline)
            if self._durability == "checkpoint":
                self._owner.check()
                self._owner.note(changes=self._changes)

    def checkpoint(self) -> None:
        """Write the shard's current state, if it has changed since it was last written."""
        if self._log is None or self._owner is None or self._directory is None:
            return
        with self._checkpointing:
            with self._shard.locked():
                if self._touched == self._saved_touched and self.has_checkpoint:
                    return
                touched, changes, at = self._touched, self._changes, self._log.rotate()
                state, groups = self._shard.snapshot()
                whole = {
                    "of": self._directory.name, "shard": state, "log": at.file,
                    "records": at.records, "chain": at.chain, "changes": changes, "life": self._life,
                    **self._done.state(),
                }  # fmt: skip
                self._journal_pending()
                if written := any(callable(group) for group in groups.values()):
                    self._write(groups, whole, changes)
            if not written:
                self._write(groups, whole, changes)
            fault_point("durability.before_forgetting")
            self._saved_touched = touched
            self._owner.note(durable=True, saved=changes)
            # Logs since the previous checkpoint stay, because it is kept too, and used if this one is damaged.
            self._log.forget_before(self._forget_before)
            self._forget_before = at.file

    def _journal_pending(self) -> None:
        """Journal the pushes that wait for other workers', which no snapshot holds; they come first in the new log.

        They are on disk before the checkpoint, which counts them.
        """
        assert self._log is not None
        self._pending, touched = True, self._touched
        try:
            self._shard.journal_pending()
        finally:
            self._pending, self._touched = False, touched
        self._log.commit(self._position, Deadline.after(60.0))

    def _write(self, groups: Mapping[str, Group], state: object, changes: int) -> None:
        assert self._directory is not None
        assert self._owner is not None
        fault_point("durability.before_checkpoint")
        self._owner.check()
        checkpoint.write(self._directory, groups, state, step=changes)

    def close(self) -> None:
        """Sync and close the log, and release the directory."""
        try:
            if self._log is not None:
                self._log.close()
        finally:
            if self._owner is not None:
                self._owner.close()


def _new_life() -> int:
    """Return a random number, unlikely to repeat across restarts."""
    return 1 + secrets.randbelow((1 << 62) - 1)
