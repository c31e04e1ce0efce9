"""The ranks of a pipeline in separate processes, which take turns together.

A *turn* is a unit of work of all ranks: a forward, its backward, a step. Between two ranks messages of a turn travel in
order, and the last one is its end, which carries ``done`` or the reason of failure::

    rank 0   facts ──> data ──> data ──> end(done)
    rank 1   ............... data ──> end(fault)          a failing rank ends its turn early, for all peers
    rank 2   .................... data ──> end(fault)     and one that hears of it passes it on

So a receiver always knows whether another message is due: it stops at the end of the turn, and in every case both sides
are at the same place in the stream when the next turn begins. No rank ends a turn before all have done their work.

Messages are sent over a ``Channel``: in shared memory if all ranks are on one host, else over the group's gloo. A wait
for messages has a deadline, and checks the peers' heartbeats meanwhile. Tensors of GPUs go over the host.
"""

from __future__ import annotations

import atexit
import hashlib
import itertools
import logging
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from time import monotonic
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from anabranch.deadline import Deadline
from anabranch.errors import PipelineError
from anabranch.liveness.group import Group
from anabranch.liveness.meeting import end_without_waiting, interruptible
from anabranch.liveness.peers import Identity, peers_of_job
from anabranch.pipeline.action_runner import ActionFailure, Runner, phase_of
from anabranch.pipeline.description import Observed
from anabranch.pipeline.links.exchange import Aborted, Message
from anabranch.pipeline.links.gloo_channel import GlooChannel
from anabranch.pipeline.links.inbox import Channel, Inbox
from anabranch.pipeline.links.packet_codec import Facts, Header, PacketFault, pack
from anabranch.pipeline.links.shared_memory_channel import SharedMemoryChannel, meet
from anabranch.pipeline.local_ranks import annotate
from anabranch.pipeline.pipe_call import CallOutcome
from anabranch.pipeline.schedule.actions import Action, Kind
from anabranch.pipeline.stage.packet import Packet, cut
from anabranch.pipeline.stage.stage import StageRun
from anabranch.tensors import Structure

__all__ = ["RankEngine", "RankTurn"]

_log = logging.getLogger("anabranch.pipeline")

_TEXT_BYTES = 256
_MOST_WORDS = 1 << 16
_CONNECT_SECONDS = 30.0
_FAREWELL_SECONDS = 0.5
_LAST_SECONDS = 2.0
_FIRST_TAG = 0x70697065
# Pipes on one group are separated by their tags; ranks make them in the same order.
_tags: weakref.WeakKeyDictionary[dist.ProcessGroup, Iterator[int]] = weakref.WeakKeyDictionary()


