"""``Redo``: a step that a lost worker has interrupted is done again by those that are left.

::

    begin    remembers what a window changes, and its runs      before each run
    PeerLost ──> the workers meet under the next membership ──> each says how many windows and calls it has seen end
                     the highest number stands ─┬─ a worker with one less takes the state of one that has it: its run
                                                │  returns
                                                └─ the others go back to the beginning of the window, and do its runs
                                                   again; of the batches they take their new shares

Every run waits for all workers, so none is more than one run ahead of another. Averages are over the rows of all
workers, so that it does not matter which of them has computed a row. Old connections may still deliver a result; nobody
looks at it, as the number of its membership is over.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from types import FunctionType, MethodType
from typing import TypeAlias, TypeGuard, TypeVar, cast

import torch

from anabranch.collectives import Workers
from anabranch.errors import PeerLost
from anabranch.executor.likeness import exchange
from anabranch.executor.loaders.loading import BoundLoader
from anabranch.executor.observing.watching import MembershipRecord
from anabranch.executor.randomness import RandomMoment
from anabranch.executor.running.runner import StepRunner
from anabranch.executor.saving.saving import Saver
from anabranch.executor.spec import Spec
from anabranch.job import Job
from anabranch.pipeline import Pipe
from anabranch.tensors import Structure

_T = TypeVar("_T")

ShareOf: TypeAlias = Callable[[Job], Structure]
"""A batch as a function: returns the share of the worker that the job says."""


def is_share(batch: object) -> TypeGuard[ShareOf]:
    """Return True for a batch as a function; objects that can be called, as PyTorch Geometric's graphs, are data."""
    return isinstance(batch, FunctionType | MethodType | partial)


def why_fixed(spec: Spec, workers: Workers) -> str | None:
    """Return the reason why an executor does not go on without one of its workers; ``None`` if it does."""
    windows = [step.accumulate for step in spec.training.values()]
    if any(isinstance(model, Pipe) for model in spec.models.values()):
        return "a model is a Pipe"
    if len(windows) > 1 and max(windows) > 1:
        return "one of several training steps accumulates gradients"
    return workers.why_fixed


