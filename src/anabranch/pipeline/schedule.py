"""A schedule: for each rank, the list of actions it runs in a step. Plain data: checked, drawn, saved and read back.

It holds computing actions alone: a stage waits for what its neighbours send before it computes, and sends on what comes
of it. A new schedule is simulated to check that it ends. ``recomputing`` adds the second forward of microbatches that
keep no activations. A rank executes that list unchanged.

``simulate`` tells its time, its idle part, and the activations held at once: a pipeline of stages that take these times
behaves as the clock shows there.

``make_schedule`` makes the well-known ones, by functions from (stages, microbatches, ranks) to every rank's actions.
They run with any number of microbatches from 1, because the last batch of an epoch may be of any length. GPipe is
explicit; the others are built greedily: at each tick, each idle rank takes one of its ready actions by a rule with its
preferences and the most activations it may hold. The rule of the interleaved one gives Megatron's order, and with one
stage a rank 1F1B::

    1F1B, 3 ranks, 4 microbatches (B takes twice as long as F)

    rank 0  F F F . . B B F B B . B B . B B      fills, alternates, drains
    rank 1    F F B B F B B F B B . ...
    rank 2      F B B F B B F B B F B B

Index letters, here and in the whole package: ``i`` of ``m`` microbatches, ``j`` of ``n`` stages, ``r`` of ``p`` ranks.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import msgspec

from anabranch.choices import choice


class Kind(StrEnum):
    """The kinds of action on a stage and microbatch.

    >>> Kind.F.value
    'F'
    """

    F = "F"  # forward
    B = "B"  # backward: of inputs and weights at once, or of the inputs alone where the schedule splits it
    W = "W"  # backward of the weights, where the schedule splits it
    R = "R"  # forward again, for a stage and microbatch that kept no activations


class Action(NamedTuple):
    """One action of a rank.

    >>> str(Action(Kind.F, 1, 0))
    'F1.0'

    Attributes:
        kind: the kind of action.
        stage: its stage.
        microbatch: its microbatch.
    """

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.stage}.{self.microbatch}"


PHASES = {Kind.F: "forward", Kind.B: "backward", Kind.W: "weight", Kind.R: "recompute"}
"""The names of computing actions in errors and events."""


@dataclass(frozen=True, slots=True)
class Interval:
    """Start and end of a computing action, in the units of its costs."""

    action: Action
    start: float
    end: float


_FROM = {Kind.F: -1, Kind.B: 1}
"""The neighbour, by the distance of its number, whose result an action starts from."""


def run_on_clock(
    actions: Sequence[Sequence[Action]], cost: Callable[[Action], float]
) -> tuple[list[list[Interval]], list[str]]:
    """Run every rank's ``actions``: each runs its own in order, each when its neighbour's result has arrived.

    A pipeline follows the same two rules: lists that end here end there. A skip arrives before the output of the stage
    between, which has waited for the same one.

    >>> run_on_clock([[Action(Kind.F, 0, 0)]], lambda action: 1.0)
    ([[Interval(action=Action(kind=<Kind.F: 'F'>, stage=0, microbatch=0), start=0.0, end=1.0)]], [])

    Returns:
        The actions of each rank with their times, and the ranks that wait for one another for ever, each with the
        action that it waits in.
    """
    intervals: list[list[Interval]] = [[] for _ in actions]
    known, arrivals = set(chain.from_iterable(actions)), dict[Action, float]()
    todo = list(map(deque, actions))
    moves = True
    while moves:
        moves = False
        for row, waiting in zip(intervals, todo, strict=True):
            while waiting:
                kind, stage, i = action = waiting[0]
                start, source = row[-1].end if row else 0.0, Action(kind, stage + _FROM.get(kind, 0), i)
                if kind in _FROM and source in known:
                    if source not in arrivals:
                        break
                    start = max(start, arrivals[source])
                arrivals[action] = start + cost(action)
                row.append(Interval(action, start, arrivals[action]))
                waiting.popleft()
                moves = True
    return intervals, [f"rank {rank} at {waiting[0]}" for rank, waiting in enumerate(todo) if waiting]


@dataclass(frozen=True, slots=True)
class Schedule:
    """The actions of a step, a tuple of them for each rank.

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
        if (fault := next(_faults(self), None)) is not None:
            raise ValueError(f"{self.name} is not a schedule of {self.stages} stages x {self.microbatches}: {fault}")
        _, stuck = run_on_clock(self.actions, lambda action: 0.0)
        if stuck:
            raise ValueError(f"{self.name} never ends because its ranks wait for each other: {stuck}; reorder them")

    @property
    def ranks(self) -> int:
        """The number of ranks that it needs."""
        return len(self.actions)

    @property
    def splits_backward(self) -> bool:
        """True if gradients of the weights have separate actions."""
        return any(action.kind is Kind.W for action in chain.from_iterable(self.actions))

    def recomputing(self, those: Collection[tuple[int, int]]) -> Schedule:
        """Return the schedule in which ``those`` (stage, microbatch) run forward again before backward.

        They do so ahead of the wait for the gradient, which has arrived by the time that it is done.
        """

        def again(action: Action) -> Iterator[Action]:
            if action.kind is Kind.B and action[1:] in those:
                yield action._replace(kind=Kind.R)
            yield action

        actions = tuple(tuple(chain.from_iterable(map(again, actions))) for actions in self.actions)
        return replace(self, actions=actions)

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


