"""The schedules of one pipe, one for each number of microbatches."""

from __future__ import annotations

import operator
from functools import partial
from typing import Literal, SupportsIndex, TypeAlias, cast, get_args

from anabranch.choices import choice
from anabranch.pipeline.schedule.orders import SCHEDULES, default_ranks, make_schedule
from anabranch.pipeline.schedule.schedule import Schedule

Checkpoint: TypeAlias = Literal["except_last", "always", "never"]
"""The microbatches that keep no activations and run forward again before backward."""


Output: TypeAlias = Literal["last", "all"]
"""The ranks on which a call returns the output: the last stage's, or all."""


def check_setting(name: str, value: object) -> None:
    """Raise for an invalid number of microbatches, ``checkpoint`` or ``output``."""
    if name != "chunks":
        choice(name, cast(str, value), get_args(Checkpoint if name == "checkpoint" else Output))
    elif isinstance(value, bool) or not isinstance(value, SupportsIndex) or operator.index(value) < 1:
        raise ValueError(f"chunks is the number of microbatches, at least 1, got {value!r}")


class PipeSchedules:
    """The schedule of a pipe, for each number of microbatches in its batches."""

    def __init__(self, given: str | Schedule, stages: int, ranks: int | None, *, exactly: bool) -> None:
        if not isinstance(given, str | Schedule):
            raise TypeError(
                f"schedule is a name or a Schedule from make_schedule, got {given!r}; names are {[*SCHEDULES]}"
            )
        given = choice("schedule", given, SCHEDULES) if isinstance(given, str) else given
        self.name = name = given if isinstance(given, str) else given.name
        self.given = None if isinstance(given, str) else given
        if self.given is not None:
            if self.given.stages != stages:
                raise ValueError(f"the schedule is for {self.given.stages} stages, but the balance makes {stages}")
            wanted = self.given.ranks
        elif ranks is None or name not in ("Interleaved1F1B", "ZBV"):
            wanted = default_ranks(name, stages)
        else:
            wanted = ranks
        if exactly and ranks != wanted:
            raise ValueError(
                f"{stages} stages under {name} need {wanted} ranks, but the process group has {ranks}; make the "
                "balance as long as the group, or a multiple for Interleaved1F1B and ZBV"
            )
        if ranks is not None and ranks < wanted:
            raise ValueError(
                f"{stages} stages under {name} need {wanted} devices, got {ranks}; name more (CPU may be named "
                "several times), or make the balance shorter"
            )
        self._make = partial(make_schedule, name, stages, ranks=wanted)
        self._made: dict[int, Schedule] = {}
        first = self.given or self._make(1)
        self.rank_of = first.rank_of
        self.splits_backward = first.splits_backward

    def of(self, m: int) -> Schedule:
        """Return the schedule for ``m`` microbatches."""
        if self.given is not None and self.given.microbatches == m:
            return self.given
        if m not in self._made:
            self._made[m] = self._make_like_given(m) if self.given is not None else self._make(m)
        return self._made[m]

    def _make_like_given(self, m: int) -> Schedule:
        """Return the schedule of the given one's name, for a batch with another number of microbatches."""
        given = self.given
        assert given is not None
        if self.name in SCHEDULES:
            made = self._make(m)
            if (made.rank_of, made.splits_backward) == (given.rank_of, given.splits_backward):
                return made
        raise ValueError(
            f"the schedule {self.name!r} is for {given.microbatches} microbatches, but this batch makes {m}; give "
            f"batches of at least {given.microbatches} rows with chunks={given.microbatches}, or a schedule by name"
        )


def recomputed_actions(checkpoint: Checkpoint, n: int, m: int) -> frozenset[tuple[int, int]]:
    """Return the stages and microbatches that are recomputed in backward."""
    last = {"always": m, "except_last": m - 1, "never": 0}[checkpoint.lower()]
    return frozenset((j, i) for j in range(n) for i in range(last))
