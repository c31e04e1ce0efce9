"""State of a shard on disk, from which it restarts after being killed: nothing, checkpoints, or every change.

::

    start: own the directory, load the newest whole checkpoint, replay the log behind it
    change: log (ordered under the shard's lock) ──> do ──> commit ──> acknowledge
    checkpoint: begin a body file and a snapshot under the lock; write and sync; forget the log of the one before

Under ``"checkpoint"`` the log holds only the creation and removal of tables, which is little, and no pushes: those
since the last checkpoint are lost when the process is killed. Before the first of them is acknowledged the log gets a
record that says so. A shard that finds it behind its checkpoint begins another incarnation, and reports to each client
the number of its own lost pushes (``AppliedRequests``).

Each shard has a directory of its own, and all of a group may have theirs in one ``checkpoint_dir``::

    checkpoint_dir/shard-0-of-2    of this group
    checkpoint_dir/shard-1-of-2
    checkpoint_dir/shard-0-of-1    of another number of shards: its rows lie elsewhere, so nobody here can use it
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

import msgspec
from torch import Tensor

from anabranch import checkpoint
from anabranch.checkpoint import Checkpoint
from anabranch.checkpoint.generations import Unreadable, complete_generations, set_generation_aside
from anabranch.checkpoint.reading import newest_manifest
from anabranch.choices import listed
from anabranch.deadline import Deadline
from anabranch.errors import CheckpointError, RolledBack
from anabranch.parameter_server.messages import ExpectedState
from anabranch.parameter_server.server.contents import ShardSnapshot
from anabranch.parameter_server.server.push_log import (
    PREAMBLE_BYTES,
    Position,
    PushLog,
    Record,
    body_numbers,
    body_path,
)
from anabranch.parameter_server.server.shard import Shard
from anabranch.record.spans import fault_point, mark
from anabranch.transport.server.connection import RequestIdentity

Durability = Literal["none", "checkpoint", "log"]
_log = logging.getLogger("anabranch.parameter_server")
# Changes that clients do not request again after a restart: logged under "checkpoint" too.
_ALWAYS_LOGGED = frozenset({"init", "join", "drop", "restore"})
# Errors of a change that failed the first time too, and was not acknowledged: no reason to refuse to start. A pull may
# also lack memory; without it, a later push admits its own ids. A restore was checked before it was logged: one that
# fails would leave a table without rows that it had.
_REFUSED = (ValueError, TypeError, ArithmeticError)
_REFUSED_PULL = (*_REFUSED, MemoryError, RuntimeError, OSError)
# Under "checkpoint": changes that are not in the log may be acknowledged from here on.
_UNLOGGED = "unlogged"
_FORMAT = 4  # of a checkpoint


@dataclass(slots=True)
class ChangingRequest:
    """A request that changes the shard: its number among its client's pushes, and what has to be durable before its
    answer.
    """

    identity: RequestIdentity = (b"", 0)
    settled: int = 0
    number: int = 0
    position: int | None = None


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
        self._repair = repair
        self._log = None if directory is None else PushLog(directory, repair=repair)
        self._thread = threading.local()
        self._applied = AppliedRequests()
        self.incarnation = _new_incarnation()
        """A number that changes when the shard is restored with less than it had acknowledged."""
        self._checkpointing = threading.Lock()
        self._touched = 0
        self._saved_touched = -1
        self._changes = 0
        self._position = 0
        self._step_position = 0  # of the newest step that was applied
        self._appended = False  # whether the newest change is in the log
        self._unlogged = False  # whether the newest body file says that changes are not
        self._forget_before: Position | None = None

    def start(self, shard: Shard) -> list[RequestIdentity]:
        """Restore the shard's state; returns the applied requests.

        Raises:
            CheckpointError: the files are damaged, and ``repair`` was not requested; or they may not be read.
        """
        self._shard, log = shard, self._log
        if log is None:
            return []
        newest, damaged = self._newest(log)
        for record, tensors in log.replay(None if newest is None else self._load(newest)):
            self._replay(record, tensors)
        if self._unlogged or log.lost is not None:
            _log.warning("%s: changes that were acknowledged are lost; clients will be told", log.directory)
            mark("parameter_server.rolled_back", path=str(log.directory))
            self.incarnation = _new_incarnation()
        for generation in damaged or ():  # not before the log was read, which may refuse the start
            set_generation_aside(log.directory, generation)
        if log.lost is not None:
            self._forget_before, self._saved_touched = Position(secrets.randbits(62), 1, 0), self._touched
            self._write(log, self._state_at(log, self._forget_before))
            log.begin_anew(self._forget_before)
            log.forget_before(None)
        elif self._unlogged or damaged is not None:
            self._saved_touched = -1
            self.checkpoint()
        self._unlogged = False
        return list(self._applied.identities())

    def _newest(self, log: PushLog) -> tuple[Checkpoint | None, list[int] | None]:
        """Return the newest complete checkpoint, if there is one, and under ``repair`` the damaged generations."""
        generations = complete_generations(log.directory)
        lost = f"{log.directory}: its checkpoint is missing" if log.saved and not generations else None
        newest: Checkpoint | None = None
        try:
            newest = checkpoint.read(log.directory) if generations else None
        except Unreadable:
            raise
        except CheckpointError as error:
            lost = str(error)
        if lost is not None and not self._repair:
            raise CheckpointError(
                f"{lost}; restore its files from a copy, or start with --repair, which continues with what is left"
            )
        damaged = [number for number in generations if newest is None or number > newest.generation]
        if not self._repair or (lost is None and not damaged):
            return newest, None
        where = f"; unusable files are moved to {log.directory / 'set-aside'}" if damaged else ""
        what = lost or f"{log.directory}: {damaged} of its checkpoints are damaged"
        _log.warning("%s%s; a new checkpoint is written", what, where)
        return newest, damaged

    def _load(self, newest: Checkpoint) -> Position:
        """Load a checkpoint; returns where the log goes on from there."""
        state = cast(Mapping[str, object], newest.state)
        directory = cast(Path, newest.path)
        if (owner := state["of"]) != directory.name:
            raise CheckpointError(
                f"{directory}: the checkpoint here was written as {owner}; each shard has its own directory, so "
                "restore the one that was here"
            )
        if state.get("format") != _FORMAT:
            raise CheckpointError(
                f"{directory}: the checkpoint here was written by another version of anabranch: finish the training "
                "with that version, or give another --checkpoint-dir"
            )
        self._shard.load(cast(Mapping[str, object], state["shard"]), newest.readers())
        self._applied.load(cast("Mapping[bytes, tuple[int, dict[int, int]]]", state["applied"]))
        self._changes = cast(int, state["changes"])
        self.incarnation = cast(int, state["incarnation"])
        self._saved_touched = 0
        self._forget_before = Position(*cast(Sequence[int], state["log"]))
        return self._forget_before

    def _replay(self, record: Record, tensors: Sequence[Tensor]) -> None:
        if record.verb == _UNLOGGED:
            self._unlogged = True
            return
        refused: tuple[type[Exception], ...] = _REFUSED_PULL if record.verb == "pull" else _REFUSED
        if record.verb == "restore":
            refused = ()
        try:
            self._shard.replay(record.verb, record.message, tensors, record.client)
        except refused as error:
            mark("parameter_server.record_refused", verb=record.verb, error=str(error))
        else:
            self._count(ChangingRequest((record.client, record.sequence), record.settled), record.verb)

    @contextmanager
    def asked_by(self, identity: RequestIdentity, settled: int) -> Iterator[ChangingRequest]:
        """Attribute changes that this thread journals in the block to the request ``identity``, whose client has
        settled those below ``settled``.
        """
        request = self._thread.request = ChangingRequest(identity, settled)
        try:
            yield request
        finally:
            del self._thread.request

    def journal(self, verb: str, message: msgspec.Struct, tensors: Sequence[Tensor]) -> None:
        """Append a change before it is applied; called under the shard's lock."""
        # A held step is applied by whichever request comes last, and is not part of it.
        request = (None if verb == "step" else getattr(self._thread, "request", None)) or ChangingRequest()
        self._appended = False
        if self._log is not None:
            if self._durability == "log" or verb in _ALWAYS_LOGGED:
                (client, sequence), body = request.identity, msgspec.msgpack.encode(message)
                record = Record(verb, body, client, sequence, request.settled)
                self._position = self._log.append(record, tensors)
                self._appended = True
            elif request.identity[0] and not self._unlogged:
                self._position = self._log.append(Record(_UNLOGGED, b""))
                self._unlogged = True
        request.position = self._position
        if verb == "step":
            self._step_position = self._position
        self._count(request, verb)
        self._touched += 1

    def take_back(self) -> None:
        """Remove the last journaled change, which was refused when it was applied; called under the shard's lock."""
        request = getattr(self._thread, "request", None) or ChangingRequest()
        if self._log is not None and self._appended:
            self._log.take_back()
            self._position -= 1
        if request.identity[0]:
            self._applied.take_back(request.identity)
            self._changes -= 1

    def _count(self, request: ChangingRequest, verb: str) -> None:
        if request.identity[0]:
            request.number = self._applied.add(request.identity, request.settled, push=verb == "push")
            self._changes += 1

    def number(self, identity: RequestIdentity) -> int:
        """Return the number of an applied push among its client's, from 1."""
        return self._applied.number(identity)

    def check(self, expected: ExpectedState) -> None:
        """Raise if the shard holds fewer of a client's pushes than it acknowledged.

        Raises:
            RolledBack: some of its pushes are lost; gives their number.
        """
        lost = max(expected.pushes - self._applied.pushes(expected.epoch), 0)
        if lost or (expected.incarnation and expected.incarnation != self.incarnation):
            others = "" if lost else ", but pushes of other workers are"
            raise RolledBack(
                f"this shard came back without changes that it had acknowledged: {lost} pushes of this client are "
                f"lost{others}; it is at step {self._shard.current_step()} of its incarnation {self.incarnation:x}",
                lost=lost,
            )

    def commit(self, request: ChangingRequest, deadline: Deadline) -> None:
        """Wait until what a request has changed, or was answered from, is as durable as promised."""
        if self._log is None:
            return
        if request.position is None:  # another had made the change that it asked for, which may not be durable yet
            with self._shard.locked():
                request.position = self._position
        self._log.commit(request.position, deadline)

    def commit_step(self, deadline: Deadline) -> None:
        """Wait until the newest step that was applied is as durable as promised, before an answer shows it."""
        if self._log is not None:
            self._log.commit(self._step_position, deadline)

    def checkpoint(self) -> None:
        """Write the shard's current state, if it has changed since it was last written."""
        log = self._log
        if log is None:
            return
        with self._checkpointing:
            with self._shard.locked():
                if self._touched == self._saved_touched:
                    return
                touched, position = self._touched, log.rotate()
                self._position, self._unlogged = position.records, False
                snapshot = self._state_at(log, position)
            self._write(log, snapshot)
            fault_point("durability.before_forgetting")
            self._saved_touched = touched
            # The log since the previous checkpoint stays, because it is kept too, and used if this one is damaged.
            log.forget_before(self._forget_before)
            self._forget_before = position

    def _state_at(self, log: PushLog, position: Position) -> ShardSnapshot:
        """Return the shard's present state, behind which the log goes on at ``position``."""
        snapshot = self._shard.snapshot_of_all()
        snapshot.state = {
            "format": _FORMAT, "of": log.directory.name, "shard": snapshot.state, "log": list(position),
            "incarnation": self.incarnation, "changes": self._changes, "applied": self._applied.state(),
        }  # fmt: skip
        return snapshot

    def _write(self, log: PushLog, snapshot: ShardSnapshot) -> None:
        state = snapshot.state
        try:
            fault_point("durability.before_checkpoint")
            checkpoint.write(
                log.directory, snapshot.groups, state, more=snapshot.files(), step=cast(int, state["changes"])
            )
        finally:
            snapshot.rows.close()

    def close(self) -> None:
        """Close the log, and release the directory."""
        if self._log is not None:
            self._log.close()


