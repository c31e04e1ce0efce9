"""``plan_step``: the traffic of a training step across each boundary, and its estimated time, as a printable ``Plan``.

Bytes are known from where the parameters live, seconds from what all workers have measured.

::

    compute      forward and backward of the batch, as tried                        once a run
    workers      buckets of gradients, summed; sparse ones gathered                 once a step
    servers      rows read (each run) and moved, parameters read and moved whole    once a step
    experts      forward as tried, and backward as long                             once a run

What crosses takes its messages' latency, and its bytes over the bandwidth. No overlap is assumed: on a processor's
cores there is seldom any.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import cast

import torch
from torch import Tensor

from anabranch.collectives import Workers
from anabranch.collectives.buckets import carries_header, in_buckets
from anabranch.collectives.sparse_rows import sparse_bytes, summing_dtype
from anabranch.executor.exchange import exchange
from anabranch.executor.routes import Place, Route, Routes
from anabranch.executor.running.remote import RemotePart
from anabranch.executor.running.runner import rows_of
from anabranch.executor.running.window import HEADER_SIZE
from anabranch.executor.spec import Spec
from anabranch.executor.steps import TrainStep
from anabranch.executor.survey import StepSurvey, TableRows, survey_step
from anabranch.job import job
from anabranch.parameter_server import ParameterClient, RemoteEmbedding
from anabranch.parameter_server.messages import Compression, Share
from anabranch.tensors import Structure

_SHORT = 1 << 31  # the most rows of a table whose ids travel as 32 bits
_FLAGS = 1  # numbers per summed gradient beside its own
_ALONE_BYTES = 8 * HEADER_SIZE  # a header in its own message
_SKIP_BYTES = 4  # whether a worker skips the step
_VOTE_BYTES = 8  # whether a worker and all servers have their part of it
_TIMES = 5  # of each message that is measured, after one that warms up
_SIZES = 1 << 10, 4 << 20  # bytes that are summed to measure the workers
_ROWS = 4096  # read to measure the servers
_NAME = 27  # columns; with the others a line has 80
_PLACE = 25
_SIZE = 14
_TIME = 11
_MANY_SECONDS = 10.0


def plan_step(
    spec: Spec, workers: Workers | None, name: str, batch: Structure | None, remote: RemotePart | None
) -> Plan:
    """Return the plan of a training step; every worker calls it at the same place.

    Args:
        spec: of the executor.
        workers: of the job; ``None`` is alone.
        name: the step's.
        batch: this worker's; ``None`` if none has been seen.
        remote: the servers' side; ``None`` if nothing is served.
    """
    step = spec.training[name]
    links, surveys, rank = _measured(spec, workers, step, batch, remote)
    survey, servers = surveys[rank], len(job().servers) or int(remote is not None)
    costs = _Costs(spec, step, surveys, rank, links)
    notes = ["without a batch, compute time and table lookups are not included"] if survey is None else [*survey.notes]
    if spec.cache is not None and spec.routes.at(Place.ROWS):
        notes.append("cached rows are not sent again, so the servers' figures are upper bounds")
    if links.keys() == {"servers"} and remote is not None and not remote.is_open:
        notes.append("nothing is on the servers yet, so their bandwidth is not measured")
    crossed = {boundary: link for boundary, link in links.items() if boundary in costs.bytes}
    rows = tuple(costs.rows)
    return Plan(name, spec.comm_mode, len(surveys), servers, rows, costs.bytes, costs.parts, crossed, tuple(notes))


def _measured(
    spec: Spec, workers: Workers | None, step: TrainStep, batch: Structure | None, remote: RemotePart | None
) -> tuple[Mapping[str, LinkCost], Sequence[StepSurvey | None], int]:
    """Return rank 0's links, every worker's survey, and this worker's rank."""
    exchange(workers, None, type(None), "plan")  # all begin to measure together
    mine = _links(spec, workers, remote), _survey(step, batch, spec.routes)
    everyone = exchange(workers, mine, tuple[dict[str, LinkCost], StepSurvey | None], "plan")
    return everyone[0][0], [survey for _, survey in everyone], 0 if workers is None else workers.rank


def _survey(step: TrainStep, batch: Structure | None, routes: Routes) -> StepSurvey | None:
    if batch is None or not rows_of(step, batch):
        return None
    tables: dict[Tensor, tuple[str, bool]] = {
        route.tensor: (route.parameter, route.place is Place.ROWS) for route in routes if route.tensor is not None
    }
    return survey_step(step, batch, tables)


