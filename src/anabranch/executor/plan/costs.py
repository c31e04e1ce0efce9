"""``plan_of``: the bytes and seconds of a step, computed from where its parameters live.

::

    compute      forward and backward, as looked at                             once a run
    tables       a dense gradient for a table that is here: all of its rows     once a run
    optimizers   each number that is updated here                               once a step
    workers      buckets of gradients, summed; sparse ones gathered             once a step
    servers      rows read and moved, parameters read and moved whole           once a step
    experts      forward as asked, and backward as twice that                   once a run
    pipeline     the busiest rank of a pipe waits for the others                once a run

No overlap is assumed: on a processor's cores there is seldom any.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from anabranch.collectives.buckets import bucket_bytes, carries_header, in_buckets
from anabranch.collectives.sparse_rows import sparse_bytes, summing_dtype
from anabranch.executor.plan.machine_profile import LinkSpeed, Profile
from anabranch.executor.plan.step_plan import Plan, PlanRow
from anabranch.executor.plan.step_survey import StageSurvey, StepSurvey, TableLookups
from anabranch.executor.routes import Place
from anabranch.executor.running.window import HEADER_SIZE
from anabranch.tensors import Compression
from anabranch.tensors.packing import Share

__all__ = ["RowsHeld", "StepFacts", "plan_of"]

_SHORT = 1 << 31  # the most rows of a table whose ids travel as 32 bits
_SHORT_ID, _LONG_ID = 4, 8
_ALONE_BYTES = 8 * HEADER_SIZE  # a header in its own message
# In copies of the same bytes: a gradient filled with zeros, put into a bucket, weighed and divided; a check for NaN.
_FILL, _COPY, _SCALE, _LOOK = 0.5, 1.0, 1.0, 0.5
_MAPPED = 32 << 20  # bytes above which C's allocator gives memory back at once, and takes new pages the next time
_SCATTER = 4.0  # rows added to others, in any order
_SPARSE = 12.0  # rows sorted and merged
_EXPERT_STEPS = 3  # an expert's forward, and a backward that takes twice as long


@dataclass(frozen=True, slots=True)
class RowsHeld:
    """One parameter of a step.

    Attributes:
        name, shape, dtype: of the whole; a dynamic vocabulary has -1 rows.
        place: where it lives.
        tensor: the parameter, where it is summed among the workers.
        trained: it gets a gradient.
        looked_up: it is a table, and only looked up.
        sparse: its lookups have sparse gradients.
        optimizer: the class of the optimizer that moves it here, if one does.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    place: Place
    tensor: Tensor | None = None
    trained: bool = True
    looked_up: bool = False
    sparse: bool = False
    optimizer: str | None = None

    @property
    def width(self) -> int:
        """Numbers a row."""
        return int(torch.Size(self.shape[1:]).numel())

    @property
    def numel(self) -> int:
        """Numbers of the whole; 0 for a dynamic vocabulary."""
        return max(0, self.shape[0]) * self.width if self.shape else 1

    @property
    def nbytes(self) -> int:
        """Bytes of the whole."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class StepFacts:
    """The facts about a step that a plan needs in addition to its parameters.

    Attributes:
        name: the step's.
        accumulate: runs a step.
        mean: gradients are weighed by rows.
        looks_for_nan: at every gradient.
        skips_together: the workers agree on skipping a step.
        clips: by the norm of all gradients.
        compression: of rows on their way to servers.
        caches: rows are cached here.
    """

    name: str
    accumulate: int = 1
    mean: bool = True
    looks_for_nan: bool = True
    skips_together: bool = False
    clips: bool = False
    compression: Compression | None = None
    caches: bool = False


@dataclass(slots=True)
class _Sum:
    """Bytes and seconds while they are added up."""

    bytes: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def add(self, part: str, seconds: float, nbytes: int = 0) -> None:
        self.seconds[part] = self.seconds.get(part, 0.0) + seconds
        if nbytes:
            self.bytes[part] = self.bytes.get(part, 0) + nbytes


def plan_of(
    comm_mode: str | None,
    holdings: Sequence[RowsHeld],
    facts: StepFacts,
    profile: Profile,
    surveys: Sequence[StepSurvey | None],
    rank: int,
    *,
    servers: int = 0,
) -> Plan:
    """Return the plan of a step.

    Args:
        comm_mode: the mode by which the parameters got their places.
        holdings: the parameters.
        facts: of the step.
        profile: of the machine.
        surveys: each worker's survey of its batch; ``None`` for a worker that has had no batch.
        rank: the plan gives this worker's bytes.
        servers: their number.
    """
    total = _Sum()
    seen = [survey for survey in surveys if survey is not None]
    mine = surveys[rank]
    total.add("compute", facts.accumulate * max((survey.seconds for survey in seen), default=0.0))
    staged = any(survey.stages for survey in seen)
    if staged:
        sent = 0 if mine is None else facts.accumulate * mine.sent
        total.add("pipeline", facts.accumulate * max(survey.waiting for survey in seen), sent)
    rows = [*_workers_rows(holdings, facts, profile, surveys, rank, total)]
    rows += _servers_rows(holdings, facts, profile, seen, mine, total)
    _add_updates(holdings, profile, seen, total)
    rows += [_stays(held) for held in holdings if held.name not in {row.name for row in rows}]
    order = {held.name: number for number, held in enumerate(holdings)}
    rows.sort(key=lambda row: order[row.name])
    rows += _expert_rows(facts, mine, seen, total)
    notes = []
    if staged:
        survey = mine or seen[0]
        rows += [_row_of_stage(stage, facts) for stage in survey.stages]
        notes.append(f"pipeline: waits for other stages; the schedule alone idles ranks {survey.idle:.0%} of the time")
    if mine is None:
        notes.append("without a batch, compute time and table lookups are not included")
    if facts.caches and any(held.place is Place.ROWS for held in holdings):
        notes.append("cached rows are not sent again, so the servers' figures are upper bounds")
    return Plan(facts.name, comm_mode, len(surveys), servers, tuple(rows), total.bytes, total.seconds, tuple(notes))


def _row_of_stage(stage: StageSurvey, facts: StepFacts) -> PlanRow:
    seconds = facts.accumulate * stage.seconds
    return PlanRow(stage.name, (stage.parameters,), stage.place, "pipeline", facts.accumulate * stage.sent, seconds)


def _stays(held: RowsHeld) -> PlanRow:
    return PlanRow(held.name, held.shape, held.place.value, "", 0, 0.0)


def _most(surveys: Sequence[StepSurvey], held: RowsHeld) -> TableLookups:
    """Return the largest lookups of a table on any worker."""
    found = [survey.tables[held.name] for survey in surveys if held.name in survey.tables] or [TableLookups(0, 0, 0)]
    return TableLookups(
        max(one.ids for one in found), max(one.read for one in found), max(one.moved for one in found)
    )  # fmt: skip


# On the workers: gradients, their sum over the workers, and the optimizers.


def _workers_rows(
    holdings: Sequence[RowsHeld],
    facts: StepFacts,
    profile: Profile,
    surveys: Sequence[StepSurvey | None],
    rank: int,
    total: _Sum,
) -> list[PlanRow]:
    seen = [survey for survey in surveys if survey is not None]
    here = [held for held in holdings if held.trained and not held.place.served]
    for held in here:
        _add_gradient(held, facts, profile, _most(seen, held), total)
    link = profile.workers
    if len(surveys) == 1 or link is None or all(held.place is Place.HERE for held in holdings):
        return []
    rows, summed = [], [held for held in here if held.place is Place.WORKERS]
    dense = {held.name: held.tensor for held in summed if not held.sparse and held.tensor is not None}
    buckets = in_buckets(dense)
    carried = carries_header(buckets)
    for number, members in enumerate(buckets):
        size = bucket_bytes(members, HEADER_SIZE if carried and number == 0 else 0)
        passes = _COPY + (2 * _SCALE if facts.mean else 0.0)
        total.add("workers", link.cost(size) + passes * size * profile.copy, size)
    alone = facts.accumulate - (1 if carried else 0)
    total.add("workers", link.cost(alone * _ALONE_BYTES, messages=alone), alone * _ALONE_BYTES)
    if facts.skips_together and any(held.place.served for held in holdings):
        total.add("workers", link.cost(4), 4)
    for held in summed:
        if held.sparse:
            longest = max(1, _most(seen, held).moved)
            size = sparse_bytes(longest, held.width, summing_dtype(torch.empty(0, dtype=held.dtype, device="cpu")))
            seconds = link.cost(size * (len(surveys) - 1), messages=2) + _SPARSE * size * len(surveys) * profile.copy
            total.add("workers", seconds, size)
            known = surveys[rank] is not None
            rows.append(PlanRow(held.name, held.shape, held.place.value, "workers", size if known else None, seconds))
        else:
            size = (held.numel + 2) * summing_dtype(torch.empty(0, dtype=held.dtype, device="cpu")).itemsize
            seconds = size * link.per_byte
            rows.append(PlanRow(held.name, held.shape, held.place.value, "workers", size, seconds))
    return rows


def _add_gradient(held: RowsHeld, facts: StepFacts, profile: Profile, most: TableLookups, total: _Sum) -> None:
    """Add the extra cost of a table's gradient, and the check of any gradient for NaN."""
    row = held.width * held.dtype.itemsize
    if held.looked_up and held.sparse:
        total.add("tables", facts.accumulate * _SPARSE * most.ids * row * profile.copy)
    elif held.looked_up:
        fill = profile.fresh if held.nbytes >= _MAPPED else _FILL * profile.copy
        total.add("tables", facts.accumulate * (fill * held.nbytes + _SCATTER * most.ids * row * profile.copy))
    if facts.looks_for_nan:
        size = most.moved * row if held.sparse else held.nbytes
        total.add("optimizers", _LOOK * size * profile.copy)