class RankEngine:
    """Runs this rank's actions in the calling thread, and exchanges messages with the other ranks of ``group``.

    Making one is a collective: every rank of the group makes one.

    Args:
        group: the ranks, in the order of the schedule's; its backend must carry CPU tensors, as gloo does.
        rank_of: the rank of each stage.
        timeout: seconds that a turn may take.
        heartbeat: seconds between the two checks after which a stopped rank is lost.
        shared_memory: true if ranks that are all on one host exchange tensors there.
        likeness: a string that must be equal on all ranks; of long ones the beginning is shown.

    Attributes:
        peers: the other ranks.
        inbox: the messages that have arrived.
        bytes_sent: of all tensors sent.

    Raises:
        ValueError: the group's backend does not support CPU tensors, or the ranks' pipes differ.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        rank_of: tuple[int, ...],
        timeout: float,
        heartbeat: float = 1.0,
        shared_memory: bool = True,
        likeness: str = "",
    ) -> None:
        if not heartbeat > 0:
            raise ValueError(f"heartbeat is a number of seconds above 0, got {heartbeat!r}")
        if "gloo" not in str(dist.get_backend_config(group)):
            raise ValueError(
                f"a pipeline's group must carry CPU tensors, but {dist.get_backend(group)} does not; give it "
                'process_group=dist.new_group(backend="gloo")'
            )
        self.group = group
        peers = peers_of_job()
        self._members = Group(peers, dist.get_process_group_ranks(group), heartbeat, recovers=True)
        self._rank_of = rank_of
        self._timeout = timeout
        self._turns = 0
        self.peers = [peer for peer in range(self._members.size) if peer != self.rank]
        self.inbox = Inbox(self.peers)
        self._check_alike(likeness)
        identities = [Identity.decode(text) for text in self._gather(peers.identity.encode())]
        peers.know(dict(zip(self._members.ranks, identities, strict=True)), heartbeat)
        # Nothing that holds this engine: its threads end when the last reference to it goes.
        self._noticed = partial(_noticed, self._members, self.inbox)
        tag = next(_tags.setdefault(group, itertools.count(_FIRST_TAG)))
        self.name = f"pipe {','.join(map(str, self._members.ranks))}/{tag}"
        on_one_host = len({identity.host for identity in identities}) == 1
        sockets = (
            meet(self.rank, self._gather, _CONNECT_SECONDS) if self._everyone(shared_memory and on_one_host) else None
        )
        self._channel: Channel = (
            GlooChannel(group, tag, self.inbox) if sockets is None else SharedMemoryChannel(sockets, self.inbox)
        )
        self.observed = Observed()
        self.bytes_sent = 0
        self.wait_seconds = 0.0
        leave = partial(_exit_without_lost_ranks, self._channel)
        self._end = weakref.finalize(self, _end, self._channel, leave)
        atexit.register(leave)  # after the finalizer's own, so called before it

    @property
    def rank(self) -> int:
        """This process's number in the group."""
        return self._members.rank

    def _check_alike(self, likeness: str) -> None:
        digest = hashlib.blake2b(likeness.encode(), digest_size=8).hexdigest()
        told = self._gather(f"{digest} {likeness}".encode()[:_TEXT_BYTES].decode(errors="ignore"))
        if len({text.split(" ")[0] for text in told}) > 1:
            each = "; ".join(
                f"rank {r}: {text.split(' ', 1)[1]}" for r, text in zip(self._members.ranks, told, strict=True)
            )
            raise ValueError(
                "the ranks make different pipes; use the same layers, balance and schedule on all of them (a balance "
                f"that each rank measures itself differs: balance='time' is measured on one). {each}"
            )

    def _gather(self, text: str) -> list[str]:
        mine = torch.zeros(_TEXT_BYTES, dtype=torch.uint8, device="cpu")
        mine[: len(text.encode())] = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8) if text else 0
        everyone = [torch.empty_like(mine) for _ in range(self._members.size)]
        interruptible(partial(dist.all_gather, everyone, mine, group=self.group))
        return [bytes(row.tolist()).rstrip(b"\0").decode() for row in everyone]

    def _everyone(self, this_one: bool) -> bool:
        return all(answer == "yes" for answer in self._gather("yes" if this_one else "no"))

    @contextmanager
    def turn(self, operation: str, step: int) -> Iterator[RankTurn]:
        """Take a turn of all ranks together; it ends when all have finished it, or with an error on each.

        Raises:
            BaseException: the error that a stage here raised, with a note of the place.
            PipelineError: another rank failed.
            PeerLost: another rank is gone or stopped.
            DeadlineExceeded: the turn took longer than the timeout.
        """
        self._turns += 1
        self.inbox.begin(self._turns, operation)
        deadline = Deadline.after(self._timeout)
        turn = RankTurn(self, self._turns, operation, step, deadline)
        try:
            yield turn
            turn.end(None)
            turn.wait_for_all_ends()
            self.flush(self._timeout)
        except Aborted:
            fault = self.inbox.fault
            assert fault is not None
            turn.end(fault)
            raise _as_error(fault) from None
        except ActionFailure as failure:
            turn.end(self._describe(failure.error, failure.action))
            raise annotate(failure) from None
        except BaseException as error:
            turn.end(self._describe(error, None))
            raise

    def _describe(self, error: BaseException, action: Action | None) -> PacketFault:
        kind = type(error)
        name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        where = (action.stage, action.microbatch, phase_of(action)) if action is not None else (None, None, None)
        text = _sendable("".join(traceback.format_exception(error)))
        return PacketFault(self.rank_name(self.rank), name, _sendable(_words_of(error)), text, *where)

    def flush(self, seconds: float) -> None:
        """Wait until all messages have been handed over: the process may end after this."""
        self._channel.flush(seconds)

    def look(self) -> None:
        """Receive the messages that have arrived."""
        self._channel.look()

    def rank_name(self, rank: int) -> int:
        """Return the number in the job of a rank of the group."""
        return self._members.ranks[rank]

    def send(self, rank: int, header: Header, tensors: Sequence[Tensor] = ()) -> None:
        """Send a message to ``rank``; ``tensors`` are flat bytes."""
        self.bytes_sent += sum(tensor.numel() for tensor in tensors)
        self._channel.send(rank, header, [tensor.cpu() for tensor in tensors])

    def wait(
        self,
        found: Callable[[], bool],
        deadline: Deadline,
        operation: str,
        step: int,
        peers: Sequence[int],
    ) -> None:
        """Wait for ``found()``, which looks at the inbox; ``peers`` are the ranks it depends on."""
        inbox, began = self.inbox, monotonic()

        def done(seconds: float) -> bool:
            ends = lambda: found() or bool(inbox.fault or inbox.lost or inbox.other_operation)  # noqa: E731
            self._channel.wait_for(ends, seconds)
            with inbox.changed:
                if found():
                    return True
                if inbox.fault is not None:
                    raise Aborted
                if inbox.other_operation is not None:
                    raise self._out_of_order(*inbox.other_operation, operation)
            return False

        names = [self.rank_name(rank) for rank in peers]
        self._members.wait(done, f"pipeline {operation}", deadline, awaited=names, step=step, noticed=self._noticed)
        self.wait_seconds += monotonic() - began

    def _out_of_order(self, peer: int, theirs: str, ours: str) -> RuntimeError:
        here, there = self.rank_name(self.rank), self.rank_name(peer)
        return RuntimeError(
            f"rank {here} runs the pipe's {ours.split()[0]} while rank {there} runs its {theirs}; every rank makes the "
            "same calls in the same order"
        )

    def rank_of(self, stage: int) -> int:
        """Return the rank of ``stage``."""
        return self._rank_of[stage]

    def close(self) -> None:
        """End the threads. Those still waiting for a peer end with the process group."""
        self._end()


