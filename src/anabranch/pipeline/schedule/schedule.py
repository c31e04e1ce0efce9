"""A schedule: for each rank, the list of actions it runs in a step. Plain data: checked, drawn, saved and read back.

``orders.py`` makes the well-known ones. A new schedule holds only computing actions; it is simulated to check that it
ends. ``with_transfers`` adds the further actions of a given pipeline: sends and receives between neighbours and along
skips, and the second forward of microbatches that keep no activations. A rank executes that list unchanged.

``simulate`` tells its time, its idle part, and the activations held at once: a pipeline of stages that take these times
behaves as the clock shows there.

Index letters, here and in the whole package: ``i`` of ``m`` microbatches, ``j`` of ``n`` stages, ``r`` of ``p`` ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain
from pathlib import Path
from typing import NamedTuple, cast

import msgspec


class Kind(StrEnum):
    """The kinds of action on a stage and microbatch.

    >>> Kind.F.value, Kind.SEND_F.computes
    ('F', False)
    """

    F = "F"  # forward
    B = "B"  # backward: of inputs and weights at once, or of the inputs alone where the schedule splits it
    W = "W"  # backward of the weights, where the schedule splits it
    R = "R"  # forward again, for a stage and microbatch that kept no activations
    SEND_F = "SF"  # an output, or skips, to a later stage
    RECV_F = "RF"
    SEND_B = "SB"  # their gradients, to the stage they came from
    RECV_B = "RB"

    @property
    def computes(self) -> bool:
        """True if it runs a stage rather than moving values between two."""
        return self in _COMPUTING


_COMPUTING = frozenset({Kind.F, Kind.B, Kind.W, Kind.R})


class Action(NamedTuple):
    """One action of a rank.

    >>> str(Action(Kind.F, 1, 0)), str(Action(Kind.SEND_F, 1, 0, 3))
    ('F1.0', 'SF1.0>3')

    Attributes:
        kind: the kind of action.
        stage: its stage.
        microbatch: its microbatch.
        peer: the stage at the other end, for actions that send or receive.
    """

    kind: Kind
    stage: int
    microbatch: int
    peer: int | None = None

    def __str__(self) -> str:
        text = f"{self.kind.value}{self.stage}.{self.microbatch}"
        if self.peer is None:
            return text
        arrow = ">" if self.kind in (Kind.SEND_F, Kind.SEND_B) else "<"
        return f"{text}{arrow}{self.peer}"


PHASES = {Kind.F: "forward", Kind.B: "backward", Kind.W: "weight", Kind.R: "recompute"}
"""The names of computing actions in errors and events."""


@dataclass(frozen=True, slots=True)
class Interval:
    """Start and end of a computing action, in the units of its costs."""

    action: Action
    start: float
    end: float


SENT_AS = {Kind.RECV_F: Kind.SEND_F, Kind.RECV_B: Kind.SEND_B}


class SimulatedRun:
    """One run of every rank's ``actions``: each runs its own in order, a receive after its send has arrived.

    A pipeline follows the same two rules: lists that end here end there.

    >>> clock = SimulatedRun([[Action(Kind.F, 0, 0), Action(Kind.B, 0, 0)]], lambda action: 1.0)
    >>> clock.times, clock.stuck
    ([2.0], [])

    Args:
        actions: of each rank.
        cost: the time of an action; of one that sends, the time until it arrives.

    Attributes:
        times: the time at which each rank was done.
        intervals: the computing actions of each rank, in order.
        stuck: ranks that wait for one another for ever, each with the action that it waits in.
    """

    def __init__(self, actions: Sequence[Sequence[Action]], cost: Callable[[Action], float]) -> None:
        self.times = [0.0] * len(actions)
        self.intervals: list[list[Interval]] = [[] for _ in actions]
        arrivals: dict[tuple[Kind, int, int | None, int], float] = {}
        todo = list(map(deque, actions))
        moves = True
        while moves:
            moves = False
            for rank, waiting in enumerate(todo):
                while waiting:
                    kind, stage, i, peer = action = waiting[0]
                    now = self.times[rank]
                    if kind.computes:
                        self.times[rank] = now + cost(action)
                        self.intervals[rank].append(Interval(action, now, self.times[rank]))
                    elif kind not in SENT_AS:
                        arrivals[kind, stage, peer, i] = now + cost(action)
                    elif (arrival := arrivals.get((SENT_AS[kind], cast(int, peer), stage, i))) is not None:
                        self.times[rank] = max(now, arrival)
                    else:
                        break
                    waiting.popleft()
                    moves = True
        self.stuck = [f"rank {rank} at {waiting[0]}" for rank, waiting in enumerate(todo) if waiting]


@dataclass(frozen=True, slots=True)
class Schedule:
    """The actions of a step, a tuple of them for each rank.

    >>> from anabranch.pipeline import make_schedule
    >>> schedule = make_schedule("1F1B", 2, 2)
    >>> [str(action) for action in schedule.actions[1]]
    ['F1.0', 'B1.0', 'F1.1', 'B1.1']

    Attributes:
        name: the schedule's name, such as ``"1F1B"``.
        stages: the number of stages.
        microbatches: the number of microbatches.
        rank_of: the rank of each stage.
        actions: each rank's actions, in order.

    Raises:
        ValueError: an action that is missing, there twice, on the wrong rank or before one that it needs; or ranks that
            wait for one another.
    """

    name: str
    stages: int
    microbatches: int
    rank_of: tuple[int, ...]
    actions: tuple[tuple[Action, ...], ...]

    def __post_init__(self) -> None:
        faults = list(_faults(self))
        if faults:
            raise ValueError(
                f"{self.name} is not a schedule of {self.stages} stages x {self.microbatches}: {faults[0]}"
            )
        stuck = SimulatedRun(self.with_transfers().actions, lambda action: 0.0).stuck
        if stuck:
            raise ValueError(
                f"{self.name} never ends because its ranks wait for each other: {stuck}; change their order"
            )

    @property
    def ranks(self) -> int:
        """The number of ranks that it needs."""
        return len(self.actions)

    @property
    def splits_backward(self) -> bool:
        """True if gradients of the weights have separate actions."""
        return any(action.kind is Kind.W for action in chain.from_iterable(self.actions))

    def with_transfers(
        self, skips: Iterable[tuple[int, int]] = (), recompute: Collection[tuple[int, int]] = ()
    ) -> Lowered:
        """Return the full list of actions for a pipeline.

        Args:
            skips: the (from, to) stages of its skips; neighbours need not be given.
            recompute: the (stage, microbatch) that keep no activations and run forward again before backward.
        """
        after: dict[int, list[int]] = {j: [j + 1] for j in range(self.stages - 1)}
        for source, target in sorted(set(skips)):
            if target not in (source, source + 1):
                after.setdefault(source, []).append(target)

        def lowered(action: Action) -> Iterator[Action]:
            kind, j, i, _ = action
            sources, targets = [source for source in sorted(after) if j in after[source]], after.get(j, [])
            if kind is Kind.F:
                yield from (Action(Kind.RECV_F, j, i, source) for source in sources)
            elif kind is Kind.B:
                if (j, i) in recompute:  # ahead of the wait: it is done by the time that the gradient arrives
                    yield Action(Kind.R, j, i)
                yield from (Action(Kind.RECV_B, j, i, target) for target in targets)
            yield action
            if kind is Kind.F:
                yield from (Action(Kind.SEND_F, j, i, target) for target in targets)
            elif kind is Kind.B:
                yield from (Action(Kind.SEND_B, j, i, source) for source in sources)

        return Lowered(self, tuple(tuple(chain.from_iterable(map(lowered, actions))) for actions in self.actions))

    def save(self, path: str | Path) -> None:
        """Write the schedule to ``path`` as JSON."""
        Path(path).write_bytes(msgspec.json.encode(self))

    @classmethod
    def load(cls, path: str | Path) -> Schedule:
        """Read a schedule written by ``save``, and check it.

        Raises:
            ValueError: the file holds no schedule, or one that cannot run; gives the reason.
        """
        try:
            return _SCHEDULES.decode(Path(path).read_bytes())
        except msgspec.DecodeError as error:
            raise ValueError(f"{path} does not hold a schedule: {error}") from None


@dataclass(frozen=True, slots=True)
class Lowered:
    """A schedule together with a pipeline's full list of actions, including transfers and recomputation."""

    schedule: Schedule
    actions: tuple[tuple[Action, ...], ...]


