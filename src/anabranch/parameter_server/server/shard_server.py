"""``ParameterServer``: a shard behind an endpoint.

Every verb is checked against the shard's tables before memory is interpreted as its tensors. Changes to the shard are
numbered by their client and applied exactly once, and under ``durability="log"`` they are acknowledged only when they
are on disk.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor

from anabranch.checkpoint.generations import check_path
from anabranch.choices import choice
from anabranch.deadline import check_seconds
from anabranch.errors import NonFinite, NotFound, Overloaded, SchemaError
from anabranch.parameter_server.messages import (
    MESSAGES,
    ExpectedState,
    ExportMessage,
    PullMessage,
    PushMessage,
    PushReply,
    SnapshotMessage,
)
from anabranch.parameter_server.server.contents import ShardSnapshot, ShardStatistics
from anabranch.parameter_server.server.durability import Durability, ShardPersistence, shard_directory
from anabranch.parameter_server.server.requests import RowRequest, ShardRequest, check
from anabranch.parameter_server.server.shard import Shard
from anabranch.periodic import periodic
from anabranch.record.spans import mark
from anabranch.tables.kernels.rows import KernelThreads
from anabranch.tables.warming import compile_kernels
from anabranch.tensors.dtypes import DTYPES
from anabranch.transport import Call, RequestHeader, Server, ServerStatistics, Transport, Verb, pack, unpack

_Answer = tuple[object, Sequence[Tensor]]  # payload and tensors
_SHOWING = frozenset({"pull", "norm", "export", "snapshot", "describe"})  # what steps that were applied have changed
_WORKERS = frozenset({"worker"})
_log = logging.getLogger("anabranch.parameter_server")


class ParameterServer:
    """One shard of the tables and parameters, served while its ``with`` block runs.

    >>> from anabranch.parameter_server import ParameterClient
    >>> with ParameterServer() as server, ParameterClient([server.endpoint]) as client:
    ...     client.init("bias", (2,), init=1.0)
    ...     client.pull("bias")
    tensor([1., 1.])

    Args:
        shard, shards: the shard's number, and the number of shards; clients name the endpoints in this order.
        listen: ``unix:PATH``, ``tcp://HOST:PORT``, or ``None`` for a new Unix socket.
        durability: ``"none"``: the state dies with the shard; ``"checkpoint"``: it comes back as last written;
            ``"log"``: with every push that was acknowledged.
        checkpoint_dir: the directory for it; required unless ``"none"``. Each shard uses its own subdirectory. Rows of
            tables with ``memory_map`` are there, too, while the shard runs, or in the system's directory for temporary
            files. Their files have no names and go with the process: only the checkpoint and the log outlive it.
        checkpoint_seconds: seconds between checkpoints; another is written on leaving the block.
        threads: threads that share the work of one request.
        repair: use the readable part of a damaged log or checkpoint, and set the rest aside; clients learn of
            their lost pushes (``RolledBack``).
        keys, insecure, heartbeat, transport: as ``anabranch.transport.Server`` takes them.

    Raises:
        ValueError: a shard outside its shards, or durability without a directory.
        CheckpointError: another server has the directory, or its files are damaged; gives the damage, where it is, and
            the choices. Or the directory holds the state of another number of shards.
    """

    def __init__(
        self,
        shard: int = 0,
        shards: int = 1,
        listen: str | None = None,
        durability: Durability = "none",
        checkpoint_dir: str | os.PathLike[str] | None = None,
        *,
        checkpoint_seconds: float = 300.0,
        threads: int = 1,
        repair: bool = False,
        keys: str | os.PathLike[str] | None = None,
        insecure: bool = False,
        heartbeat: float = 1.0,
        transport: Transport | None = None,
    ) -> None:
        durability = choice("durability", durability, ("none", "checkpoint", "log"))
        if durability != "none" and checkpoint_dir is None:
            raise ValueError(f"durability={durability!r} needs a checkpoint_dir to keep its files in")
        for name, number in {"shard": shard, "shards": shards, "threads": threads}.items():
            if isinstance(number, bool) or not isinstance(number, int):
                raise TypeError(f"{name} is a whole number, got {number!r}")
        check_seconds(checkpoint_seconds=checkpoint_seconds, heartbeat=heartbeat)
        if checkpoint_dir is not None:
            checkpoint_dir = check_path(checkpoint_dir, "checkpoint_dir")
        own = None
        if durability != "none" and checkpoint_dir is not None:
            own = shard_directory(checkpoint_dir, shard, shards)
        self._stack, self._periodic = ExitStack(), ExitStack()
        self._part = (shard, shards)
        self._checkpoint_seconds, self._heartbeat = checkpoint_seconds, heartbeat
        self._readings: dict[int, ShardSnapshot] = {}  # snapshots of clients, by number
        self._beginning = threading.Lock()
        # Not from 1: a reader that goes on when the shard was restarted must not take part in another's snapshot.
        self._numbers = count(1 + secrets.randbelow(1 << 39))
        self._pool = KernelThreads(threads)
        self._persistence = ShardPersistence(durability, own, repair=repair)
        self._failure = ""
        with ExitStack() as stack:  # if anything fails before the block is entered, the directory is released
            stack.callback(self._persistence.close)
            if checkpoint_dir is not None:
                checkpoint_dir.mkdir(parents=True, exist_ok=True)
            self._shard = Shard(
                shard, shards, pool=self._pool, journal=self._persistence.journal,
                take_back=self._persistence.take_back, scratch=checkpoint_dir,
            )  # fmt: skip
            done = self._persistence.start(self._shard)
            compile_kernels()
            self._server = Server(
                self._verbs(), listen=listen, role="parameters", keys=keys, insecure=insecure, heartbeat=heartbeat,
                transport=transport, one_job=True, facts=self._facts,
            )  # fmt: skip
            self._server.once.restore(done)
            self._ownership = stack.pop_all()

    def __repr__(self) -> str:
        """Return where it listens."""
        return f"ParameterServer({self.endpoint!r})"

    @property
    def endpoint(self) -> str:
        """The address at which clients find this shard."""
        return self._server.endpoint

    def statistics(self) -> ShardStatistics:
        """Statistics of the shard since it started."""
        return self._shard.statistics()

    def transport_statistics(self) -> ServerStatistics:
        """Return requests, errors and bytes since the shard started."""
        return self._server.statistics()

    def _facts(self) -> dict[str, object]:
        """Return what ``anabranch status`` shows: the tables, and how far apart the workers are."""
        tables = self._shard.statistics().tables.values()
        return {
            "tables": len(tables),
            "rows": sum(table.rows for table in tables),
            "stored_bytes": sum(table.bytes for table in tables),
            **self._shard.clocks(),
        }

    def checkpoint(self) -> None:
        """Write the shard's state now, if ``durability`` keeps any."""
        self._persistence.checkpoint()

    def __enter__(self) -> ParameterServer:
        with ExitStack() as stack:
            stack.callback(self._pool.close)
            stack.callback(self._end_readings)
            stack.enter_context(self._ownership)
            self._persistence.checkpoint()
            stack.enter_context(self._server)
            self._periodic.enter_context(
                periodic(
                    self._checkpoint_if_possible, self._checkpoint_seconds, name="anabranch-shard-saver", patience=600.0
                )
            )
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *failure: Any) -> None:
        self._periodic.close()
        try:
            if failure[0] is None:
                self._server.drain(self._server.drain_seconds)
                self._persistence.checkpoint()
        finally:
            self._stack.__exit__(*failure)

    def _checkpoint_if_possible(self) -> None:
        try:
            self._persistence.checkpoint()
            self._failure = ""
        except BaseException as error:  # noqa: BLE001 - the shard still serves; its log, or the next try, keeps the state
            mark("parameter_server.checkpoint_failed", error=str(error))
            if str(error) != self._failure:
                _log.warning("no checkpoint could be written; the previous one stays the newest: %s", error)
            self._failure = str(error)

    # --- verbs ------------------------------------------------------------------------------------------------------

    def _verbs(self) -> list[Verb]:
        def again(call: Call) -> None:
            call.reply(payload=pack(PushReply(self._persistence.number(call.identity))))

        shard = self._shard
        changes: dict[str, Callable[[Any, Call], list[str] | None]] = {
            "init": lambda request, call: shard.init(request.message, call.tensors),
            "join": lambda request, call: shard.join(request.message, call.identity[0]),
            "push": self._push,
            "restore": lambda request, call: shard.restore(request.message, call.tensors),
            "drop": lambda request, call: shard.drop(request.message),
        }
        answers: dict[str, Callable[[Any, Call], _Answer | None]] = {
            "pull": self._pull,
            "release": lambda request, call: shard.release(request.message, request.client),
            "norm": lambda request, call: (shard.squared_norm(request.message, call.deadline, request.client), ()),
            "export": lambda request, call: shard.export(request.message),
            "snapshot": self._snapshot,
            "barrier": lambda request, call: shard.barrier(request.message, call.deadline, request.client),
            "describe": lambda request, call: (None, _at_length(shard.describe())),
            "start": lambda request, call: (self._persistence.incarnation, ()),
            "statistics": lambda request, call: (None, _at_length(shard.statistics())),
        }
        return [
            *(
                Verb(name, partial(self._change, run), self._check, once=True, again=again, roles=_WORKERS)
                for name, run in changes.items()
            ),
            *(Verb(name, partial(self._answer, run), self._check, roles=_WORKERS) for name, run in answers.items()),
        ]

    def _check(self, header: RequestHeader) -> ShardRequest:
        """Return the request, if this is the shard that the client means, it has all of the client's pushes, and the
        message and its tensors fit.
        """
        expected, verb = ExpectedState.decode(header.schema), header.verb
        client = b"" if expected is None else expected.epoch
        if expected is not None:
            if expected.shards and (expected.shard, expected.shards) != self._part:
                shard, shards = self._part
                raise SchemaError(
                    f"endpoint {expected.shard} ({self.endpoint}) of the client's {expected.shards} is shard {shard} "
                    f"of {shards}; name the endpoints of all {shards} shards in their order, or for {expected.shards} "
                    f"start each server with its --shard and --shards {expected.shards}"
                )
            self._persistence.check(expected)
        message = unpack(header.payload, MESSAGES[verb]) if verb in MESSAGES else None
        if isinstance(message, (PullMessage, PushMessage)):
            came = [(DTYPES[one.code], one.shape) for one in header.tensors]
            return check(self._shard.contents, message, came, client)
        if header.tensors and verb not in ("init", "restore"):
            raise SchemaError(f"{verb} takes no tensors, got {len(header.tensors)}")
        nbytes = 0
        if isinstance(message, ExportMessage):
            nbytes = sum(tensor.nbytes for tensor in self._shard.contents.export(message)[1])
        elif isinstance(message, SnapshotMessage) and message.number and message.part >= 0:
            nbytes = self._reading(message).part_bytes
        return ShardRequest(message, nbytes, client)

    def _change(self, run: Callable[[Any, Call], list[str] | None], call: Call) -> None:
        try:
            with self._persistence.asked_by(call.identity, call.settled) as change:
                full = run(call.checked, call)
        except (NotFound, NonFinite, SchemaError):
            raise
        except (ValueError, TypeError, KeyError) as error:  # an invalid spec or optimizer
            raise SchemaError(f"{call.verb}: {error}") from error
        except (MemoryError, OverflowError) as error:
            raise _without_memory(call, error) from error
        self._persistence.commit(change, call.deadline)
        call.reply(payload=pack(PushReply(change.number, full or [])))

    def _answer(self, run: Callable[[Any, Call], _Answer | None], call: Call) -> None:
        try:
            payload, tensors = run(call.checked, call) or (None, ())
        except MemoryError as error:
            raise _without_memory(call, error) from error
        if call.verb in _SHOWING:
            self._persistence.commit_step(call.deadline)
        call.reply(tensors, b"" if payload is None else pack(payload))

    def _push(self, request: RowRequest, call: Call) -> list[str]:
        request.take(call.tensors)
        return self._shard.push(request, peer=call.peer.name, deadline=call.deadline)

    def _pull(self, request: RowRequest, call: Call) -> _Answer:
        request.take(call.tensors)
        return self._shard.pull(request, call.deadline)

    def _snapshot(self, request: ShardRequest, _: Call) -> _Answer | None:
        message = request.message
        if not message.number:
            reading, seconds = self._shard.snapshot(message.names, 2 * self._heartbeat), 2 * self._heartbeat
            facts = {**reading.state, "groups": len(reading.groups), "part_bytes": reading.part_bytes}
            with self._beginning:
                alive = {number: one for number, one in self._readings.items() if not one.rows.ended}
                self._readings = {**alive, (number := next(self._numbers)): reading}
            return None, _at_length({**facts, "number": number, "seconds": seconds})
        reading = self._reading(message)
        if message.part == -2:
            reading.rows.close()
        elif message.part == -1:
            reading.rows.touch()
        else:
            return reading.part(message.part)
        return None

    def _reading(self, message: SnapshotMessage) -> ShardSnapshot:
        reading = self._readings.get(message.number)
        if reading is None:
            why = "nobody has read it for two heartbeats, or this shard was restarted"
            raise NotFound(f"snapshot {message.number} has ended: {why}")
        return reading

    def _end_readings(self) -> None:
        for reading in self._readings.values():
            reading.rows.close()


def _without_memory(call: Call, error: Exception) -> Overloaded:
    return Overloaded(f"{call.verb}: this shard does not have enough memory for it: {error}")


def _at_length(answer: object) -> list[Tensor]:
    """Return text that may be too long for a header."""
    return [torch.frombuffer(bytearray(pack(answer)), dtype=torch.uint8)]