# The links, measured by all workers at the same time.


def _links(spec: Spec, workers: Workers | None, remote: RemotePart | None) -> dict[str, LinkCost]:
    links = {}
    if workers is not None and workers.size > 1:
        few, many = (torch.zeros(size, dtype=torch.uint8, device=workers.device) for size in _SIZES)
        reduce = partial(workers.all_reduce, operation="plan: measure the workers' link")
        links["workers"] = _link(partial(reduce, few), partial(reduce, many), many.nbytes - few.nbytes)
    if remote is not None:
        with remote.client.uncounted():
            links["servers"] = _servers(spec, remote.client, spec.routes if remote.is_open else [], links)
    return links


def _servers(spec: Spec, client: ParameterClient, routes: Iterable[Route], links: Mapping[str, LinkCost]) -> LinkCost:
    """Measure by reading what is largest on the servers; without that the bandwidth is the workers'."""
    largest = max((route for route in routes if route.place.served), key=lambda route: route.bytes, default=None)
    if largest is None:
        link = _link(client.wait_until_served, client.wait_until_served, 1)
        return replace(link, seconds_per_byte=links["workers"].seconds_per_byte if "workers" in links else 0.0)
    few: Callable[[], object] = client.wait_until_served
    count, size = 0, largest.bytes
    if largest.place is not Place.WHOLE:
        count = _ROWS if largest.shape[0] < 0 else min(largest.shape[0], _ROWS)
        size = _row_bytes(largest, count - 1, spec.row_compression, short=_has_short_ids(largest))
        few = partial(client.pull_many, {largest.parameter: torch.zeros(1, dtype=torch.int64, device="cpu")})
    ids = torch.arange(count, device="cpu")
    return _link(few, partial(client.pull_many, {largest.parameter: ids}), max(1, size))


def _link(few: Callable[[], object], many: Callable[[], object], more: int) -> LinkCost:
    """Return the link by which ``many`` sends so many bytes more than ``few``."""
    latency, longer = _seconds(few), _seconds(many)
    return LinkCost(latency, max(0.0, longer - latency) / more)


def _seconds(call: Callable[[], object]) -> float:
    """Return the usual seconds of a call, after one that warms up."""
    times = []
    for _ in range(_TIMES + 1):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return median(times[1:])