def _faults(schedule: Schedule) -> Iterator[str]:
    if len(schedule.rank_of) != schedule.stages:
        yield f"rank_of names the ranks of {len(schedule.rank_of)} stages"
        return
    seen: set[tuple[Kind, int, int]] = set()
    split = schedule.splits_backward
    for rank, actions in enumerate(schedule.actions):
        for action in actions:
            key = (action.kind, action.stage, action.microbatch)
            if not (0 <= action.stage < schedule.stages and 0 <= action.microbatch < schedule.microbatches):
                yield f"{action} is out of range"
                return
            if action.kind not in (Kind.F, Kind.B, Kind.W):
                yield f"{action} is not an F, B or W; transfers are added by with_transfers"
            if schedule.rank_of[action.stage] != rank:
                yield f"{action} is on rank {rank}, but its stage is on rank {schedule.rank_of[action.stage]}"
            if key in seen:
                yield f"{action} appears twice"
            needed = {Kind.B: Kind.F, Kind.W: Kind.B}.get(action.kind)
            if needed is not None and (needed, *key[1:]) not in seen:
                yield f"{action} comes before its {needed.value}"
            seen.add(key)
    expected = schedule.stages * schedule.microbatches * (3 if split else 2)
    if len(seen) != expected:
        yield f"it has {len(seen)} of {expected} actions"


