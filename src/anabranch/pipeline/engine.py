"""``StageEngine``: runs the actions of the ranks of this process, in turns that all ranks of a pipeline take together.

A *turn* is a unit of work of all ranks: a forward, its backward, a step. A process holds all ranks, each on a thread,
or one of them. Stages of one process are joined by inboxes in memory; between processes messages of a turn travel in
order, and the last one is its end, which carries ``done`` or the reason of failure::

    rank 0   facts ──> data ──> data ──> end(done)
    rank 1   ............... data ──> end(fault)          a failing rank ends its turn early, for all peers
    rank 2   .................... data ──> end(fault)     and one that hears of it passes it on

So a receiver always knows whether another message is due: it stops at the end of the turn, and in every case both sides
are at the same place in the stream when the next turn begins. No rank ends a turn before all have done their work.
"""

from __future__ import annotations

import itertools
import os
import queue
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from functools import partial
from time import perf_counter
from typing import Literal, NamedTuple, TypeAlias

import msgspec
from torch import Tensor

from anabranch.autodiff.thread_modes import ThreadModes, current_streams, on_streams
from anabranch.deadline import LONGEST_SLEEP, Deadline
from anabranch.errors import PipelineError
from anabranch.pipeline.links.connection import (
    Facts,
    Header,
    Inbox,
    PacketFault,
    RankConnection,
    class_name,
    pack,
    pack_message,
)
from anabranch.pipeline.schedule import PHASES, Action, Kind
from anabranch.pipeline.stage.packet import Message, Packet, size_of
from anabranch.pipeline.stage.stage import OUTSIDE, StageRun
from anabranch.record import spans
from anabranch.tensors import Structure, flatten
from anabranch.tensors.tree_codec import decode, encode

Runs: TypeAlias = Mapping[int, StageRun]
Outside: TypeAlias = Mapping[int, Sequence[Message]]

_FAREWELL_SECONDS = 0.5
_pipes = itertools.count()


class Observed(NamedTuple):
    """Measurements of the stages in the last call.

    Attributes:
        seconds: of computing, by (stage, phase), all microbatches together.
        sent_bytes: of the largest microbatch, by (stage, target): activations forward, and gradients back.
    """

    seconds: dict[tuple[int, str], float]
    sent_bytes: dict[tuple[int, int], int]


class Aborted(Exception):
    """Another rank has failed; this one stops."""


