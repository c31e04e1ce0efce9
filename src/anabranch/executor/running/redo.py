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

A newcomer is alone until its first run. There it says -1, as it has seen nothing, and takes all that a checkpoint has.
If it has looked at the epoch before, it has waited there until the members met, who wait for its run::

    members     run t: the header says that newcomers wait ──> before run t + 1 they meet, with the newcomers
    newcomer    its first run ── waits ────────────────────────────────────> takes the state ──> run t + 1
"""

from __future__ import annotations

import copy
import logging
import time
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from typing import NoReturn, TypeAlias, TypeVar, cast
from weakref import WeakSet

import torch

from anabranch.collectives import Workers, differentiable
from anabranch.collectives.shared_memory import NUMBERS, FlatForm, SharedSum, load_kernels, shared_sums
from anabranch.deadline import Deadline
from anabranch.errors import DeadlineExceeded, PeerLost
from anabranch.executor.exchange import exchange, send_state
from anabranch.executor.observing.watching import MembershipRecord
from anabranch.executor.randomness import RandomMoment
from anabranch.executor.running.remote import RemotePart
from anabranch.executor.running.runner import ShareOf, StepRunner, is_share
from anabranch.executor.saving.saving import Saver
from anabranch.executor.spec import Spec
from anabranch.job import job
from anabranch.liveness.group import rank_names
from anabranch.liveness.membership import APART, OwnPlace, progress, published
from anabranch.pipeline import Pipe
from anabranch.tensors import Structure
from anabranch.tensors.structures import identical

_T = TypeVar("_T")
Runs: TypeAlias = list[Structure | ShareOf | None]  # their batches
_log = logging.getLogger("anabranch.executor")
ENDS = "the job ends with the first worker that is killed or freezes"
_COMPARISON = "comparison of calls"
_LOOK_SECONDS = 0.05  # between two looks for newcomers
_CURE = (
    "begin the loop where the job is: while executor.step < n, or for epoch in range(executor.epoch, n): while "
    "executor.epoch == epoch"
)
_made = Counter[str]()  # how many Executors of each form this process has made
_open = WeakSet["Redo"]()


def why_fixed(spec: Spec, workers: Workers) -> str | None:
    """Return the reason why an executor does not go on without one of its workers; ``None`` if it does."""
    windows = [step.accumulate for step in spec.training.values()]
    if any(isinstance(model, Pipe) and model.process_group for model in spec.models.values()):
        return "a model is a Pipe across ranks"
    if len(windows) > 1 and max(windows) > 1:
        return "one of several training steps accumulates gradients"
    return workers.why_fixed


class Redo:
    """Remembers the runs since the last optimizer step, and does them again once those that are left have met.

    Args:
        workers: several, or a newcomer.
        place: this one's in the job.
        epochs: returns how many this worker has done.
        runners: of the training steps.
        saver: reads and sets the state that all workers have alike; it has the loaders of these and others.
        form: what is the same of the executor on all workers, also on a newcomer.
        fixed: the reason why these do not go on without one of them, which is said.
        apart: what these have on servers, if they do not make their steps together, but only other calls.

    Attributes:
        fixed: as given, or seen since: in a run, or as the script opened another Executor beside this one.
        may_shrink: the job may go on with fewer workers (``--min-workers``).
        own_rows: nobody else can compute the rows of a lost worker, so the others go on without them, and nobody joins.
        repeated: how many steps were interrupted; the same on all members.
        calls: in a ``call``, which begins again as a whole.
    """

    def __init__(
        self,
        workers: Workers,
        place: OwnPlace,
        epochs: Callable[[], int],
        runners: Mapping[str, StepRunner],
        saver: Saver,
        form: str,
        fixed: str | None,
        apart: RemotePart | None = None,
    ) -> None:
        self._workers, self._runners, self._loaders, self._saver = workers, runners, saver.loaders, saver
        self._place, self._epochs, self.apart = place, epochs, apart
        self.fixed: str | None = None
        self._all = job().world_size if workers.joins else workers.size
        self.may_shrink = published(place.meeting).least < self._all
        for other in _open:  # whose workers meet at other calls, and on each worker at another of them
            fixed = other.fixed = "the script has two Executors open at once"
        if runners:
            place.begin()
        if fixed is not None:
            self._fix(fixed)
        _open.add(self)
        _made[form] += 1
        self._form = zlib.crc32(f"{_made[form]} {form}".encode())  # a script may train in one after the other
        self._look_at, self.repeated, self.calls, self.own_rows = 0.0, 0, False, False
        self._leaves = False
        self._messages, self._sends = 0, ""  # the reason why it is fixed, if a run of this worker has sent or received
        self._random = RandomMoment()
        models = {runner.step.model for runner in runners.values()}
        self._pipes = {model: 0 for model in models if isinstance(model, Pipe)}  # places in their random streams
        self._holders = [module._buffers for model in models for module in model.modules()]
        self._buffers: list[tuple[dict[str, torch.Tensor | None], str, torch.Tensor]] = []
        self._values: list[torch.Tensor] = []  # theirs
        self._window: Runs = []
        self._taken: list[Structure | None] = []  # in the window, from a loader that cannot go back; None: it had ended
        self._again = 0  # how many of these the present doing has had
        self._drops = False  # the last run's batch was not shared out
        self._called, self._answer = 0, cast(object, None)  # calls that have ended, and the last one's answer
        self._facts: SharedSum | None = None  # of the members' calls, see ``agree``

    @property
    def memberships(self) -> int:
        return self._workers.membership + 1

    def begin(self, name: str, batch: Structure | ShareOf | None) -> None:
        """Remember where everything stands, if a run of the step ``name`` begins a window."""
        runner, loader, own = self._runners[name], self._loaders.get(name), ""
        self._messages = differentiable.messages_begun
        if batch is None and loader is not None and loader.kind != "global":
            own = f"step {name!r} reads a loader that is not ab.loaders.GlobalBatches"
        elif batch is not None and not is_share(batch):
            own = f"run({name!r}, ...) was given a batch, and not a function that returns each worker's share"
        self._drops = bool(own)
        if own and self.fixed is None and not self.may_shrink:
            self._fix(own)
        elif own and self.fixed is None and not self.own_rows:
            self.own_rows, self._all = True, max(self._all, self._workers.size)
            if self._workers.rank == 0:
                _log.warning("a worker that dies is not replaced, and its rows are dropped: %s", own)
        if self.fixed is not None or runner.in_window:
            return
        self._window.clear()
        del self._taken[: self._again]  # what is left is taken again
        self._again = 0
        self._counts = runner.counts()
        self._loader = loader if loader is not None and loader.kind == "global" else None
        self._position = None if self._loader is None else self._loader.moment()
        self._remember_buffers()
        self._pipes = {pipe: pipe.calls for pipe in self._pipes}
        self._random.remember()

    def _look_for_messages(self, name: str) -> None:
        """Do no run again that sends to a rank by its number, which may be another worker's by then."""
        if self.fixed is None and differentiable.messages_begun > self._messages:
            self._sends = f"step {name!r} calls ab.send or ab.recv"
            self._fix(self._sends)

    def _fix(self, why: str) -> None:
        self.fixed = why
        self._place.say("ends")
        if self._workers.rank == 0:
            _log.log(logging.WARNING if self.may_shrink else logging.INFO, "%s: %s", ENDS, why)

    def _remember_buffers(self) -> None:
        buffers = []
        for holder in self._holders:
            if holder:
                for name, one in holder.items():
                    if one is not None and not one.is_meta:
                        buffers.append((holder, name, one))
        now, before = [one for _, _, one in buffers], [one for _, _, one in self._buffers]
        self._buffers = buffers
        if not identical(now, before):
            self._values = [one.detach().clone() for one in now]
        elif now:
            with torch.no_grad():
                torch._foreach_copy_(self._values, now)

    def take(self, next_batch: Callable[[], Structure | None]) -> Structure | None:
        """Return the batch of a run from its loader: the one of its first doing, where a loader cannot go back."""
        if not self.own_rows or self._loader is not None:
            return next_batch()
        if self.takes_anew:
            self._taken.append(next_batch())
        self._again += 1
        return self._taken[self._again - 1]

    @property
    def takes_anew(self) -> bool:
        """The loader is where this worker is in the window: no later batch of it was taken in an earlier doing."""
        return self._again == len(self._taken)

    @property
    def dropped(self) -> int:
        """The number of workers whose rows nobody has trained on in the last run."""
        return self._all - self._workers.size if self.own_rows and self._drops else 0

    def ended(self, name: str, batch: Structure | ShareOf | None) -> None:
        """Remember a run that has ended, in case that its window does not, and note how far this worker is."""
        self._look_for_messages(name)
        if self.fixed is None:
            self._window.append(batch)
            if self._steps:
                self._place.write_progress(self._steps, APART if self.own_rows else None)
        self._answer = None  # all have it: a run waits for everyone

    def close(self, failed: BaseException | None) -> None:
        """Let the job end with this worker from now on: what it does behind its training is done by no other.

        The others go on without one that has closed, but not where it has ``failed``.
        """
        _open.discard(self)
        if self._runners and not self._leaves:
            self._place.say("closes" if failed is None or isinstance(failed, SystemExit) else "ends")

    def meet(self, error: PeerLost, name: str) -> tuple[bool, Runs, MembershipRecord]:
        """Meet the others after an interrupted run of the step ``name``, and settle which window was the last.

        Returns:
            Whether the run counts; else the runs of its window before it, to be done again; and the new membership.

        Raises:
            PeerLost: ``error``: the job does not go on without the lost worker.
            DeadlineExceeded: a worker has not come.
        """
        runner = self._runners[name]
        self._look_for_messages(name)
        record = self._meet(error, runner, called=False)
        counts = runner.decided > self._decided
        return counts, [] if counts else self._window[:], record

    def admit(self, name: str) -> MembershipRecord | None:
        """Let newcomers join before a run of the step ``name``, or join as one; return the membership if it is new.

        Raises:
            SystemExit: the others have ended meanwhile, or have not invited this newcomer in time.
            DeadlineExceeded: a newcomer that is needed has not come.
        """
        workers, runners = self._workers, self._runners
        if workers.joins:
            self._wait_here()
        elif self.fixed not in (None, self._sends) or self.own_rows:  # those that do not send admit newcomers
            return None
        else:
            if (now := time.monotonic()) >= self._look_at:
                self._look_at = now + _LOOK_SECONDS
                runners[name].newcomers = self._place.newcomers_wait()
            few = workers.roll is not None and workers.size < workers.roll.least
            if any(one.in_window for one in runners.values()):
                return None
            if not few and not any(one.newcomers_seen for one in runners.values()):
                return None
            self._place.write_progress(self._steps, self._epochs())
            self._place.invite(workers.membership)
        try:
            return self._meet(None, None, called=False)
        except DeadlineExceeded:  # a long evaluation of theirs, say
            if not workers.joins or workers.roll is not None:
                raise
            self._leave(f"the others have not let this worker join them for {workers.timeout:g} s: it leaves")

    def _wait_here(self) -> None:
        for dtype in NUMBERS:
            load_kernels(dtype)  # before the others wait for this one
        self._place.say("waits")

    def members_progress(self, *, invited: bool) -> tuple[int, int]:
        """Return the members' steps and epochs, for a newcomer; ``invited``: once they stand still for it."""
        if invited:
            self._wait_here()
            self._place.wait_until_invited(Deadline.after(self._workers.timeout))
        return progress(self._place.meeting) or (0, 0)

    def agree(self, call: str) -> None:
        """Check that all workers begin the same call, once some have joined: their loops may count otherwise.

        Raises:
            SystemExit: this one has joined, and begins another; it leaves.
            PeerLost: another one does that.
        """
        workers, roll = self._workers, self._workers.roll
        if roll is None or not roll.since:
            return
        facts = [zlib.crc32(call.encode()), self._seen, sum(one.in_window for one in self._runners.values())]
        mine = torch.tensor(facts, dtype=torch.float64, device=workers.device)
        if self._facts is None:
            (self._facts,) = shared_sums(workers, [FlatForm(len(facts), mine.dtype, mine.device, gathers=True)])
        if (shared := self._facts) is None:
            everyone = workers.all_gather(mine, operation=_COMPARISON).tolist()
        else:
            shared.place(len(facts)).copy_(mine)
            shared.start(operation=_COMPARISON, step=None).finish()
            everyone = shared.gathered()[:, : len(facts)].tolist()
        since = {rank: roll.since.get(process, 0) for process, rank in roll.ranks.items()}
        first = min(since, key=lambda rank: (since[rank], rank))  # the one that has been here longest is right
        others = [rank for rank in since if everyone[rank] != everyone[first] and since[rank] > since[first]]
        if workers.rank in others:
            self._leave(f"this worker has joined the job, and calls {call} where the others do not: it leaves; {_CURE}")
        if others:
            raise PeerLost("it makes another call, and leaves", peer=rank_names(others), operation=_COMPARISON)

    def _leave(self, text: str) -> NoReturn:
        self._leaves = True
        self._place.say("leaves")
        self._end(text)

    def _end(self, text: str) -> NoReturn:
        _log.warning("%s", text)
        raise SystemExit(0)

    def call(self, name: str, act: Callable[[], _T], meets: Callable[[MembershipRecord, str, Runs], object]) -> _T:
        """Return ``act()``, which all workers call and which changes nothing; begun again where one is lost meanwhile.

        ``meets`` is called with what ``meet_outside`` returns. A worker that has missed the end takes the answer of
        another. A newcomer that is still alone calls it alone.
        """
        if self._workers.joins:
            return act()
        begun = self._called
        while True:
            self.calls = True
            try:
                self.agree(name)
                answer = act()
            except PeerLost as error:
                lost = error
            else:
                self._called, self._answer = self._called + 1, copy.deepcopy(answer)  # the caller may change its own
                return answer
            finally:
                self.calls = False
            met = self.meet_outside(lost)
            ended, theirs = self._called > begun, self._answer
            meets(*met)
            if ended:
                return cast(_T, theirs)

    def meet_outside(self, error: PeerLost) -> tuple[MembershipRecord, str, Runs]:
        """Meet the others after something else than a training run was interrupted.

        Returns:
            The new membership, and the step with an open window and its runs, which are to be done again at once: they
            leave buffers, the epoch and the position as they were, and another worker may still be in one of them.
        """
        name = next((name for name, one in self._runners.items() if one.in_window), "")
        record = self._meet(error, self._runners.get(name), called=True)
        return record, name, self._window[:] if name else []

    def _meet(self, error: PeerLost | None, runner: StepRunner | None, *, called: bool) -> MembershipRecord:
        """Meet the others under the next membership, because of ``error``, or since newcomers are invited."""
        if error is not None and not _is_of_a_worker(error):
            raise error
        if error is not None and self.fixed is not None:
            error.add_note(f"the job does not go on without it: {self.fixed}")
            raise error
        workers = self._workers
        before, number = workers.peers.identities, -1 if workers.joins else workers.membership
        awaited = error is None or error.operation == _COMPARISON
        repeated = self.repeated + (error is not None)
        if self.apart is not None:
            self.apart.tables.wait_until_quiet()  # what is on its way is of the last number, and is not done again
        while True:
            try:
                met = workers.meet_again(awaited=awaited)
                now = {*workers.peers.identities.values()}
                left = tuple(rank for rank, who in sorted(before.items()) if who not in now)
                if met and 0 in left:
                    self._saver.writer_lost()  # before newcomers take the state, of which the save is part
                met = met and self._settle(runner, repeated, called=called)
                break
            except PeerLost as other:  # one more has died, or leaves: meet again
                if not _is_of_a_worker(other):
                    raise
                awaited = awaited or other.operation == _COMPARISON
        roll = workers.roll
        closed = roll is None or roll.closed or (not met and workers.have_closed())
        if self._place.joins and closed and (not met or (roll and roll.since.keys() == roll.ranks.keys())):
            self._end(f"the other workers have ended, and so does this one, which has joined them; {_CURE}")
        if not met:
            why = "the job ends: too few workers are left, or none that has the state of training"
            raise error or PeerLost(why, peer="the others", operation="meet")
        assert roll is not None
        number = roll.since[self._place.process] - 1 if number < 0 else number
        joined = tuple(sorted(roll.ranks[process] for process, since in roll.since.items() if since > number))
        return MembershipRecord(self._steps, workers.rank, workers.size, left, joined)

    @property
    def _steps(self) -> int:
        return sum(one.steps for one in self._runners.values())

    @property
    def _seen(self) -> int:
        """The windows and calls that this worker has seen end."""
        return sum(one.decided for one in self._runners.values()) + self._called

    @property
    def _decided(self) -> int:
        """The windows of the step in progress that were decided as the present one began."""
        return int(self._counts["decided"])

    def _settle(self, runner: StepRunner | None, repeated: int, *, called: bool) -> bool:
        """Go back to the beginning of the window of ``runner``, or take its end, or a call's, from one that has it.

        A newcomer takes all. Returns False if there are only newcomers.
        """
        workers, runners = self._workers, self._runners
        if self.apart is not None:  # each is at a step of its own, and keeps it
            self.apart.begin_again(*self.apart.progress())
            return True
        mine = -1 if workers.joins else self._seen
        answers = exchange(workers, (mine, self._form, repeated), tuple[int, int, int], "meet")
        everyone = [seen for seen, *_ in answers]
        highest = max(everyone)
        if highest < 0:
            return False
        form = answers[everyone.index(highest)][1]
        self._refuse([rank for rank, (seen, other, _) in enumerate(answers) if seen < 0 and other != form])
        self.repeated = max(count for *_, count in answers)
        counts = {name: one.counts() for name, one in runners.items()}
        if runner is not None and runner.decided == self._decided and (called or mine == highest):
            servers = {"servers": self._counts["servers"]}  # which all steps share
            counts = {name: self._counts if one is runner else counts[name] | servers for name, one in runners.items()}
            self._go_back()
        if min(everyone) < highest:
            source, state = everyone.index(highest), None
            if workers.rank == source:
                more = self._saver.newcomers_state() if min(everyone) < 0 else None
                state = self._saver.dense_state([counts, self._called, self._answer, more])
            state = send_state(workers, state, source, takes=mine < highest)
            if mine < highest:
                counts, self._called, self._answer, more = self._saver.take_dense_state(state)
                if workers.joins:
                    self._saver.take_newcomers_state(more)
        for name, one in runners.items():
            one.begin_again(counts[name])
        workers.joins, self._facts = False, None
        return True

    def _refuse(self, newcomers: list[int]) -> None:
        """Let those leave that would train otherwise than the others.

        Raises:
            SystemExit: this is one of them.
            PeerLost: another one is.
        """
        if self._workers.rank in newcomers:
            self._leave(
                "this worker cannot join the others, and leaves: its loaders are not theirs (a batch_size that depends "
                "on ab.job().world_size?), or they train in another Executor of the script"
            )
        if newcomers:
            raise PeerLost("it trains otherwise, and leaves", peer=rank_names(newcomers), operation=_COMPARISON)

    def _go_back(self) -> None:
        if self._loader is not None and self._position is not None:
            self._loader.go_back(self._position)
        self._again = 0
        for pipe, calls in self._pipes.items():
            pipe.calls = calls
        with torch.no_grad():
            for (holder, name, buffer), value in zip(self._buffers, self._values, strict=True):
                buffer.copy_(value)
                holder[name] = buffer  # a forward may have put another tensor in its place
        self._random.go_back()


def _is_of_a_worker(error: PeerLost) -> bool:
    """Return False if a server or an expert is lost, which nobody meets."""
    return (error.peer or "").startswith("rank")
