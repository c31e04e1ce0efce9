"""A schedule: for each rank, the list of actions it runs in a step. Plain data: checked, drawn, saved and read back.

``orders.py`` makes the well-known ones; ``simulated_clock.py`` simulates one, to check that it ends. A new schedule
holds only computing actions. ``with_transfers`` adds the further actions of a given pipeline: sends and receives
between neighbours and along skips, and the second forward of microbatches that keep no activations. A rank executes
that list unchanged.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from anabranch.pipeline.schedule.actions import Action, Kind
from anabranch.pipeline.schedule.simulated_clock import SimulatedRun

__all__ = ["Lowered", "Schedule"]


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
        return any(action.kind is Kind.W for action in self.all_actions())

    def all_actions(self) -> Iterator[Action]:
        """Every rank's actions, rank after rank."""
        for actions in self.actions:
            yield from actions

    def with_transfers(
        self, skips: Iterable[tuple[int, int]] = (), recompute: Collection[tuple[int, int]] = ()
    ) -> Lowered:
        """Return the full list of actions for a pipeline.

        Args:
            skips: the (from, to) stages of its skips; neighbours need not be given.
            recompute: the (stage, microbatch) that keep no activations and run forward again before backward.
        """
        edges = {(j, j + 1) for j in range(self.stages - 1)} | {(j, k) for j, k in skips if j != k}
        return Lowered(self, _Lowering(edges, recompute).run(self))

    def save(self, path: str | Path) -> None:
        """Write the schedule to ``path`` as JSON."""
        Path(path).write_bytes(msgspec.json.format(msgspec.json.encode(_to_record(self)), indent=1))

    @classmethod
    def load(cls, path: str | Path) -> Schedule:
        """Read a schedule written by ``save``, and check it.

        Raises:
            ValueError: the file holds no schedule, or one that cannot run; gives the reason.
        """
        try:
            record = _RECORDS.decode(Path(path).read_bytes())
        except msgspec.DecodeError as error:
            raise ValueError(f"{path} does not hold a schedule: {error}") from None
        return _from_record(record)


@dataclass(frozen=True, slots=True)
class Lowered:
    """A schedule together with a pipeline's full list of actions, including transfers and recomputation."""

    schedule: Schedule
    actions: tuple[tuple[Action, ...], ...]


class _Lowering:
    def __init__(self, edges: set[tuple[int, int]], recompute: Collection[tuple[int, int]]) -> None:
        self._before: dict[int, list[int]] = {}
        self._after: dict[int, list[int]] = {}
        for source, target in sorted(edges):
            self._after.setdefault(source, []).append(target)
            self._before.setdefault(target, []).append(source)
        self._recompute = recompute

    def run(self, schedule: Schedule) -> tuple[tuple[Action, ...], ...]:
        return tuple(
            tuple(lowered for action in actions for lowered in self._around(action)) for actions in schedule.actions
        )

    def _around(self, action: Action) -> Iterator[Action]:
        j, i = action.stage, action.microbatch
        if action.kind is Kind.F:
            yield from (Action(Kind.RECV_F, j, i, source) for source in self._before.get(j, ()))
            yield action
            yield from (Action(Kind.SEND_F, j, i, target) for target in self._after.get(j, ()))
        elif action.kind is Kind.B:
            if (j, i) in self._recompute:
                # Ahead of the wait: it is done by the time that the gradient arrives.
                yield Action(Kind.R, j, i)
            yield from (Action(Kind.RECV_B, j, i, target) for target in self._after.get(j, ()))
            yield action
            yield from (Action(Kind.SEND_B, j, i, source) for source in self._before.get(j, ()))
        else:
            yield action


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
    wanted = schedule.stages * schedule.microbatches * (3 if split else 2)
    if len(seen) != wanted:
        yield f"it has {len(seen)} of {wanted} actions"


class _Record(msgspec.Struct):
    name: str
    stages: int
    microbatches: int
    rank_of: list[int]
    actions: list[list[str]]


# Built at import: constructing a msgspec decoder is not thread-safe.
_RECORDS = msgspec.json.Decoder(_Record)


def _to_record(schedule: Schedule) -> _Record:
    return _Record(
        schedule.name,
        schedule.stages,
        schedule.microbatches,
        list(schedule.rank_of),
        [[str(action) for action in actions] for actions in schedule.actions],
    )


def _from_record(record: _Record) -> Schedule:
    return Schedule(
        record.name,
        record.stages,
        record.microbatches,
        tuple(record.rank_of),
        tuple(tuple(map(_parse, actions)) for actions in record.actions),
    )


def _parse(text: str) -> Action:
    stage, dot, microbatch = text[1:].partition(".")
    if text[:1] not in ("F", "B", "W") or not dot or not (stage.isdecimal() and microbatch.isdecimal()):
        raise ValueError(f"{text!r} is not an action; actions read like F0.3 (kind, stage, microbatch)")
    return Action(Kind(text[0]), int(stage), int(microbatch))