def _add_updates(holdings: Sequence[RowsHeld], profile: Profile, surveys: Sequence[StepSurvey], total: _Sum) -> None:
    for held in holdings:
        update = None if held.optimizer is None else profile.updates.get(held.optimizer)
        if update is None or held.place.served or not held.trained:
            continue
        if held.sparse:
            count = _SPARSE * sum(survey.tables[held.name].moved for survey in surveys if held.name in survey.tables)
        else:
            count = float(held.numel)
        elements = count * (held.width if held.sparse else 1)
        total.add("optimizers", update.per_parameter + elements * update.per_element)


# On the servers.


def _servers_rows(
    holdings: Sequence[RowsHeld],
    facts: StepFacts,
    profile: Profile,
    surveys: Sequence[StepSurvey],
    mine: StepSurvey | None,
    total: _Sum,
) -> list[PlanRow]:
    served = [held for held in holdings if held.place.served]
    if not served:
        return []
    short = all(_has_short_ids(held) for held in served if held.place is Place.ROWS)
    rows = []
    for held in served:
        if held.place is Place.ROWS:
            rows.append(_row_of_table(held, facts, profile, surveys, mine, total, pushes_short=short))
        elif held.place is Place.WHOLE_TABLE:
            rows.append(_row_of_whole_table(held, profile, surveys, mine, total))
        else:
            rows.append(_row_of_whole(held, profile, total))
    total.add("servers", _latency(served, facts, profile))
    return rows


