"""The data of a page about a trace: spans by thread, bytes between processes, schedules, the longest waits."""

from __future__ import annotations

import bisect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from anabranch.record.process import read_regular
from anabranch.record.words import in_words

Event: TypeAlias = dict[str, Any]
TraceData: TypeAlias = dict[str, Any]

Action: TypeAlias = tuple[int, int, int, str, float, float]
"""Step, stage, microbatch, phase, start and duration."""

Draw: TypeAlias = Callable[[Mapping[int, Sequence[tuple[int, str, float, float]]]], tuple[str, str]]
"""Returns pictures of a pipeline's step as planned and as it ran, from each stage's actions in the order in which they
ran: microbatch, phase, start and end in milliseconds.
"""

_MOST_STEPS = 50
_MOST_SPANS = 200_000
_MOST_WAITS = 200
_BYTES = ("bytes", "sent_bytes", "received_bytes")
_STAGE = "anabranch-stage-"  # begins the name of a stage's thread


def read_trace(path: Path, draw: Draw) -> TraceData:
    """Return the data of a trace file, as ``record/trace.py`` writes it, that ``run.js`` draws.

    Args:
        path: the file.
        draw: ``pipeline/drawing.py``'s, called if the trace has actions of a pipeline.

    Raises:
        ValueError: it is not a trace, or larger than 64 MB; gives the reason.
        OSError: it cannot be read.
    """
    try:
        text = read_regular(path)
    except ValueError as error:
        raise ValueError(f"{error}; https://ui.perfetto.dev shows large traces") from error
    try:
        read = json.loads(text, parse_constant=str)  # NaN as a text, which JSON has
        events, other = read["traceEvents"], read["otherData"]
        lanes, dropped = _lanes(events)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(
            f"{path} is not a trace of Anabranch: {error!r}; https://ui.perfetto.dev shows those of other tools"
        ) from error
    steps = _Steps(lanes)
    texts = _Texts()
    drawn = []
    for lane in lanes:
        spans: list[float] = []
        for event in lane.events:
            numbers = (texts.of(event["name"]), texts.of(event["cat"]))
            spans += [*numbers, round(event["ts"], 3), round(event["dur"], 3), texts.of_facts(event["args"])]
        drawn.append({"process": lane.process, "name": lane.name, "spans": spans})
    numbers_of = {lane.place: number for number, lane in enumerate(lanes)}
    return {
        "lanes": drawn,
        "texts": texts.texts,
        "facts": texts.facts,
        "arrows": _arrows(events, numbers_of),
        "crossings": _crossings(lanes),
        "waits": _waits(lanes, steps),
        "schedules": _schedules(_actions(lanes, steps), draw),
        "notes": _notes(other, dropped),
    }


@dataclass(slots=True)
class _Lane:
    """Spans of one thread, or of one row of overlapping spans; ``place`` is its process and thread in the file."""

    process: str
    name: str
    place: tuple[int, int]
    events: list[Event] = field(default_factory=list)