class _Costs:
    """The traffic and time of a step.

    Attributes:
        rows: of the plan's table.
        bytes: of this worker, by boundary.
        parts: seconds of a step on the slowest worker, by cause.
    """

    def __init__(
        self,
        spec: Spec,
        step: TrainStep,
        surveys: Sequence[StepSurvey | None],
        rank: int,
        links: Mapping[str, LinkCost],
    ) -> None:
        self._compression, self._step, self._links = spec.row_compression, step, links
        self._mine, self._seen = surveys[rank], [survey for survey in surveys if survey is not None]
        self._alone = len(surveys) == 1
        causes = ["compute", *(cause for survey in self._seen for cause in survey.parts)]
        slowest = {cause: max((one.parts.get(cause, 0.0) for one in self._seen), default=0.0) for cause in causes}
        uses = [
            (parameter, getattr(module, "sparse", False) is True)
            for model in spec.models.values()
            for module in model.modules()
            for parameter in module._parameters.values()
        ]
        self._sparse = {one for one, sparse in uses if sparse} - {one for one, sparse in uses if not sparse}
        self.parts = {cause: step.accumulate * seconds for cause, seconds in slowest.items()}
        self.bytes: dict[str, int] = {}
        embeddings = {module.name for module in step.model.modules() if isinstance(module, RemoteEmbedding)}
        parameters = set(step.model.parameters())
        mine = Routes(
            route
            for route in spec.routes
            if (route.parameter in embeddings if route.tensor is None else route.tensor in parameters)
        )
        short = all(map(_has_short_ids, mine.at(Place.ROWS)))
        self.rows = [self._row(route, pushes_short=short) for route in mine]
        self._votes = spec.consistency.merges and (spec.cache is None or spec.cache.push_bound == 0)
        if not self._alone and spec.run_together(spec.routes):
            self._add_headers(mine)
        if mine.served:
            # Rows are read in one message a run, parameters in one a step, and all are pushed in one; a norm takes two.
            reads = step.accumulate * bool(mine.at(Place.ROWS)) + bool(mine.at(Place.WHOLE, Place.WHOLE_TABLE))
            self._add("servers", messages=reads + 1 + 2 * (step.clip_grad_norm is not None))
        experts = {} if self._mine is None else self._mine.experts
        for name, size in experts.items():
            seconds = self.parts.get("experts", 0.0) / len(experts)
            self.rows.append(PlanRow(name, (), "experts", "experts", step.accumulate * size, seconds))
            self.bytes["experts"] = self.bytes.get("experts", 0) + step.accumulate * size

    def _add(self, boundary: str, nbytes: int = 0, messages: int = 0) -> float:
        """Add what these bytes and messages take."""
        seconds = self._links[boundary].seconds(nbytes, messages) if boundary in self._links else 0.0
        self.parts[boundary] = self.parts.get(boundary, 0.0) + seconds
        if nbytes:
            self.bytes[boundary] = self.bytes.get(boundary, 0) + nbytes
        return seconds

    def _row(self, route: Route, *, pushes_short: bool) -> PlanRow:
        boundary = "servers" if route.place.served else "workers" if self._is_summed(route) else ""
        # The longest of the workers' sparse gradients has the length of all.
        seen = self._seen if boundary == "workers" else [] if self._mine is None else [self._mine]
        lookups = [survey.tables.get(route.parameter, TableRows()) for survey in seen]
        nbytes: int | None = None
        if boundary == "workers" or lookups or route.place is Place.WHOLE:
            most = max(lookups, key=lambda one: one.moved, default=TableRows())
            nbytes = self._bytes(route, most, pushes_short=pushes_short)
        seconds = self._add(boundary, nbytes or 0) if boundary else 0.0
        return PlanRow(route.parameter, route.shape, route.place.value, boundary, nbytes if boundary else 0, seconds)

    def _bytes(self, route: Route, seen: TableRows, *, pushes_short: bool) -> int:
        """Return the bytes of one parameter in a step with these lookups a run."""
        trained = route.tensor is None or route.tensor.requires_grad
        moved = seen.moved if trained else 0
        if route.place is Place.WORKERS:
            dtype = summing_dtype(torch.empty(0, dtype=route.dtype, device="cpu"))
            if route.tensor in self._sparse:
                return sparse_bytes(max(1, moved), _width(route), dtype)
            return (math.prod(route.shape) + _FLAGS) * dtype.itemsize
        if route.place is Place.WHOLE:
            return route.bytes * (1 + trained)
        if route.place is Place.WHOLE_TABLE:
            return _row_bytes(route, route.shape[0] + moved, None, short=True)
        rounded = self._compression
        read = _row_bytes(route, seen.read, rounded, short=_has_short_ids(route))
        return self._step.accumulate * read + _row_bytes(route, moved, rounded, short=pushes_short)

    def _add_headers(self, routes: Routes) -> None:
        """Add gradients' latencies, the header of each run (with the first bucket or alone), and the flag of a skip."""
        summed = [route for route in routes if self._is_summed(route)]
        dense = {route.parameter: route.tensor for route in summed if route.tensor not in self._sparse}
        buckets = in_buckets(cast("dict[str, Tensor]", dense))
        carried = carries_header(buckets)
        alone = self._step.accumulate - carried
        header = HEADER_SIZE * buckets[0][0][1].itemsize if carried else 0
        messages = len(buckets) + alone + 2 * (len(summed) - len(dense))  # sparse ones send their lengths first
        size = header + alone * _ALONE_BYTES
        if self._step.skip_nonfinite and routes.served:
            size, messages = size + _SKIP_BYTES, messages + 1
        if self._votes and routes.served:
            size, messages = size + _VOTE_BYTES, messages + 1
        self._add("workers", size, messages=messages)

    def _is_summed(self, route: Route) -> bool:
        tensor = route.tensor
        return not self._alone and route.place is Place.WORKERS and tensor is not None and tensor.requires_grad


def _width(route: Route) -> int:
    return math.prod(route.shape[1:])


def _has_short_ids(route: Route) -> bool:
    return 0 <= route.shape[0] <= _SHORT