def _faults(schedule: Schedule) -> Iterator[str]:
    if len(schedule.rank_of) != schedule.stages:
        yield f"rank_of names the ranks of {len(schedule.rank_of)} stages"
        return
    seen: set[Action] = set()
    for rank, actions in enumerate(schedule.actions):
        for action in actions:
            if not (0 <= action.stage < schedule.stages and 0 <= action.microbatch < schedule.microbatches):
                yield f"{action} is out of range"
                return
            if schedule.rank_of[action.stage] != rank:
                yield f"{action} is on rank {rank}, but its stage is on rank {schedule.rank_of[action.stage]}"
            if action in seen:
                yield f"{action} appears twice"
            needed = _NEEDED.get(action.kind)
            if needed is not None and action._replace(kind=needed) not in seen:
                yield f"{action} comes before its {needed.value}"
            seen.add(action)
    count = sum(action.kind is not Kind.R for action in seen)
    expected = schedule.stages * schedule.microbatches * (3 if schedule.splits_backward else 2)
    if count != expected:
        yield f"it has {count} of {expected} actions"


_NEEDED = {Kind.B: Kind.F, Kind.W: Kind.B, Kind.R: Kind.F}
"""The kind of action on the same stage and microbatch that comes before."""


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


def simulate(schedule: Schedule, costs: Mapping[Kind, float] | Callable[[Action], float] | None = None) -> Simulation:
    """Simulate ``schedule``.

    >>> simulate(make_schedule("1F1B", 2, 4)).makespan
    15.0

    Args:
        schedule: as made.
        costs: the time of each kind of action, or of each action; 0 for those left out. By default F takes 1, B 2, or
            B and W 1 each, R 1.
    """
    if not callable(costs):
        table = usual_costs(schedule.actions) if costs is None else costs
        costs = lambda action: table.get(action.kind, 0.0)  # noqa: E731
    intervals, _ = run_on_clock(schedule.actions, costs)
    return Simulation(
        tuple(map(tuple, intervals)), *makespan_and_bubble(intervals), tuple(map(_peak, schedule.actions))
    )


def usual_costs(actions: Iterable[Sequence[Action]]) -> dict[Kind, float]:
    """Return the costs of ``simulate``: F, W and R take 1, and B does what is left of 2."""
    splits = any(action.kind is Kind.W for action in chain.from_iterable(actions))
    return {**dict.fromkeys(PHASES, 1.0), Kind.B: 1.0 if splits else 2.0}


def makespan_and_bubble(intervals: Sequence[Sequence[Interval]]) -> tuple[float, float]:
    """Return the end of the last action, and the idle part of all ranks' time."""
    makespan = max((interval.end for interval in chain.from_iterable(intervals)), default=0.0)
    busy = sum(interval.end - interval.start for interval in chain.from_iterable(intervals))
    return makespan, 1.0 - busy / (makespan * len(intervals)) if makespan else 0.0