class StageEngine:
    """Takes the turns of a pipeline, and is the turn; keeps its threads until it is closed or collected.

    Args:
        rank_of: the rank of each stage.
        timeout: seconds that a turn may take.
        connection: to the other processes, each of which has one rank.

    Attributes:
        observed: measurements of all stages in the last turns.
        bytes_sent: of all tensors sent to other processes.
    """

    def __init__(self, rank_of: tuple[int, ...], timeout: float, connection: RankConnection | None = None) -> None:
        self._rank_of, self._timeout, self._connection = rank_of, timeout, connection
        self._name = f"stages {os.getpid()}/{next(_pipes)}" if connection is None else connection.name
        self._peers = [] if connection is None else connection.peers
        self.rank = 0 if connection is None else connection.rank
        self._inboxes = (
            {rank: Inbox() for rank in range(max(rank_of) + 1)} if connection is None else {self.rank: connection.inbox}
        )
        self._inbox = self._inboxes[self.rank]
        self._in_turn = threading.Lock()
        self._taken_in: int | None = None
        self._threads: StageThreads | None = None
        self._number = 0
        self.observed = Observed({}, {})
        self.bytes_sent = 0

    def __reduce__(self) -> tuple[type[StageEngine], tuple[tuple[int, ...], float]]:
        """Make the engine of a copied pipe, which starts its own threads."""
        return StageEngine, (self._rank_of, self._timeout)

    @contextmanager
    def turn(self, operation: str, step: int) -> Iterator[StageEngine]:
        """Take a turn of all ranks, of call number ``step``; calls of several threads take theirs one after the other.

        It ends when all have finished it, or with an error on each.

        Raises:
            RuntimeError: a stage, the loss or ``rows=`` of this pipe starts it.
            BaseException: the error that a stage here raised, with a note of the place.
            PipelineError: another process failed.
            PeerLost: another process is gone or stopped.
            DeadlineExceeded: the turn, or that of another thread, took longer than the timeout.
        """
        if self._taken_in == threading.get_ident() or (self._threads is not None and self._threads.are_here()):
            what = f"a layer, the loss or rows= of a pipe starts a {operation} of the same pipe"
            raise RuntimeError(f"{what}, which would wait for itself; compute the value before, and pass it in")
        deadline = Deadline(self._timeout)
        while not self._in_turn.acquire(timeout=min(LONGEST_SLEEP, deadline.remaining())):
            deadline.check(peer="another thread that uses the pipe", operation=f"pipeline {operation}", step=step)
        self._taken_in = threading.get_ident()
        try:
            self._begin(operation, step, deadline)
            yield self
            self._finish()
        except Aborted:
            assert isinstance(self._inbox.fault, PacketFault)
            self._end(self._inbox.fault)
            raise PipelineError(**msgspec.structs.asdict(self._inbox.fault)) from None
        except BaseException as error:
            self._end(self._describe(error))
            raise
        finally:
            self._taken_in = None
            self._in_turn.release()

    def _begin(self, operation: str, step: int, deadline: Deadline) -> None:
        # A task of a failed step may still be computing, which cannot be stopped.
        if self._threads is not None and not self._threads.wait(deadline.remaining()):
            raise deadline.error(peer="a worker still busy with a failed step", operation="pipeline", step=step)
        self._number += 1
        self._operation, self._step, self._deadline = operation, step, deadline
        self.seen = Observed({}, {})
        self._has_ended = False
        self._failure: tuple[BaseException, Action | None] | None = None
        for inbox in self._inboxes.values():
            inbox.begin(self._number, operation)

    def _finish(self) -> None:
        """Wait until every other process has done its part."""
        seen: list[Structure] = [self.seen]
        if self._connection is not None:
            self._end(None)
            ended = self._inbox.bodies
            waiting = [peer for peer in self._peers if peer not in ended]
            self._wait(lambda: len(ended) == len(self._peers), "end", waiting)
            if self._inbox.fault:
                raise Aborted
            seen += map(decode, ended.values())
            self._connection.channel.flush(self._timeout)
        for seconds, sent_bytes in seen:
            self.observed.seconds.update(seconds)
            self.observed.sent_bytes.update(sent_bytes)

    def _end(self, fault: PacketFault | None) -> None:
        """Tell every other process that nothing more comes in this turn, and the reason; once."""
        if self._connection is None or self._has_ended:
            return
        self._has_ended = True
        body = None if fault else encode(tuple(self.seen))
        for peer in self._peers:
            self._send(peer, Header(self._number, self._operation, "end", body=body, fault=fault))
        if fault is not None:
            self._connection.channel.flush(_FAREWELL_SECONDS)

    def _describe(self, error: BaseException) -> PacketFault | None:
        if self._connection is None:
            return None
        where: tuple[int | None, int | None, str | None] = (None, None, None)
        place = ""
        if self._failure is not None and self._failure[0] is error and (action := self._failure[1]) is not None:
            where = action.stage, action.microbatch, PHASES[action.kind]
            place = " in stage {}, microbatch {}, {}".format(*where)
        shown = traceback.TracebackException.from_exception(error)  # its str() is one even where the error's own fails
        kind = class_name(type(error))
        message = _sendable(f"rank {self._connection.names[self.rank]} raised {kind}{place}: {shown}")
        return PacketFault(message, *where, kind, _sendable("".join(shown.format())))

    def _send(self, peer: int, header: Header, tensors: Sequence[Tensor] = ()) -> None:
        assert self._connection is not None
        self.bytes_sent += sum(tensor.numel() for tensor in tensors)
        self._connection.channel.send(peer, header, [tensor.cpu() for tensor in tensors])

    def _wait(self, ready: Callable[[], bool], what: str, ranks: Sequence[int]) -> None:
        """Wait for ``ready()``, which looks at the inbox; other processes' ``ranks`` are waited for."""
        assert self._connection is not None
        inbox, names = self._inbox, self._connection.names

        def ended() -> bool:
            return ready() or bool(inbox.fault or inbox.lost or inbox.other_operation)

        def done(seconds: float) -> bool:
            with inbox.changed:
                inbox.changed.wait_for(ended, seconds)
                if ready():
                    return True
                if inbox.fault:
                    raise Aborted
                if inbox.other_operation is not None:
                    peer, theirs = inbox.other_operation
                    what = f"rank {names[self.rank]} runs the pipe's {self._operation}, rank {names[peer]} its {theirs}"
                    raise RuntimeError(f"{what}; every rank makes the same calls in the same order")
            return False

        self._connection.wait(done, f"pipeline {self._operation} {what}", self._deadline, ranks, self._step)

    # What all ranks know.

    def agree(self, make: Callable[[], Facts]) -> Facts:
        """Return the call's facts, made on the rank of the first stage and sent to all others."""
        if self._connection is None:
            return make()
        source = self._rank_of[0]
        return Facts(*self.spread(tuple(make()) if self.rank == source else (), source, "facts"))

    def share(self, name: int | str, value: Structure, ranks: Sequence[int] | None = None) -> list[Structure]:
        """Return the values that ``ranks``, by default all, give under ``name``, in their order, this one's too."""
        if self._connection is None:
            return [value]
        ranks = sorted([*self._peers, self.rank] if ranks is None else ranks)
        return self._exchanged(name, value, [rank for rank in ranks if rank != self.rank], ranks)

    def spread(self, value: Structure, source: int, name: str = "output") -> Structure:
        """Return the value that rank ``source`` gives, on every rank; tensors come without a graph."""
        peers = self._peers if self.rank == source else []
        return self._exchanged(name, value, peers, [source])[0]

    def _exchanged(self, name: int | str, value: Structure, to: Sequence[int], ranks: Sequence[int]) -> list[Structure]:
        """Give ``value`` to these other ranks; return what ``ranks`` give, of this one the value itself."""
        if to:
            spec, described, parts = pack((name, value), flatten(value)[0])
            header = Header(self._number, self._operation, "value", body=spec, tensors=described)
            for peer in to:
                self._send(peer, header, parts)
        values, others = self._inbox.values, [rank for rank in ranks if rank != self.rank]
        if others:
            self._wait(lambda: all((name, rank) in values for rank in others), str(name), others)
        return [value if rank == self.rank else values[name, rank] for rank in ranks]

    # Actions.

    def run(
        self, runs: Runs, actions: Sequence[Sequence[Action]], outside: Outside, *, keep: bool = False
    ) -> EngineRun:
        """Run the actions of the ranks here.

        Args:
            runs: the stages of this process, by number.
            actions: of each rank.
            outside: the caller's inputs to each stage, or the gradients of its outputs: a message a microbatch.
            keep: another backward may follow.
        """
        run = EngineRun(self, runs, outside, keep)
        try:
            if len(self._inboxes) == 1:
                run.perform(self.rank, actions[self.rank])
            else:
                self._run_on_threads(run, actions)
        except BaseException:
            for one in runs.values():
                one.abandon()
            raise
        return run

    def _run_on_threads(self, run: EngineRun, actions: Sequence[Sequence[Action]]) -> None:
        threads = self._threads = self._threads or StageThreads(len(actions))
        streams, modes = current_streams(), ThreadModes.take()

        def work(rank: int) -> None:
            try:
                # In backward, too: under autocast some gradients are rounded otherwise.
                with modes.entered(), on_streams(streams):
                    run.perform(rank, actions[rank])
            except Aborted:
                pass
            except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
                self._fail(error)

        threads.start([partial(copy_context().run, work, rank) for rank in self._inboxes])
        try:
            failed = lambda: self._failure is not None  # noqa: E731
            # A stage that waits for another names it, a moment later than this thread is late.
            if not any(threads.wait(seconds, failed) for seconds in (self._deadline.remaining(), _FAREWELL_SECONDS)):
                late = self._deadline.error(peer="the pipeline's workers", operation="pipeline step", step=self._step)
                self._fail(late)
        except BaseException as error:
            self._fail(error)
            threads.wait(_FAREWELL_SECONDS)
            raise
        if self._failure is not None:
            threads.wait(_FAREWELL_SECONDS)
            raise self._failure[0]

    def _fail(self, error: BaseException, action: Action | None = None) -> None:
        """Note the reason why the turn fails, of which the first counts, and end it for all ranks here."""
        with self._inbox.changed:
            self._failure = self._failure or (error, action)
        if self._connection is None:
            for inbox in self._inboxes.values():
                inbox.fail()

    def send(self, action: Action, peer: int, message: Message) -> None:
        """Hand over what comes of an action to another stage; do not wait for its arrival."""
        rank, where = self._rank_of[peer], (action.stage, peer, action.microbatch)
        if rank in self._inboxes:
            self._inboxes[rank].put((action.kind, *where), message)
            return
        spec, described, parts = pack_message(message)
        self._send(rank, Header(self._number, self._operation, action.kind.value, *where, spec, described), parts)

    def receive(self, action: Action, peer: int) -> Message:
        """Wait for what another stage sends to an action: the message of its own of that kind and microbatch."""
        inbox = self._inboxes[self._rank_of[action.stage]]
        key, data = (action.kind, peer, action.stage, action.microbatch), inbox.data
        if self._connection is not None:
            self._wait(lambda: key in data, f"R{action}<{peer}", [self._rank_of[peer]])
        with inbox.changed:
            if key not in data:
                began = spans.begin()
                inbox.changed.wait_for(lambda: key in data or bool(inbox.fault), self._deadline.remaining())
                if began:
                    facts: dict[str, object] = {"peer": f"stage {peer}", "operation": f"R{action}<{peer}"}
                    spans.complete(began, "wait", "wait", facts=facts)
            if inbox.fault:
                raise Aborted
            if key not in data:
                what = f"pipeline R{action}<{peer}"
                raise self._deadline.error(peer=f"stage {peer}", operation=what, step=self._step)
            return data.pop(key)

    def close(self) -> None:
        """End the threads. Those still waiting for a peer end with the process group; a later run starts new ones."""
        if self._threads is not None:
            self._threads.close()
            self._threads = None
        if self._connection is not None:
            self._connection.close()


