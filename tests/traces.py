"""Traces in tests: read, checked against the format, and queried by process, thread and name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Event = dict[str, Any]


class Trace:
    """The events of a file.

    Attributes:
        other: what it says beside them.
        processes: their names, in the order in which they are shown.
        arrows: both ends of each flow.
    """

    def __init__(self, events: list[Event], other: dict[str, Any]) -> None:
        self.events = events
        self.other = other
        named = {what: [e for e in events if e["name"] == what] for what in ("process_name", "thread_name")}
        self._processes = {e["pid"]: e["args"]["name"] for e in named["process_name"]}
        self._threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in named["thread_name"]}
        order = {e["pid"]: e["args"]["sort_index"] for e in events if e["name"] == "process_sort_index"}
        self.processes = [self._processes[pid] for pid in sorted(self._processes, key=order.__getitem__)]
        self._spans: dict[tuple[int, int], list[Event]] = {}
        for event in sorted((e for e in events if e["ph"] == "X"), key=lambda e: (e["ts"], -e["dur"])):
            self._spans.setdefault((event["pid"], event["tid"]), []).append(event)
        ends = {e["id"]: e for e in events if e["ph"] == "f"}
        self.arrows = [(e, ends[e["id"]]) for e in events if e["ph"] == "s"]

    @property
    def threads(self) -> dict[tuple[int, int], list[Event]]:
        """The spans of each thread and lane, in the order of their starts."""
        return self._spans

    def spans(self, name: str | None = None, *, category: str | None = None, process: str | None = None) -> list[Event]:
        """The spans of this name, category and process, in the order of their starts."""
        found = [
            event
            for (pid, _), spans in self._spans.items()
            for event in spans
            if process in (None, self._processes[pid])
            and name in (None, event["name"])
            and category in (None, event["cat"])
        ]
        return sorted(found, key=lambda event: event["ts"])

    def place(self, event: Event) -> tuple[str, str]:
        """The names of an event's process and thread."""
        return self._processes[event["pid"]], self._threads[event["pid"], event["tid"]]

    def at(self, end: Event) -> list[Event]:
        """The spans around an end of a flow, the outermost first."""
        spans = self._spans[end["pid"], end["tid"]]
        return [span for span in spans if span["ts"] <= end["ts"] <= span["ts"] + span["dur"]]


def check_valid(path: Path) -> Trace:
    """Read a trace; fails if viewers could not show it."""
    read = json.loads(path.read_text())
    trace = Trace(read["traceEvents"], read["otherData"])
    for event in trace.events:
        assert event["ph"] in {"X", "M", "s", "f"}
        assert {"name", "ts", "pid", "tid"} <= event.keys(), event
        assert event["ts"] >= 0, event
    named = {(event["pid"], event["tid"]) for event in trace.events if event["name"] == "thread_name"}
    assert trace.threads.keys() == named
    for some in trace.threads.values():
        assert all(event["dur"] > 0 and event["cat"] for event in some)
        _check_nested(some)
    starts = [event["id"] for event in trace.events if event["ph"] == "s"]
    assert sorted(starts) == sorted(event["id"] for event in trace.events if event["ph"] == "f")
    assert len(set(starts)) == len(starts)
    for source, target in trace.arrows:
        assert source["ts"] <= target["ts"]
        assert trace.at(source)
        assert trace.at(target)
    return trace


def _check_nested(spans: list[Event]) -> None:
    """Fail if two spans of a thread overlap without nesting, by more than the rounding."""
    open_until: list[float] = []
    for span in spans:
        start, end = span["ts"], span["ts"] + span["dur"]
        while open_until and open_until[-1] <= start + 0.002:
            open_until.pop()
        assert not open_until or end <= open_until[-1] + 0.002, span
        open_until.append(end)