def _peak(actions: Sequence[Action]) -> int:
    """Return the most activations that a rank holds at once."""
    frees = Kind.W if any(action.kind is Kind.W for action in actions) else Kind.B
    recomputed = {(action.stage, action.microbatch) for action in actions if action.kind is Kind.R}
    count = peak = 0
    for kind, stage, i in actions:
        if kind is Kind.R or (kind is Kind.F and (stage, i) not in recomputed):
            count += 1
            peak = max(peak, count)
        elif kind is frees:
            count -= 1
    return peak


# The well-known schedules.


def make_schedule(name: str, stages: int, microbatches: int, *, ranks: int | None = None) -> Schedule:
    """Return the schedule called ``name``.

    >>> schedule = make_schedule("GPipe", stages=2, microbatches=2)
    >>> [[str(action) for action in rank] for rank in schedule.actions]
    [['F0.0', 'F0.1', 'B0.1', 'B0.0'], ['F1.0', 'F1.1', 'B1.1', 'B1.0']]

    Args:
        name: ``"GPipe"``, ``"1F1B"``, ``"Interleaved1F1B"``, ``"ZB1P"`` or ``"ZBV"``.
        stages: the number of stages, from 1.
        microbatches: the number of microbatches, from 1.
        ranks: the number of ranks (or devices) for the stages. By default one for each stage; two stages a rank for
            Interleaved1F1B with an even number of stages, and for ZBV.

    Raises:
        ValueError: an unknown name, or numbers that the schedule cannot run with; names numbers that would work.

    Source: GPipe (Huang et al., 2019); 1F1B (Narayanan et al., PipeDream, 2019, and Megatron-LM, 2021, for the
    interleaved one); ZB1P and ZBV (Qi et al., "Zero Bubble Pipeline Parallelism", 2023).
    """
    name = choice("schedule", name, SCHEDULES)
    for what, number in (("stages", stages), ("microbatches", microbatches)):
        if not isinstance(number, int) or number < 1:
            raise ValueError(f"{name} needs a whole number of {what}, at least 1, got {number!r}")
    if ranks is None:
        ranks = default_ranks(name, stages)
    _check_ranks(name, stages, ranks)
    rank_of, actions = SCHEDULES[name](stages, microbatches, ranks)
    return Schedule(name, stages, microbatches, tuple(rank_of), tuple(map(tuple, actions)))


def default_ranks(name: str, stages: int) -> int:
    """Return the default number of ranks for ``stages`` stages."""
    return stages // 2 if name == "ZBV" or (name == "Interleaved1F1B" and stages % 2 == 0) else stages


def _check_ranks(name: str, stages: int, ranks: int) -> None:
    why = None
    if name == "ZBV" and (ranks < 1 or stages != 2 * ranks):
        why = f"two stages on every rank: make {2 * max(ranks, 1)} stages, or use {stages // 2 or 1} ranks"
    elif name == "Interleaved1F1B" and (ranks < 1 or stages % ranks):
        fitting = [count for count in range(1, stages + 1) if stages % count == 0]
        why = f"equally many stages on every rank: use one of {fitting} ranks"
    elif name not in ("ZBV", "Interleaved1F1B") and ranks != stages:
        why = f"one stage on every rank: make {ranks} stages, or use Interleaved1F1B or ZBV"
    if why is not None:
        raise ValueError(f"{stages} stages do not fit on {ranks} ranks: {name} places {why}")


_RanksAndActions = tuple[list[int], list[list[Action]]]


def _gpipe(n: int, m: int, p: int) -> _RanksAndActions:
    # Backward runs from the last microbatch to the first: its activations are the newest, and those of the last need
    # no second forward under checkpoint="except_last".
    kinds = (Kind.F, range(m)), (Kind.B, range(m - 1, -1, -1))
    return list(range(n)), [[Action(kind, j, i) for kind, order in kinds for i in order] for j in range(n)]


