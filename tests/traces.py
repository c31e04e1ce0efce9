"""Traces in tests: read, checked against the format, and looked at by process, thread and name."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Trace", "check_valid"]

Event = dict[str, Any]


@dataclass(frozen=True)
class Trace:
    """The events of a file."""

    events: list[Event]
    other: dict[str, Any]

    def spans(self, name: str | None = None, *, category: str | None = None, process: str | None = None) -> list[Event]:
        """The complete events of this name, category and process, in the order of their starts."""
        found = [event for event in self.events if event["ph"] == "X" and name in (None, event["name"])]
        found = [event for event in found if category in (None, event["cat"])]
        return sorted((e for e in found if process in (None, self.place(e)[0])), key=lambda event: event["ts"])

    @property
    def processes(self) -> list[str]:
        """Their names, in the order in which they are shown."""
        order = {e["pid"]: e["args"]["sort_index"] for e in self.events if e["name"] == "process_sort_index"}
        return [name for _, name in sorted((order[pid], name) for pid, name in self._names("process_name").items())]

    def place(self, event: Event) -> tuple[str, str]:
        """The names of an event's process and thread."""
        threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in self.events if e["name"] == "thread_name"}
        return self._names("process_name")[event["pid"]], threads[event["pid"], event["tid"]]

    @property
    def arrows(self) -> list[tuple[Event, Event]]:
        """Both ends of each flow."""
        ends = {e["id"]: e for e in self.events if e["ph"] == "f"}
        return [(event, ends[event["id"]]) for event in self.events if event["ph"] == "s"]

    def at(self, end: Event) -> list[Event]:
        """The spans around an end of a flow."""
        where = [s for s in self.spans() if (s["pid"], s["tid"]) == (end["pid"], end["tid"])]
        return [span for span in where if span["ts"] <= end["ts"] <= span["ts"] + span["dur"]]

    def _names(self, what: str) -> dict[int, str]:
        return {event["pid"]: event["args"]["name"] for event in self.events if event["name"] == what}


def check_valid(path: Path) -> Trace:
    """Reads a trace; fails where it is not as viewers need it."""
    read = json.loads(path.read_text())
    trace = Trace(read["traceEvents"], read["otherData"])
    for event in trace.events:
        assert event["ph"] in {"X", "M", "s", "f"}
        assert {"name", "ts", "pid", "tid"} <= event.keys(), event
        assert event["ts"] >= 0, event
    by_thread: dict[tuple[int, int], list[Event]] = {}
    for event in trace.spans():
        assert event["dur"] > 0
        assert event["cat"]
        by_thread.setdefault((event["pid"], event["tid"]), []).append(event)
    named = {(event["pid"], event["tid"]) for event in trace.events if event["name"] == "thread_name"}
    assert set(by_thread) == named
    for some in by_thread.values():
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
    """Fails if two spans of a thread overlap and neither lies in the other, by more than what is rounded."""
    open_until: list[float] = []
    for span in sorted(spans, key=lambda event: (event["ts"], -event["dur"])):
        start, end = span["ts"], span["ts"] + span["dur"]
        while open_until and open_until[-1] <= start + 0.002:
            open_until.pop()
        assert not open_until or end <= open_until[-1] + 0.002, span
        open_until.append(end)
