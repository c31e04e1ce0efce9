"""All ranks of a pipeline in this process: a worker thread for each."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from anabranch.autodiff.thread_modes import current_streams, on_streams
from anabranch.deadline import LONGEST_SLEEP, Deadline
from anabranch.errors import DeadlineExceeded
from anabranch.pipeline.action_runner import ActionFailure, Runner, phase_of
from anabranch.pipeline.description import Observed
from anabranch.pipeline.links.exchange import Aborted, Exchange, Message
from anabranch.pipeline.links.packet_codec import Facts
from anabranch.pipeline.links.stage_threads import StageThreads
from anabranch.pipeline.pipe_call import CallOutcome
from anabranch.pipeline.schedule.actions import Action
from anabranch.pipeline.stage.stage import StageRun
from anabranch.tensors import Structure

__all__ = ["LocalEngine", "annotate"]


class LocalEngine:
    """Runs every rank's actions on its own worker thread; keeps the threads until it is closed or collected.

    It is its own turn, because there are no other processes to coordinate with.

    Args:
        rank_of: the rank of each stage.
        timeout: seconds that a run may take.
    """

    def __init__(self, rank_of: tuple[int, ...], timeout: float) -> None:
        self._rank_of = rank_of
        self._timeout = timeout
        self._workers: StageThreads | None = None
        self._in_turn = threading.Lock()
        self._word: object = None
        self.observed = Observed()
        self._step = 0

    def __reduce__(self) -> tuple[type[LocalEngine], tuple[tuple[int, ...], float]]:
        """Return a copy of a pipe starts its own threads."""
        return LocalEngine, (self._rank_of, self._timeout)

    @contextmanager
    def turn(self, operation: str, step: int) -> Iterator[LocalEngine]:
        """Take a turn: a forward, its backward or a step; calls of several threads take theirs one after the other.

        Raises:
            RuntimeError: a stage or the loss of this pipe asks for it.
            DeadlineExceeded: another thread's turn did not end within the timeout.
        """
        if self._workers is not None and self._workers.run_here():
            raise RuntimeError(
                f"a layer or the loss of a pipe starts a {operation} of the same pipe, whose stages would wait for "
                "themselves; compute the value before the call, and pass it in"
            )
        deadline = Deadline.after(self._timeout)
        while not self._in_turn.acquire(timeout=min(LONGEST_SLEEP, deadline.remaining())):
            deadline.check(peer="another thread that uses the pipe", operation=f"pipeline {operation}", step=step)
        try:
            self._step = step
            yield self
        finally:
            self._in_turn.release()

    def agree(self, make: Callable[[], Facts]) -> Facts:
        """Return the call's facts."""
        return make()

    def share(self, index: int, tensor: Tensor | None, ranks: Sequence[int]) -> list[Tensor | None]:
        """Return only the given share: there are no ranks in other processes."""
        return [tensor]

    def spread(self, value: Structure, source: int) -> Structure:
        """Return the value itself: only one process gives it."""
        return value

    def put_note(self, word: object) -> None:
        """Keep a value until the end of the turn."""
        self._word = word

    def notes(self) -> dict[int, object]:
        """Return this process's message."""
        return {0: self._word}

    def run(
        self,
        runs: Mapping[int, StageRun],
        actions: Sequence[Sequence[Action]],
        outside: Mapping[int, Sequence[Message]],
        *,
        keep: bool = False,
    ) -> CallOutcome:
        """Run all ranks' actions at once; raise the error of a stage, with a note of the place."""
        if self._workers is None:
            self._workers = StageThreads(len(actions), "anabranch-stage")
        deadline = Deadline.after(self._timeout)
        exchange = Exchange(self._rank_of, deadline, self._step)
        attempt = _Attempt(exchange, self._workers, current_streams())
        runners = [Runner(runs, outside, exchange, keep=keep) for _ in actions]
        tasks = [
            lambda runner=runner, todo=todo: attempt.run(runner, todo)
            for runner, todo in zip(runners, actions, strict=True)
        ]
        try:
            try:
                self._workers.run(tasks, deadline, on_interrupt=exchange.abort, step=self._step)
            except DeadlineExceeded:
                attempt.raise_failure()  # a stage that waited names the one it waited for
                raise
            attempt.raise_failure()
        except BaseException:
            for run in runs.values():
                run.abandon()
            raise
        outcome = CallOutcome()
        for runner in runners:
            outcome.observed.add(runner.observed)
            outcome.outputs |= runner.outputs
            outcome.input_gradients |= runner.input_gradients
        self.observed.add(outcome.observed)
        return outcome

    def close(self) -> None:
        """End the worker threads; a later run starts new ones."""
        if self._workers is not None:
            self._workers.close()
            self._workers = None


class _Attempt:
    """One run, on the caller's streams; its first failure ends all ranks."""

    def __init__(self, exchange: Exchange, workers: StageThreads, streams: Sequence[torch.cuda.Stream]) -> None:
        self._exchange = exchange
        self._workers = workers
        self._streams = streams
        self._lock = threading.Lock()
        self._first: BaseException | None = None

    def run(self, runner: Runner, actions: Sequence[Action]) -> None:
        try:
            with on_streams(self._streams):
                runner.run(actions)
        except Aborted:
            pass
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            with self._lock:
                self._first = self._first or error
            self._exchange.abort()
            self._workers.abandon()

    def raise_failure(self) -> None:
        with self._lock:
            first, self._first = self._first, None
        if isinstance(first, ActionFailure):
            raise annotate(first)
        if first is not None:
            raise first


def annotate(failure: ActionFailure) -> BaseException:
    """Return the exception that a stage raised, with a note of stage, microbatch and phase."""
    action, error = failure.action, failure.error
    error.add_note(f"in stage {action.stage}, microbatch {action.microbatch}, {phase_of(action)}")
    return error