def _interleaved(n: int, m: int, p: int) -> _RanksAndActions:
    """Rank ``r`` has stages ``r, r + p, ...``; microbatches go through in groups of ``p``, the last one shorter.

    A rank runs forward while it holds fewer activations than its warmup and one more, and else backward: so it
    alternates, and a later stage of the same rank never waits longer than it must.
    """
    v = n // p
    groups = [range(first, min(first + p, m)) for first in range(0, m, p)]
    stages = [range(r, n, p) for r in range(p)]
    forward = [[Action(Kind.F, j, i) for group in groups for j in mine for i in group] for mine in stages]
    backward = [[Action(Kind.B, j, i) for group in groups for j in reversed(mine) for i in group] for mine in stages]
    most = [(v - 1) * len(groups[0]) + (1 if v == 1 else 2) * (p - r - 1) + 1 for r in range(p)]

    def rule(r: int, count: Mapping[Kind, int], ready: list[Action], extra: int) -> Action | None:
        forwards, backwards = count[Kind.F], count[Kind.B]
        more = forwards - backwards < most[r] + extra
        nexts = (forward[r][forwards : forwards + 1] if more else []) or backward[r][backwards : backwards + 1]
        return next((action for action in nexts if action in ready), None)

    rank_of = [j % p for j in range(n)]
    return rank_of, _arrange(m, rank_of, rule, (Kind.B, Kind.F))


def _zb1p(n: int, m: int, p: int) -> _RanksAndActions:
    """One stage per rank; weights wait until nothing else can run, or until holding more would exceed 1F1B's memory."""

    def rule(r: int, count: Mapping[Kind, int], ready: list[Action], extra: int) -> Action | None:
        waiting, unfinished = count[Kind.F] - count[Kind.B], count[Kind.F] - count[Kind.W]
        forward_allowed = waiting < n - r and unfinished < n + extra
        return (_first(ready, Kind.F) if forward_allowed else None) or _first(ready, Kind.B) or _first(ready, Kind.W)

    return list(range(n)), _arrange(m, list(range(n)), rule)


def _zbv(n: int, m: int, p: int) -> _RanksAndActions:
    """Rank ``r`` has stages ``r`` and ``n - 1 - r``: the two sides of a V."""

    def rule(r: int, count: Mapping[Kind, int], ready: list[Action], extra: int) -> Action | None:
        going = [action for action in ready if action.kind is Kind.F and action.stage < p]
        coming = [action for action in ready if action.kind is Kind.F and action.stage >= p]
        room = 2 * p + extra - (count[Kind.F] - count[Kind.W])
        return (
            _first(ready, Kind.B)
            or (coming[0] if coming and room > 0 else None)
            # The second side of microbatches in progress needs room too, or nothing would ever be freed.
            or (going[0] if going and room > 1 else None)
            or _first(ready, Kind.W)
        )

    rank_of = [min(j, n - 1 - j) for j in range(n)]
    return rank_of, _arrange(m, rank_of, rule)


SCHEDULES: dict[str, Callable[[int, int, int], _RanksAndActions]] = {
    "GPipe": _gpipe,
    "1F1B": _interleaved,
    "Interleaved1F1B": _interleaved,
    "ZB1P": _zb1p,
    "ZBV": _zbv,
}
"""Every schedule by its name: a function from (stages, microbatches, ranks) to the stages' ranks and the actions."""