def _new_incarnation() -> int:
    """Return a random number, unlikely to repeat across restarts."""
    return 1 + secrets.randbelow((1 << 62) - 1)


# --- applied requests -------------------------------------------------------------------------------------------------


class AppliedRequests:
    """The unsettled requests of each client, and the number of its pushes.

    >>> applied = AppliedRequests()
    >>> client = b"c" * 16
    >>> applied.add((client, 7), push=True), applied.add((client, 8), push=True)
    (1, 2)
    >>> applied.take_back((client, 8))
    >>> applied.pushes(client), applied.number((client, 7))
    (1, 1)
    """

    def __init__(self) -> None:
        self._pushes: defaultdict[bytes, int] = defaultdict(int)
        self._numbers: defaultdict[bytes, dict[int, int]] = defaultdict(dict)  # by sequence; 0 unless pushes

    def add(self, identity: RequestIdentity, settled: int = 0, *, push: bool) -> int:
        """Add a request of a client that has settled those below ``settled``; returns a push's number, else 0."""
        epoch, sequence = identity
        numbers = self._numbers[epoch]
        while numbers and (oldest := min(numbers)) < settled:
            del numbers[oldest]
        self._pushes[epoch] += push
        numbers[sequence] = self._pushes[epoch] if push else 0
        return numbers[sequence]

    def take_back(self, identity: RequestIdentity) -> None:
        """Remove the request that was added last, which was refused after all."""
        self._pushes[identity[0]] -= self._numbers[identity[0]].pop(identity[1]) > 0

    def pushes(self, epoch: bytes) -> int:
        """Return the number of a client's pushes that the shard holds."""
        return self._pushes.get(epoch, 0)

    def number(self, identity: RequestIdentity) -> int:
        """Return the number of an applied push; 0 if it is not remembered."""
        return self._numbers.get(identity[0], {}).get(identity[1], 0)

    def identities(self) -> Iterator[RequestIdentity]:
        """Yield the requests that are remembered."""
        for epoch, numbers in self._numbers.items():
            for sequence in numbers:
                yield epoch, sequence

    def state(self) -> dict[bytes, tuple[int, dict[int, int]]]:
        """Plain values for a checkpoint."""
        return {epoch: (self._pushes[epoch], dict(numbers)) for epoch, numbers in self._numbers.items()}

    def load(self, state: Mapping[bytes, tuple[int, dict[int, int]]]) -> None:
        """Load the result of ``state``."""
        for epoch, (pushes, numbers) in state.items():
            self._pushes[epoch], self._numbers[epoch] = pushes, numbers