class EngineRun:
    """One run of the actions of all ranks here; each touches only its own stages.

    Attributes:
        outputs: by microbatch what leaves the last stage.
        input_gradients: of the caller's inputs, by stage and microbatch.
    """

    def __init__(self, engine: StageEngine, runs: Runs, outside: Outside, keep: bool) -> None:
        self._engine, self._runs, self._outside, self._keep = engine, runs, outside, keep
        self.outputs: dict[int, Message] = {}
        self.input_gradients: dict[tuple[int, int], Message] = {}

    def perform(self, rank: int, actions: Sequence[Action]) -> None:
        """Run ``actions`` in order.

        Raises:
            BaseException: the error of a stage, with a note of the place.
            Aborted: a stage of another rank has failed.
        """
        inbox = self._engine._inboxes[rank]
        for action in actions:
            if inbox.fault:
                raise Aborted
            self._take(action)

    def _take(self, action: Action) -> None:
        """Run a stage on what others send to it, and send on what comes of it."""
        engine, stage, arrived = self._engine, self._runs[action.stage].stage, dict[int, Message]()
        for peer in {Kind.F: [*stage.sources], Kind.B: [*stage.targets]}.get(action.kind, []):
            if peer != OUTSIDE:
                began = spans.begin()
                arrived[peer] = engine.receive(action, peer)
                if began:
                    self._record(began, "receive", action, peer, arrived[peer])
        started, seconds, place = perf_counter(), engine.seen.seconds, (action.stage, PHASES[action.kind])
        answers = self._compute(action, arrived)
        seconds[place] = seconds.get(place, 0.0) + perf_counter() - started
        sent_bytes = engine.seen.sent_bytes
        for peer, message in answers.items():
            began = spans.begin()
            sent_bytes[action.stage, peer] = max(sent_bytes.get((action.stage, peer), 0), _bytes(message))
            engine.send(action, peer, message)
            if began:
                self._record(began, "send", action, peer, message)

    def _record(self, began: int, way: Literal["receive", "send"], action: Action, peer: int, message: Message) -> None:
        """Record a transfer for a trace."""
        what = "activations" if action.kind is Kind.F else "gradients"
        source, target = (peer, action.stage) if way == "receive" else (action.stage, peer)
        turn = f"{self._engine._name}/{self._engine._number}"
        facts: dict[str, object] = {"stage": action.stage, "microbatch": action.microbatch}
        facts |= {"peer": f"stage {peer}", "bytes": _bytes(message)}
        flow: spans.Flow = (way, f"{turn}/{what} {source}>{target}.{action.microbatch}")
        spans.complete(began, f"{way} {what}", "crossing", flow=flow, facts=facts)

    def _compute(self, action: Action, arrived: dict[int, Message]) -> Mapping[int, Message]:
        """Run a stage; return its messages to others. An exception gets the place."""
        run, i, phase = self._runs[action.stage], action.microbatch, PHASES[action.kind]
        try:
            if spans.fault_handler is not None:
                spans.fault_handler(f"pipeline.{phase}.{action.stage}.{i}")
            with spans.span(phase, "compute", stage=action.stage, microbatch=i):
                answers: dict[int, Message] = {}
                match action.kind:
                    case Kind.F:
                        if OUTSIDE in run.stage.sources:
                            arrived[OUTSIDE] = self._outside[action.stage][i]
                        answers = run.forward(i, arrived)  # type: ignore[arg-type, assignment]
                        output = answers.pop(OUTSIDE, None)
                        if output is not None and (run.head is None or run.head.keeps_outputs):
                            self.outputs[i] = output
                    case Kind.R:
                        run.recompute(i)
                    case Kind.B:
                        if OUTSIDE in run.stage.targets and run.head is None:
                            arrived[OUTSIDE] = self._outside[action.stage][i]
                        answers = run.backward(i, arrived, keep=self._keep)  # type: ignore[arg-type, assignment]
                        if OUTSIDE in answers:
                            self.input_gradients[action.stage, i] = answers.pop(OUTSIDE)
                    case Kind.W:
                        run.weights(i, keep=self._keep)
                return answers
        except BaseException as error:
            error.add_note(f"in stage {action.stage}, microbatch {i}, {phase}")
            self._engine._fail(error, action)
            raise