class Redo:
    """Remembers the runs since the last optimizer step, and does them again once those that are left have met.

    Args:
        workers: several.
        runners: of the training steps.
        loaders: of these and others.
        saver: reads and sets the state that all workers have alike.
        fixed: the reason why these do not go on without one of them.

    Attributes:
        fixed: as given, or found in a run.
        repeated: how many steps were interrupted.
        calls: in a ``call``, which begins again as a whole.
    """

    def __init__(
        self,
        workers: Workers,
        runners: Mapping[str, StepRunner],
        loaders: Mapping[str, BoundLoader],
        saver: Saver,
        fixed: str | None,
    ) -> None:
        self._workers, self._runners, self._loaders, self._saver, self.fixed = workers, runners, loaders, saver, fixed
        self.repeated, self.calls = 0, False
        self._random = RandomMoment()
        models = {runner.step.model for runner in runners.values()}
        self._holders = [module._buffers for model in models for module in model.modules()]
        self._window: list[ShareOf | None] = []
        self._owed: list[ShareOf | None] = []
        self._called, self._answer = 0, cast(object, None)  # calls that have ended, and the last one's answer

    @property
    def memberships(self) -> int:
        return self._workers.membership + 1

    def begin(self, name: str, batch: Structure | ShareOf | None) -> None:
        """Remember where everything stands, if a run of the step ``name`` begins a window."""
        runner, loader = self._runners[name], self._loaders.get(name)
        if batch is None and loader is not None and loader.kind != "global":
            self.fixed = f"step {name!r} reads a loader that is not ab.loaders.GlobalBatches"
        elif batch is not None and not is_share(batch):
            self.fixed = f"run({name!r}, ...) was given a batch, and not a function that returns each worker's share"
        if self.fixed is not None or runner.in_window:
            return
        self._window.clear()
        self._counts = runner.counts()
        self._loader = loader if loader is not None and loader.kind == "global" else None
        self._position = None if self._loader is None else self._loader.moment()
        self._values = [
            (buffers, name, one, one.detach().clone())
            for buffers in self._holders
            for name, one in buffers.items()
            if one is not None and not one.is_meta
        ]
        self._random.remember()

    def ended(self, batch: ShareOf | None) -> None:
        """Remember a run that has ended, in case that its window does not."""
        if self.fixed is None:
            self._window.append(batch)
        self._answer = None  # all have it: a run waits for everyone

    def owed(self) -> list[ShareOf | None]:
        """Return the runs of the open window that are to be done again before the next."""
        owed, self._owed = self._owed, []
        return owed

    def meet(self, error: PeerLost, name: str) -> tuple[bool, list[ShareOf | None], MembershipRecord]:
        """Meet the others after an interrupted run of the step ``name``, and settle which window was the last.

        Returns:
            Whether the run counts; else the runs of its window before it, to be done again; and the new membership.

        Raises:
            PeerLost: ``error``: the job does not go on without the lost worker.
            DeadlineExceeded: a worker has not come.
        """
        runner = self._runners[name]
        record = self._meet(error, runner, called=False)
        counts = runner.decided > self._decided
        return counts, [] if counts else self._window[:], record

    def call(self, act: Callable[[], _T], meets: Callable[[MembershipRecord], object]) -> _T:
        """Return ``act()``, which all workers call and which changes nothing; begun again where one is lost meanwhile.

        ``meets`` is called with each new membership. A worker that has missed the end takes the answer of another.
        """
        begun = self._called
        while True:
            self.calls = True
            try:
                answer = act()
            except PeerLost as error:
                meets(self.meet_outside(error))
                if self._called > begun:
                    return cast(_T, self._answer)
            else:
                self._called, self._answer = self._called + 1, copy.deepcopy(answer)  # the caller may change its own
                return answer
            finally:
                self.calls = False

    def meet_outside(self, error: PeerLost) -> MembershipRecord:
        """Meet the others after something else than a training run was interrupted; return the new membership."""
        runner = next((one for one in self._runners.values() if one.in_window), None)
        record = self._meet(error, runner, called=True)
        self._owed = [] if runner is None else self._window[:]
        return record

    def _meet(self, error: PeerLost, runner: StepRunner | None, *, called: bool) -> MembershipRecord:
        if self.fixed is not None:
            error.add_note(f"the job does not go on without it: {self.fixed}")
            raise error
        if not (error.peer or "").startswith("rank"):  # a server or an expert
            raise error
        workers = self._workers
        before, meets = workers.peers.identities, True
        while meets:
            with suppress(PeerLost):  # one more has died: meet again
                meets = workers.meet_again()
                if meets:
                    self._settle(runner, called=called)
                    break
        else:
            raise error
        self.repeated += 1
        now = {*workers.peers.identities.values()}
        left = tuple(rank for rank, who in sorted(before.items()) if who not in now)
        if 0 in left:
            self._saver.writer_lost()
        return MembershipRecord(sum(one.steps for one in self._runners.values()), workers.rank, workers.size, left)

    @property
    def _decided(self) -> int:
        """The windows of the step in progress that were decided as the present one began."""
        return int(self._counts["decided"])

    def _settle(self, runner: StepRunner | None, *, called: bool) -> None:
        """Go back to the beginning of the window of ``runner``, or take its end, or a call's, from one that has it."""
        workers, runners = self._workers, self._runners
        mine = sum(one.decided for one in runners.values()) + self._called
        everyone = exchange(workers, mine, int, "meet")
        highest = max(everyone)
        counts = {name: one.counts() for name, one in runners.items()}
        if runner is not None and runner.decided == self._decided and (called or mine == highest):
            counts = {name: self._counts if one is runner else counts[name] for name, one in runners.items()}
            self._go_back()
        if min(everyone) < highest:
            source, state = everyone.index(highest), b""
            if workers.rank == source:
                state = self._saver.dense_state([counts, self._called, self._answer])
            state = workers.broadcast_bytes(state, source)
            if mine < highest:
                counts, self._called, self._answer = self._saver.take_dense_state(state)
        for name, one in runners.items():
            one.begin_again(counts[name])

    def _go_back(self) -> None:
        if self._loader is not None and self._position is not None:
            self._loader.go_back(self._position)
        with torch.no_grad():
            for buffers, name, buffer, value in self._values:
                buffer.copy_(value)
                buffers[name] = buffer  # a forward may have put another tensor in its place
        self._random.go_back()