def _has_short_ids(held: RowsHeld) -> bool:
    return 0 <= held.shape[0] <= _SHORT


def _latency(served: Sequence[RowsHeld], facts: StepFacts, profile: Profile) -> float:
    """Return the seconds of the messages: rows and whole parameters are read in one each, and pushed in one."""
    rows = any(held.place is Place.ROWS for held in served)
    copies = [held.place is Place.WHOLE for held in served if held.place is not Place.ROWS]
    pull = _latency_of(profile.pull) if rows else 0.0
    refresh = _latency_of(profile.pull_whole if all(copies) else profile.pull) if copies else 0.0
    push = max(_latency_of(profile.push_whole if held.place is Place.WHOLE else profile.push) for held in served)
    norm = 2 * max(pull, refresh) if facts.clips else 0.0  # requested, and then released
    return facts.accumulate * pull + refresh + push + norm


def _latency_of(link: LinkSpeed | None) -> float:
    return 0.0 if link is None else link.latency


def _row_of_table(
    held: RowsHeld,
    facts: StepFacts,
    profile: Profile,
    surveys: Sequence[StepSurvey],
    mine: StepSurvey | None,
    total: _Sum,
    *,
    pushes_short: bool,
) -> PlanRow:
    def size(count: int, *, short: bool) -> int:
        ids = count * (_SHORT_ID if short else _LONG_ID)
        return ids + Share(held.dtype, (count, held.width), "rows").bytes(facts.compression)

    def read(count: int) -> int:
        return size(count, short=_has_short_ids(held))

    def push(count: int) -> int:
        return size(count, short=pushes_short)

    most = _most(surveys, held)
    moved = most.moved if held.trained else 0
    row = held.width * held.dtype.itemsize
    seconds = facts.accumulate * (_cost(profile.pull, read(most.read), most.read) + profile.distinct * most.ids)
    seconds += _cost(profile.push, push(moved), moved)
    total.add("tables", facts.accumulate * _SCATTER * most.ids * row * profile.copy)
    here = None if mine is None else mine.tables.get(held.name, TableLookups(0, 0, 0))
    nbytes = None
    if here is not None:
        nbytes = facts.accumulate * read(here.read) + (push(here.moved) if held.trained else 0)
    total.add("servers", seconds, nbytes or 0)
    return PlanRow(held.name, held.shape, held.place.value, "servers", nbytes, seconds)