def _bytes(message: Message) -> int:
    leaves = [leaf for part in message for leaf in (part.leaves if isinstance(part, Packet) else part)]
    return sum([size_of(leaf) for leaf in leaves if isinstance(leaf, Tensor)])


def _sendable(text: str) -> str:
    """Return the text as UTF-8, which names of files need not be."""
    return text.encode("utf-8", "backslashreplace").decode()


_Task = Callable[[], None]


class StageThreads:
    """The worker threads of a pipe in one process, one for each rank, which each run a task; tasks must not raise.

    They live as long as the pipe, because PyTorch's per-thread state, built at a thread's first computation, is costly.
    They hold no reference to the pipe, and end when it is collected or closed.

    >>> threads, seen = StageThreads(2), []
    >>> threads.start([lambda: seen.append(0), lambda: seen.append(1)])
    >>> threads.wait(60.0), sorted(seen)
    (True, [0, 1])
    >>> threads.close()

    Args:
        count: how many.
    """

    def __init__(self, count: int) -> None:
        self._queues: list[queue.SimpleQueue[_Task | None]] = [queue.SimpleQueue() for _ in range(count)]
        self._changed = threading.Condition()
        self._running: list[_Task] = []
        self._threads = [
            threading.Thread(
                target=_work, args=(tasks, self._changed, self._running), name=f"anabranch-stage-{index}", daemon=True
            )
            for index, tasks in enumerate(self._queues)
        ]
        for thread in self._threads:
            thread.start()
        self._end = weakref.finalize(self, _end_threads, self._queues)

    def start(self, tasks: Sequence[_Task]) -> None:
        """Give each thread a task."""
        self._running += tasks
        for queue_, task in zip(self._queues, tasks, strict=True):
            queue_.put(task)

    def wait(self, seconds: float, enough: Callable[[], bool] = bool) -> bool:
        """Wait for the tasks to end, or one of them and then ``enough()``; return True if all tasks have ended."""
        deadline = Deadline(max(seconds, 1e-3))
        with self._changed:
            while self._running and not enough() and not deadline.expired():
                # A signal in the moment before the wait begins wakes nobody.
                self._changed.wait(min(LONGEST_SLEEP, deadline.remaining()))
            return not self._running

    def are_here(self) -> bool:
        """Return True on one of these threads."""
        return threading.current_thread() in self._threads

    def close(self) -> None:
        """End the threads, each after its current task, and wait briefly for them."""
        self._end()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout=5.0)


def _work(tasks: queue.SimpleQueue[_Task | None], changed: threading.Condition, running: list[_Task]) -> None:
    while (task := tasks.get(timeout=None)) is not None:  # idle until the engine has work, or ends the thread
        task()
        with changed:
            running.remove(task)
            changed.notify_all()
        del task  # with what it refers to, while the thread waits


def _end_threads(queues: Sequence[queue.SimpleQueue[_Task | None]]) -> None:
    for tasks in queues:
        tasks.put(None)