def _noticed(members: Group, inbox: Inbox) -> dict[int, str]:
    """Return the ranks, by their numbers in the job, that are lost by what connections to them say."""
    with inbox.changed:
        return {members.ranks[rank]: why for rank, why in inbox.lost.items()}


def _exit_without_lost_ranks(channel: Channel) -> None:
    """End the process without gloo, which would wait for a lost rank, or abort because a thread still waits."""
    channel.settle(_LAST_SECONDS)
    if channel.is_stuck():
        end_without_waiting()


def _end(channel: Channel, leave: Callable[[], None]) -> None:
    channel.close()
    if not channel.is_stuck():
        atexit.unregister(leave)


def _words_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - whatever it raises, the others must hear of the failure
        return "<str() of the error failed>"


def _sendable(text: str) -> str:
    """Return the text as valid UTF-8, without the middle of a very long one, so that waiting ranks get it at once."""
    if len(text) > _MOST_WORDS:
        half = _MOST_WORDS // 2
        text = f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"
    return text.encode("utf-8", "backslashreplace").decode()


def _as_error(fault: PacketFault) -> PipelineError:
    place = f" in stage {fault.stage}, microbatch {fault.microbatch}, {fault.phase}" if fault.phase else ""
    return PipelineError(
        f"rank {fault.rank} raised {fault.type_name}{place}: {fault.message}",
        stage=fault.stage,
        microbatch=fault.microbatch,
        phase=fault.phase,
        remote_type=fault.type_name,
        remote_traceback=fault.traceback,
    )