# Built at import: constructing a msgspec decoder is not thread-safe.
_SCHEDULES = msgspec.json.Decoder(Schedule)


@dataclass(frozen=True, slots=True)
class Simulation:
    """Results of simulating a schedule.

    Attributes:
        intervals: the computing actions of each rank, in order.
        makespan: from the first action to the end of the last.
        bubble: the idle part of all ranks' time, from 0 to 1.
        peak_activations: for each rank the most (stage, microbatch) whose activations it held at once.
    """

    intervals: tuple[tuple[Interval, ...], ...]
    makespan: float
    bubble: float
    peak_activations: tuple[int, ...]


def simulate(
    schedule: Schedule | Lowered, costs: Mapping[Kind, float] | Callable[[Action], float] | None = None
) -> Simulation:
    """Simulate ``schedule``.

    >>> from anabranch.pipeline import make_schedule
    >>> simulate(make_schedule("1F1B", 2, 4)).makespan
    15.0

    Args:
        schedule: as made, or as lowered for a pipeline.
        costs: the time of each kind of action, or of each action; 0 for those left out. A send's cost is the
            time until it arrives, its rank goes on at once. By default F takes 1, B 2, or B and W 1 each, R 1.

    Raises:
        ValueError: it never ends; names the actions that wait for one another.
    """
    lowered = schedule.with_transfers() if isinstance(schedule, Schedule) else schedule
    clock = SimulatedRun(lowered.actions, _as_function(costs, lowered.schedule))
    if clock.stuck:
        raise ValueError(f"{lowered.schedule.name} never ends because its ranks wait for each other: {clock.stuck}")
    makespan = max(clock.times)
    busy = sum(interval.end - interval.start for row in clock.intervals for interval in row)
    return Simulation(
        tuple(map(tuple, clock.intervals)),
        makespan,
        1.0 - busy / (makespan * len(clock.times)) if makespan else 0.0,
        tuple(map(_peak, lowered.actions)),
    )


def _as_function(
    costs: Mapping[Kind, float] | Callable[[Action], float] | None, schedule: Schedule
) -> Callable[[Action], float]:
    if callable(costs):
        return costs
    table = {**dict.fromkeys(PHASES, 1.0), Kind.B: 1.0 if schedule.splits_backward else 2.0} if costs is None else costs
    return lambda action: table.get(action.kind, 0.0)


def _peak(actions: Sequence[Action]) -> int:
    """Return the most activations that a rank holds at once."""
    frees = Kind.W if any(action.kind is Kind.W for action in actions) else Kind.B
    recomputed = {(action.stage, action.microbatch) for action in actions if action.kind is Kind.R}
    count = peak = 0
    for kind, stage, i, _ in actions:
        if kind is Kind.R or (kind is Kind.F and (stage, i) not in recomputed):
            count += 1
            peak = max(peak, count)
        elif kind is frees:
            count -= 1
    return peak