class PipeSchedules:
    """The schedule of a pipe, for each number of microbatches in its batches."""

    def __init__(self, schedule: str | Schedule, stages: int, ranks: int | None, *, exactly: bool) -> None:
        if not isinstance(schedule, str | Schedule):
            raise TypeError(f"schedule is one of {[*SCHEDULES]} or a Schedule from make_schedule, got {schedule!r}")
        self.schedule = own = schedule if isinstance(schedule, Schedule) else None
        self.name = name = choice("schedule", schedule, SCHEDULES) if isinstance(schedule, str) else schedule.name
        if own is not None and own.stages != stages:
            raise ValueError(f"the schedule is for {own.stages} stages, but the balance makes {stages}")
        for action in chain.from_iterable(own.actions) if own is not None else ():
            if action.kind is Kind.R:
                raise ValueError(
                    f"the schedule {name!r} has {action}, but a Pipe adds second forwards itself, by checkpoint=; "
                    "make the schedule without R actions"
                )
        several = ranks if name in ("Interleaved1F1B", "ZBV") else None
        needed = own.ranks if own is not None else several or default_ranks(name, stages)
        if ranks is not None and (ranks < needed or (exactly and ranks > needed)):
            places = "ranks, but the process group has" if exactly else "devices, got"
            raise ValueError(
                f"{stages} stages under {name} need {needed} {places} {ranks}; make the balance as long as there are "
                "ranks or devices (CPU may be named several times), or a multiple for Interleaved1F1B and ZBV"
            )
        self._make = partial(make_schedule, name, stages, ranks=needed)
        first = own or self._make(1)
        self.rank_of = first.rank_of
        self.splits_backward = first.splits_backward

    def of(self, m: int) -> Schedule:
        """Return the schedule for ``m`` microbatches."""
        own = self.schedule
        if own is not None and own.microbatches == m:
            return own
        if self.name in SCHEDULES:
            made = self._make(m)
            if (made.rank_of, made.splits_backward) == (self.rank_of, self.splits_backward):
                return made
        assert own is not None
        n = own.microbatches
        raise ValueError(
            f"the schedule {self.name!r} is for {n} microbatches, but this batch makes {m}; give batches of at least "
            f"{n} rows with chunks={n}, or a schedule by name"
        )


_Rule = Callable[[int, Mapping[Kind, int], list[Action], int], Action | None]
"""Of a rank, the numbers of its actions so far by kind, those that are ready, and the activations allowed beyond the
rule's own: the action to take.
"""


def _first(ready: list[Action], kind: Kind) -> Action | None:
    return next((action for action in ready if action.kind is kind), None)


def _arrange(
    m: int, rank_of: list[int], rule: _Rule, kinds: Sequence[Kind] = (Kind.B, Kind.F, Kind.W)
) -> list[list[Action]]:
    """Build lists of actions of one tick each; if the rule is too strict to finish, allow one more activation."""
    # With room for everything some action can always run.
    tries = (_try_to_arrange(m, rank_of, rule, kinds, extra) for extra in range(m * len(rank_of) + 1))
    return next(arranged for arranged in tries if arranged is not None)


def _try_to_arrange(
    m: int, rank_of: list[int], rule: _Rule, kinds: Sequence[Kind], extra: int
) -> list[list[Action]] | None:
    n, ranks = len(rank_of), range(max(rank_of) + 1)
    lists: list[list[Action]] = [[] for _ in ranks]
    counts: list[Counter[Kind]] = [Counter() for _ in ranks]
    done = {Action(kind, j, i) for kind, j in ((Kind.F, -1), (Kind.B, n)) for i in range(m)}  # the caller's
    # A stage takes microbatches in order, so of each kind only the next one can be ready.
    nexts = [{(kind, j): 0 for kind in kinds for j in range(n - 1, -1, -1) if rank_of[j] == r} for r in ranks]
    while any(nexts):
        chosen = []
        for r in ranks:
            following = sorted((Action(kind, j, i) for (kind, j), i in nexts[r].items()), key=itemgetter(2))
            ready = [action for action in following if done.issuperset(_needs(action))]
            if (action := rule(r, counts[r], ready, extra)) is not None:
                chosen.append((r, action))
        if not chosen:
            return None
        for r, action in chosen:
            counts[r][action.kind] += 1
            lists[r].append(action)
            key = (action.kind, action.stage)
            if action.microbatch + 1 < m:
                nexts[r][key] += 1
            else:
                del nexts[r][key]
            done.add(action)
    return lists


def _needs(action: Action) -> list[Action]:
    kind, j, i = action
    neighbour = [Action(kind, j + _FROM[kind], i)] if kind in _FROM else []
    return [*neighbour, action._replace(kind=_NEEDED[kind])] if kind in _NEEDED else neighbour