class RankTurn:
    """One rank's part in a turn; the link of its runner."""

    def __init__(self, engine: RankEngine, number: int, operation: str, step: int, deadline: Deadline) -> None:
        self._engine = engine
        self.name = f"{engine.name}/{number}"
        self._number = number
        self._operation = operation
        self._step = step
        self._deadline = deadline
        self._has_ended = False
        self._word: object = None
        self._observed = Observed()

    def agree(self, make: Callable[[], Facts]) -> Facts:
        """Return the call's facts, made on the rank of the first stage and sent to all others."""
        engine, source = self._engine, self._engine.rank_of(0)
        if engine.rank == source:
            facts = make()
            for peer in engine.peers:
                engine.send(peer, Header(self._number, self._operation, "facts", facts=facts))
            return facts
        self._wait(lambda: engine.inbox.facts is not None, "start", [source])
        assert engine.inbox.facts is not None
        return engine.inbox.facts

    def run(
        self,
        runs: Mapping[int, StageRun],
        actions: Sequence[Sequence[Action]],
        outside: Mapping[int, Sequence[Message]],
        *,
        keep: bool = False,
    ) -> CallOutcome:
        """Run this rank's actions."""
        runner = Runner(runs, outside, self, keep=keep)
        try:
            runner.run(actions[self._engine.rank])
        except BaseException:
            for run in runs.values():
                run.abandon()
            raise
        outcome = CallOutcome()
        self._observed = runner.observed
        outcome.outputs, outcome.input_gradients = runner.outputs, runner.input_gradients
        return outcome

    def share(self, index: int, tensor: Tensor | None, ranks: Sequence[int]) -> list[Tensor | None]:
        """Return the tensors that ``ranks``, this one among them, give under ``index``, in the order of ranks."""
        engine = self._engine
        others = [rank for rank in ranks if rank != engine.rank]
        spec, described, parts = pack([[tensor]])
        header = Header(self._number, self._operation, "share", stage=index, body=spec, tensors=described)
        for rank in others:
            engine.send(rank, header, parts)
        shares = engine.inbox.shares
        self._wait(lambda: all((index, rank) in shares for rank in others), "tied gradients", others)
        return [tensor if rank == engine.rank else shares[index, rank] for rank in sorted(ranks)]

    def spread(self, value: Structure, source: int) -> Structure:
        """Return the value that rank ``source`` gives, on every rank; tensors come without a graph."""
        engine = self._engine
        if engine.rank == source:
            packet, _ = cut(value)
            spec, described, parts = pack([packet])
            header = Header(self._number, self._operation, "spread", body=spec, tensors=described)
            for peer in engine.peers:
                engine.send(peer, header, parts)
            return value
        self._wait(lambda: source in engine.inbox.spread, "output", [source])
        return cast(list[Packet], engine.inbox.spread[source])[0].structure()

    def put_note(self, word: object) -> None:
        """Leaves a plain value for all ranks, sent with the end of the turn."""
        self._word = word

    def notes(self) -> dict[int, object]:
        """Return each rank's message at the end of the turn."""
        words = {peer: cast("list[object]", body)[0] for peer, body in self._engine.inbox.bodies.items()}
        return {**words, self._engine.rank: self._word}

    def send(self, action: Action, message: Message) -> None:
        """Send to the rank of the action's peer; within this rank the message goes straight to the inbox."""
        engine = self._engine
        assert action.peer is not None
        rank = engine.rank_of(action.peer)
        if rank == engine.rank:
            with engine.inbox.changed:
                engine.inbox.data[_key(action)] = message
            return
        spec, described, parts = pack(message)
        stage, peer, i = action.stage, action.peer, action.microbatch
        header = Header(self._number, self._operation, action.kind.value, stage, peer, i, spec, described)
        engine.send(rank, header, parts)

    def receive(self, action: Action) -> Message:
        """Wait for the message of the action's peer."""
        assert action.peer is not None
        sent = Action(_SENT_AS[action.kind], action.peer, action.microbatch, action.stage)
        key, data = _key(sent), self._engine.inbox.data
        self._wait(lambda: key in data, str(action), [self._engine.rank_of(action.peer)])
        with self._engine.inbox.changed:
            return data.pop(key)

    def check(self) -> None:
        """Raise ``Aborted`` once another rank's fault has arrived."""
        self._engine.look()
        if self._engine.inbox.fault is not None:
            raise Aborted

    def end(self, fault: PacketFault | None) -> None:
        """Tells every peer that nothing more comes in this turn, and the reason; once."""
        if not self._has_ended:
            self._has_ended = True
            body = None if fault else [self._word, self._observed.as_plain()]
            for peer in self._engine.peers:
                self._engine.send(peer, Header(self._number, self._operation, "end", body=body, fault=fault))
            if fault is not None:
                self._engine.flush(_FAREWELL_SECONDS)

    def wait_for_all_ends(self) -> None:
        """Wait until every peer has done its part."""
        engine = self._engine
        waiting = [peer for peer in engine.peers if peer not in engine.inbox.ended]
        self._wait(lambda: len(engine.inbox.ended) == len(engine.peers), "end", waiting)
        self.check()
        engine.observed.add(self._observed)
        for body in engine.inbox.bodies.values():
            engine.observed.add(Observed.from_plain(cast("list[object]", body)[1]))

    def _wait(self, found: Callable[[], bool], what: str, peers: Sequence[int]) -> None:
        self._engine.wait(found, self._deadline, f"{self._operation} {what}", self._step, peers)


_SENT_AS = {Kind.RECV_F: Kind.SEND_F, Kind.RECV_B: Kind.SEND_B}


def _key(action: Action) -> tuple[str, int, int, int]:
    assert action.peer is not None
    return action.kind.value, action.stage, action.peer, action.microbatch