class _Texts:
    """Texts and facts by number, each once."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._facts: dict[str, int] = {}
        self.texts: list[str] = []
        self.facts: list[Any] = [None]

    def of(self, text: str) -> int:
        number = self._numbers.setdefault(text, len(self.texts))
        if number == len(self.texts):
            self.texts.append(text)
        return number

    def of_facts(self, facts: object) -> int:
        if not facts:
            return 0
        text = json.dumps(facts)
        number = self._facts.setdefault(text, len(self.facts))
        if number == len(self.facts):
            self.facts.append(facts)
        return number


def _lanes(events: Iterable[Event]) -> tuple[list[_Lane], int]:
    """Return the lanes in the order in which viewers show them, and how many spans were too many."""
    named: dict[tuple[str, int, int], Any] = {}
    spans: dict[tuple[int, int], list[Event]] = {}
    count = 0
    for event in events:
        if event["ph"] == "M":
            named[event["name"], event["pid"], event["tid"]] = event["args"]
        elif event["ph"] == "X":
            count += 1
            if count <= _MOST_SPANS:
                event.setdefault("args", {})
                spans.setdefault((event["pid"], event["tid"]), []).append(event)
    lanes: list[_Lane] = []
    for pid, tid in sorted(spans, key=lambda place: (named["process_sort_index", place[0], 0]["sort_index"], place[1])):
        process, thread = named["process_name", pid, 0]["name"], named["thread_name", pid, tid]["name"]
        in_order = sorted(spans[pid, tid], key=lambda event: (event["ts"], -event["dur"]))
        lanes.append(_Lane(process, thread, (pid, tid), in_order))
    return lanes, max(0, count - _MOST_SPANS)


class _Steps:
    """The optimizer step that a process was in at some time."""

    def __init__(self, lanes: Iterable[_Lane]) -> None:
        self._of: dict[str, list[tuple[float, float, int]]] = {}
        for lane in lanes:
            for event in lane.events:
                if event["cat"] == "step":
                    step = event["args"].get("step")
                    if isinstance(step, int):
                        self._of.setdefault(lane.process, []).append((event["ts"], event["ts"] + event["dur"], step))
        for found in self._of.values():
            found.sort()

    def at(self, process: str, time: float) -> int | None:
        """Return the step of ``process``, of the only process that has steps, or ``None``."""
        found = self._of.get(process) or (next(iter(self._of.values())) if len(self._of) == 1 else [])
        place = bisect.bisect_right(found, (time, float("inf"), 0)) - 1
        return found[place][2] if place >= 0 and found[place][1] >= time else None


def _arrows(events: Iterable[Event], lanes: Mapping[tuple[int, int], int]) -> list[list[Any]]:
    """Return for each flow the lane and the time of both its ends."""
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    arrows = []
    for event in events:
        start = starts.get(event["id"]) if event["ph"] == "f" else None
        if start is not None:
            ends = [(lanes.get((end["pid"], end["tid"])), end["ts"]) for end in (start, event)]
            if all(lane is not None for lane, _ in ends):
                arrows.append([value for end in ends for value in end])
    return arrows[:_MOST_SPANS]


def _crossings(lanes: Sequence[_Lane]) -> list[dict[str, Any]]:
    """Return the bytes and messages that each pair of processes has exchanged, by kind."""
    found: dict[tuple[str, str, str], list[float]] = {}
    stages = _processes_of_stages(lanes)
    for lane in lanes:
        for event in lane.events:
            facts = event["args"]
            if event["cat"] != "crossing" or "peer" not in facts or event["name"].startswith("receive "):
                continue  # received messages are recorded by their sender
            here = f"stage {lane.name[len(_STAGE) :]}" if lane.name.startswith(_STAGE) else lane.process
            peers = [stages.get(peer, peer) for peer in _peers(str(facts["peer"]))]
            for peer in peers:
                total = found.setdefault((here, peer, str(event["name"])), [0, 0.0])
                total[0] += 1
                total[1] += sum(facts.get(one, 0) for one in _BYTES) / len(peers)
    return [
        {"from": one, "to": other, "name": name, "count": count, "bytes": round(size)}
        for (one, other, name), (count, size) in found.items()
    ]


def _peers(text: str) -> list[str]:
    """Return the names of a span's peers, ranks as workers.

    >>> _peers("ranks 0, 2"), _peers("unix:/tmp/x/directory"), _peers("expert 0, expert 1")
    (['worker 0', 'worker 2'], ['directory'], ['expert 0', 'expert 1'])
    """
    if text.startswith(("rank ", "ranks ")):
        return [f"worker {rank.strip()}" for rank in text.split(" ", 1)[1].split(",")]
    return [one.rpartition("/")[2] if one.startswith("unix:") else one for one in text.split(", ")]


def _processes_of_stages(lanes: Iterable[_Lane]) -> dict[str, str]:
    """Return the process of each stage that has one of its own: not of those in one process, or in several rows."""
    found: dict[str, set[str]] = {}
    for lane in lanes:
        for event in lane.events:
            facts = event["args"]
            if event["cat"] == "compute" and "stage" in facts:
                found.setdefault(f"stage {facts['stage']}", set()).add(lane.process)
    single = {stage: next(iter(processes)) for stage, processes in found.items() if len(processes) == 1}
    return single if len(set(single.values())) == len(found) else {}


def _waits(lanes: Iterable[_Lane], steps: _Steps) -> list[dict[str, Any]]:
    """Return the longest waits."""
    found = [(event, lane) for lane in lanes for event in lane.events if event["cat"] == "wait"]
    found.sort(key=lambda one: -one[0]["dur"])
    waits = []
    for event, lane in found[:_MOST_WAITS]:
        facts = event["args"]
        waits.append(
            {
                "process": lane.process,
                "peer": ", ".join(_peers(str(facts.get("peer", "")))),
                "operation": in_words(str(facts.get("operation", event["name"]))),
                "step": steps.at(lane.process, event["ts"]),
                "us": round(event["dur"], 1),
                "ts": event["ts"],
            }
        )
    return waits


def _actions(lanes: Iterable[_Lane], steps: _Steps) -> Iterable[Action]:
    """Yield the actions of a pipeline."""
    for lane in lanes:
        for event in lane.events:
            facts = event["args"]
            stage, microbatch = facts.get("stage"), facts.get("microbatch")
            if event["cat"] == "compute" and isinstance(stage, int) and isinstance(microbatch, int):
                step = steps.at(lane.process, event["ts"])
                if step is not None:
                    yield step, stage, microbatch, event["name"], event["ts"], event["dur"]


def _schedules(actions: Iterable[Action], draw: Draw) -> list[dict[str, Any]]:
    """Return the pictures of each step; of one that accumulates several runs, those of its first."""
    steps: dict[int, dict[tuple[int, int, str], tuple[float, float]]] = {}
    for step, stage, microbatch, phase, start, duration in sorted(actions, key=lambda action: action[4]):
        if step in steps or len(steps) < _MOST_STEPS:
            steps.setdefault(step, {}).setdefault((stage, microbatch, phase), (start, start + duration))
    schedules = []
    for step, times in sorted(steps.items()):
        ran: dict[int, list[tuple[int, str, float, float]]] = {}
        first = min(start for start, _ in times.values())
        for (stage, microbatch, phase), (start, end) in times.items():
            ran.setdefault(stage, []).append((microbatch, phase, (start - first) / 1e3, (end - first) / 1e3))
        schedules.append(dict(zip(("step", "planned", "ran"), (step, *draw(ran)), strict=True)))
    return schedules


def _notes(other: Mapping[str, Any], dropped: int) -> list[str]:
    notes = []
    if dropped:
        notes.append(f"the first {_MOST_SPANS:,} spans are shown; {dropped:,} later ones are in the file")
    for name, count in dict(other.get("dropped_spans", {})).items():
        notes.append(f"{name} dropped {count:,} spans for lack of space")
    notes += [
        f"the clock of {one['name']} is accurate to {one['offset_error_us']:.0f} microseconds"
        for one in other.get("processes", ())
        if one.get("offset_error_us")
    ]
    if other.get("complete") is False:
        notes.append("the run ended before all of its steps were recorded")
    return notes
