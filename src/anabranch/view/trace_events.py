"""The events of a trace file in Chrome's format, whichever tool wrote it, in the one form that ``trace_page`` reads.

Spans have a finite time, a duration of at least 0 and facts by name; a beginning and its end are one span. What has no
time is left out and counted.
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from anabranch.record.process import read_regular

Event: TypeAlias = dict[str, Any]

_PACKED = b"\x1f\x8b"


@dataclass(slots=True)
class TraceFile:
    """The contents of a file.

    Attributes:
        events: spans (``"ph": "X"``), names (``"M"``) and the ends of arrows (``"s"`` and ``"f"``).
        other: ``otherData``.
        skipped: how many spans and ends of arrows have no time.
    """

    events: list[Event]
    other: Mapping[str, Any] = field(default_factory=dict)
    skipped: int = 0


def is_packed(start: bytes) -> bool:
    """Return True if a file with this beginning is compressed by gzip, as traces of ``torch.profiler`` may be."""
    return start.startswith(_PACKED)


def read_events(path: Path) -> TraceFile:
    """Return the events of a file.

    Raises:
        ValueError: it is not a trace; gives the reason.
        OSError: it cannot be read.
    """
    try:
        return _read(path)
    except RecursionError:
        reason = "it is nested too deeply"
    except KeyError as error:
        reason = f"there is no {error}"
    except (ValueError, TypeError, AttributeError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        reason = str(error)
    raise ValueError(f"{path} is not a trace in Chrome's format: {reason}")


def _read(path: Path) -> TraceFile:
    raw = read_regular(path)
    text = (gzip.decompress(raw) if is_packed(raw) else raw).decode()
    if not text.strip():
        raise ValueError("it is empty")
    read = json.loads(text)
    file = _cleaned(read if isinstance(read, list) else read["traceEvents"])
    if isinstance(read, dict) and isinstance(read.get("otherData"), dict):
        file.other = read["otherData"]
    return file


def _cleaned(events: Iterable[Mapping[str, Any]]) -> TraceFile:
    found = TraceFile([])
    open_spans: dict[tuple[Any, Any], list[Event]] = {}
    spans = 0
    for event in events:
        kind = event.get("ph")
        if kind == "M":
            if isinstance(event.get("args"), dict):
                found.events.append({"tid": 0, "pid": 0, "name": "", **event})
        elif kind in ("X", "B", "E", "s", "f"):
            timed = _timed(event)
            if timed is None:
                found.skipped += 1
            elif kind in ("X", "s", "f"):
                spans += kind == "X"
                found.events.append(timed)
            else:
                spans += 1
                _pair(timed, open_spans, found.events)
    if found.skipped and not spans:
        raise ValueError("none of its spans has a time ('ts')")
    return found


def _timed(event: Mapping[str, Any]) -> Event | None:
    time, length, facts = event.get("ts"), event.get("dur", 0), event.get("args")
    if not _is_finite(time):
        return None
    return {
        **event,
        "name": str(event.get("name", "")),
        "cat": str(event.get("cat", "")),
        "pid": event.get("pid", 0),
        "tid": event.get("tid", 0),
        "dur": max(0, length) if _is_finite(length) else 0,
        "args": facts if isinstance(facts, dict) else {},
    }


def _is_finite(number: object) -> bool:
    return isinstance(number, int | float) and not isinstance(number, bool) and math.isfinite(number)


def _pair(event: Event, begun: dict[tuple[Any, Any], list[Event]], events: list[Event]) -> None:
    """Add the span that ends with ``event``; its beginning was the latest of its thread."""
    thread = begun.setdefault((event["pid"], event["tid"]), [])
    if event["ph"] == "B":
        thread.append(event)
    elif thread:
        begin = thread.pop()
        facts = {**begin["args"], **event["args"]}
        events.append({**begin, "ph": "X", "dur": max(0, event["ts"] - begin["ts"]), "args": facts})