def _row_bytes(route: Route, count: int, compression: Compression | None, *, short: bool) -> int:
    """Return the bytes of so many rows and their ids."""
    return (4 if short else 8) * count + Share(route.dtype, (count, _width(route)), "rows").bytes(compression)


# The plan as a value.


@dataclass(frozen=True, slots=True)
class LinkCost:
    """The measured speed of a boundary.

    >>> cost = LinkCost(latency=0.001, seconds_per_byte=1e-9)
    >>> round(cost.seconds(1_000_000, messages=2), 6)
    0.003

    Attributes:
        latency: seconds of a message of nothing.
        seconds_per_byte: the inverse of the bandwidth; 0 if nothing could be sent to measure it.
    """

    latency: float
    seconds_per_byte: float

    def seconds(self, nbytes: int, messages: int = 0) -> float:
        """Return the seconds of so many messages with these bytes in them together."""
        return messages * self.latency + nbytes * self.seconds_per_byte

    def __str__(self) -> str:
        bandwidth = f", {1e-6 / self.seconds_per_byte:,.1f} MB/s" if self.seconds_per_byte else ""
        return f"{1000 * self.latency:.2f} ms{bandwidth}"


@dataclass(frozen=True, slots=True)
class PlanRow:
    """One parameter, or one layer that is across a boundary. ``str`` of it is a line of the table.

    Attributes:
        name: the parameter's, or an expert's.
        shape: of the whole parameter; empty for an expert.
        place: where it lives.
        boundary: the one it crosses in a step, ``"workers"``, ``"servers"`` or ``"experts"``; empty if none.
        bytes: those that this worker sends and receives for it in a step; ``None`` if a batch is needed to know.
        seconds: the estimated time of its bytes; the latency of messages is that of the boundary.
    """

    name: str
    shape: tuple[int, ...]
    place: str
    boundary: str
    bytes: int | None
    seconds: float

    def __str__(self) -> str:
        crosses = "?" if self.bytes is None else f"{self.bytes:,}" if self.boundary else "-"
        seconds = _seconds_in_words(self.seconds) if self.boundary else "-"
        return _line(self.name, self.place, crosses, seconds)


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of a training step: ``print(plan)`` shows a table of at most 80 columns.

    Attributes:
        step: the step's name.
        comm_mode: the mode in use.
        workers, servers: of the job.
        rows: every parameter, then every layer that runs in another process.
        bytes: of one worker in a step, by boundary, headers included: all that ``Executor.statistics()`` counts.
        parts: the expected seconds of a step, by cause: ``"compute"``, and each boundary.
        links: the measured speed of each boundary.
        notes: what the figures do not include.
    """

    step: str
    comm_mode: str | None
    workers: int
    servers: int
    rows: tuple[PlanRow, ...]
    bytes: Mapping[str, int]
    parts: Mapping[str, float]
    links: Mapping[str, LinkCost] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def step_seconds(self) -> float:
        """Seconds that an optimizer step should take."""
        return sum(self.parts.values())

    def __str__(self) -> str:
        title = f"step {self.step!r}, comm_mode={self.comm_mode!r}: {_count(self.workers, 'worker')}"
        if self.servers:
            title += f", {_count(self.servers, 'server')}"
        lines = [title, _line("parameter or layer", "where it lives", "bytes a step", "time"), *map(str, self.rows)]
        lines += ["", _line("a step should take", "", "", _seconds_in_words(self.step_seconds))]
        for part, seconds in self.parts.items():
            size = f"{self.bytes[part]:,}" if part in self.bytes else ""
            lines.append(_line(f"  {part}", str(self.links.get(part, "")), size, _seconds_in_words(seconds)))
        return "\n".join([*lines, *self.notes])


def _line(name: str, place: str, size: str, time: str) -> str:
    return f"{_shortened(name, _NAME):<{_NAME}} {_shortened(place, _PLACE):<{_PLACE}} {size:>{_SIZE}} {time:>{_TIME}}"


def _shortened(name: str, width: int) -> str:
    """Return ``name`` with its middle left out if it is too long."""
    if len(name) <= width:
        return name
    before, after = (width - 3) // 2, (width - 2) // 2
    return f"{name[:before]}...{name[-after:]}"


def _seconds_in_words(seconds: float) -> str:
    return f"{1000 * seconds:.2f} ms" if seconds < _MANY_SECONDS else f"{seconds:,.1f} s"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