# --- the directory of a shard -----------------------------------------------------------------------------------------


def shard_directory(checkpoint_dir: Path, shard: int, shards: int) -> Path:
    """Return the directory of one shard; it need not exist.

    Raises:
        CheckpointError: there is state of another number of shards, and none of this number.
    """
    there = sorted(path.name for path in checkpoint_dir.glob("shard-*-of-*[0-9]") if _holds_changes(path))
    counts = dict.fromkeys(name.rpartition("-")[2] for name in there)
    if there and str(shards) not in counts:
        raise CheckpointError(
            f"{checkpoint_dir} holds the state of a different number of shards ({listed(there)}), and shard {shard} of "
            f"{shards} would start empty: start with --shards {' or '.join(counts)}, or give another --checkpoint-dir. "
            "To change the number of shards, save from the old servers with ParameterClient.save and load that into "
            "new ones"
        )
    return checkpoint_dir / f"shard-{shard}-of-{shards}"


def _holds_changes(directory: Path) -> bool:
    """Return False if a shard's directory is known to hold no change; another server may have it open."""
    try:
        numbers = body_numbers(directory)
        if any(body_path(directory, number).stat().st_size > PREAMBLE_BYTES for number in numbers):
            return True
        newest = newest_manifest(directory)
    except (OSError, CheckpointError):
        return True
    saved = bool(complete_generations(directory)) and (newest is None or newest.step > 0)
    return saved or (not numbers and (directory / "log.db").exists())
