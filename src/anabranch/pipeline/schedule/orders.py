"""The well-known schedules: each a function from (stages, microbatches, ranks) to every rank's actions.

They run with any number of microbatches from 1, because the last batch of an epoch may be of any length. GPipe is
explicit; the others are built greedily: at each tick, each idle rank takes one of its ready actions by a rule with its
preferences and the most activations it may hold. The rule of the interleaved one gives Megatron's order, and with one
stage a rank 1F1B.

::

    1F1B, 3 ranks, 4 microbatches (B takes twice as long as F)

    rank 0  F F F . . B B F B B . B B . B B      fills, alternates, drains
    rank 1    F F B B F B B F B B . ...
    rank 2      F B B F B B F B B F B B
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import cast

from anabranch.choices import choice
from anabranch.pipeline.schedule.schedule import Action, Kind, Schedule


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
    make = SCHEDULES[name]
    for what, number in (("stages", stages), ("microbatches", microbatches)):
        if not isinstance(number, int):
            raise TypeError(f"{name} needs a whole number of {what}, got {number!r}")
        if number < 1:
            raise ValueError(f"{name} needs {what} of at least 1, got {number}")
    if ranks is None:
        ranks = default_ranks(name, stages)
    _check_ranks(name, stages, ranks)
    rank_of, actions = make(stages, microbatches, ranks)
    return Schedule(name, stages, microbatches, tuple(rank_of), tuple(map(tuple, actions)))


def default_ranks(name: str, stages: int) -> int:
    """Return the default number of ranks for ``stages`` stages."""
    return stages // 2 if name == "ZBV" or (name == "Interleaved1F1B" and stages % 2 == 0) else stages


def _check_ranks(name: str, stages: int, ranks: int) -> None:
    if name == "ZBV":
        if ranks < 1 or stages != 2 * ranks:
            raise ValueError(
                f"ZBV places two stages on every rank, so {stages} stages do not fit on {ranks} ranks; "
                f"make {2 * max(ranks, 1)} stages, or use {stages // 2 or 1} ranks"
            )
    elif name == "Interleaved1F1B":
        if ranks < 1 or stages % ranks:
            fitting = [count for count in range(1, stages + 1) if stages % count == 0]
            raise ValueError(f"{name} places equally many stages on every rank, but {stages} is not a multiple of "
                             f"{ranks} ranks; use one of {fitting} ranks")  # fmt: skip
    elif ranks != stages:
        raise ValueError(
            f"{name} places one stage on every rank, got {stages} stages for {ranks} ranks; make {ranks} stages, "
            "or use Interleaved1F1B or ZBV"
        )


_RanksAndActions = tuple[list[int], list[list[Action]]]


def _gpipe(n: int, m: int, p: int) -> _RanksAndActions:
    # Backward runs from the last microbatch to the first: its activations are the newest, and those of the last need
    # no second forward under checkpoint="except_last".
    forward, backward = range(m), range(m - 1, -1, -1)
    return list(range(n)), [
        [*(Action(Kind.F, j, i) for i in forward), *(Action(Kind.B, j, i) for i in backward)] for j in range(n)
    ]


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
            raise TypeError(
                f"schedule is a name or a Schedule from make_schedule, got {schedule!r}; names are {[*SCHEDULES]}"
            )
        schedule = choice("schedule", schedule, SCHEDULES) if isinstance(schedule, str) else schedule
        self.name = name = schedule if isinstance(schedule, str) else schedule.name
        self.schedule = None if isinstance(schedule, str) else schedule
        if self.schedule is not None:
            if self.schedule.stages != stages:
                raise ValueError(f"the schedule is for {self.schedule.stages} stages, but the balance makes {stages}")
            needed = self.schedule.ranks
        elif ranks is None or name not in ("Interleaved1F1B", "ZBV"):
            needed = default_ranks(name, stages)
        else:
            needed = ranks
        if ranks is not None and (ranks < needed or (exactly and ranks > needed)):
            places = "ranks, but the process group has" if exactly else "devices, got"
            raise ValueError(
                f"{stages} stages under {name} need {needed} {places} {ranks}; make the balance as long as there are "
                "ranks or devices (CPU may be named several times), or a multiple for Interleaved1F1B and ZBV"
            )
        self._make = partial(make_schedule, name, stages, ranks=needed)
        self._made = {} if self.schedule is None else {self.schedule.microbatches: self.schedule}
        first = self.schedule or self._make(1)
        self.rank_of = first.rank_of
        self.splits_backward = first.splits_backward

    def of(self, m: int) -> Schedule:
        """Return the schedule for ``m`` microbatches."""
        if m not in self._made:
            made = self._make(m) if self.name in SCHEDULES else None
            own = self.schedule
            if own and (made is None or (made.rank_of, made.splits_backward) != (self.rank_of, self.splits_backward)):
                raise ValueError(
                    f"the schedule {self.name!r} is for {own.microbatches} microbatches, but this batch makes {m}; "
                    f"give batches of at least {own.microbatches} rows with chunks={own.microbatches}, or a "
                    "schedule by name"
                )
            self._made[m] = cast(Schedule, made)
        return self._made[m]


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
    for extra in range(m * len(rank_of) + 1):
        arranged = _try_to_arrange(m, rank_of, rule, kinds, extra)
        if arranged is not None:
            return arranged
    raise AssertionError("with room for everything some action can always run")


def _try_to_arrange(
    m: int, rank_of: list[int], rule: _Rule, kinds: Sequence[Kind], extra: int
) -> list[list[Action]] | None:
    n, ranks = len(rank_of), range(max(rank_of) + 1)
    lists: list[list[Action]] = [[] for _ in ranks]
    counts: list[Counter[Kind]] = [Counter() for _ in ranks]
    done: set[Action] = set()
    # A stage takes microbatches in order, so of each kind only the next one can be ready.
    nexts = [{(kind, j): 0 for kind in kinds for j in range(n - 1, -1, -1) if rank_of[j] == r} for r in ranks]
    while any(nexts):
        chosen = []
        for r in ranks:
            following = sorted((Action(kind, j, i) for (kind, j), i in nexts[r].items()), key=itemgetter(2))
            ready = [action for action in following if done.issuperset(_needs(action, n))]
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


def _needs(action: Action, n: int) -> list[Action]:
    kind, j, i, _ = action
    if kind is Kind.F:
        return [Action(Kind.F, j - 1, i)] if j else []
    if kind is Kind.B:
        return [Action(Kind.F, j, i), *([Action(Kind.B, j + 1, i)] if j < n - 1 else [])]
    return [Action(Kind.B, j, i)]