def _row_of_whole(held: RowsHeld, profile: Profile, total: _Sum) -> PlanRow:
    """Return the row of a dense parameter of which every worker has a copy, read before each step."""
    pushed = held.nbytes if held.trained else 0
    seconds = _cost(profile.pull_whole, held.nbytes) + held.nbytes * profile.copy + _cost(profile.push_whole, pushed)
    total.add("servers", seconds, held.nbytes + pushed)
    return PlanRow(held.name, held.shape, held.place.value, "servers", held.nbytes + pushed, seconds)


def _row_of_whole_table(
    held: RowsHeld, profile: Profile, surveys: Sequence[StepSurvey], mine: StepSurvey | None, total: _Sum
) -> PlanRow:
    """Return the row of a table that is read whole before each step; only rows with a gradient are pushed."""
    row = _SHORT_ID + held.width * held.dtype.itemsize
    pulled, moved = held.shape[0] * row, _most(surveys, held).moved if held.trained else 0
    seconds = _cost(profile.pull, pulled, held.shape[0]) + held.nbytes * profile.copy
    seconds += _cost(profile.push, moved * row, moved) + _LOOK * held.nbytes * profile.copy
    own = 0 if mine is None or not held.trained else mine.tables.get(held.name, TableLookups(0, 0, 0)).moved
    total.add("servers", seconds, pulled + own * row)
    known = None if mine is None else pulled + own * row
    return PlanRow(held.name, held.shape, held.place.value, "servers", known, seconds)


def _cost(link: LinkSpeed | None, nbytes: int, rows: int = 0) -> float:
    """Return the seconds without a message's latency, which is counted once for all."""
    return 0.0 if link is None else link.cost(nbytes, rows, messages=0)


# Experts.


def _expert_rows(
    facts: StepFacts, mine: StepSurvey | None, surveys: Sequence[StepSurvey], total: _Sum
) -> list[PlanRow]:
    away = max((survey.away for survey in surveys), default=0.0)
    if away:
        total.add("experts", _EXPERT_STEPS * facts.accumulate * away)
    rows: list[PlanRow] = []
    if mine is None:
        return rows
    for name, asked in mine.experts.items():
        size = facts.accumulate * (asked.sent + asked.received)
        share = _EXPERT_STEPS * facts.accumulate * mine.away / len(mine.experts)
        total.add("experts", 0.0, size)
        rows.append(PlanRow(name, (), "experts", "experts", size, share))
    return rows
