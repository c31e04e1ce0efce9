"""A trace: what processes recorded of their spans, on one clock, as one file for Perfetto and Chrome.

::

    worker 0.spans ─┐   clocks of other machines set right
    worker 1.spans ─┼─> overlapping spans laid side by side ─> {"traceEvents": [...], "otherData": {...}}
    servers'       ─┘   flows: from the asking to the asked process, from sender to receiver, to the wait's peer

Spans are complete events (``"ph": "X"``). Those on a *track* may overlap, so each is in the first of the track's
lanes that is free. A flow becomes arrows (``"s"`` to ``"f"``) once both ends are known::

    ask / serve      the request from the start of one to that of the other, the answer from end to end
    send / receive   from the start of the sending to the end of the receiving
    meet             from the rank that came last to the end on all others that were still there: they waited for it

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from anabranch.record.spans import Span, SpanRecorder

_FIRST_LANE = 1 << 23  # above every thread's number
_WAIT_COLOUR = "thread_state_iowait"
_ROLES = ("worker", "expert", "parameters", "rendezvous")

ClockReadings = Sequence[tuple[int, int]]
"""Of a number of rounds the clock before this rank gave its part, and after it had all others' parts; nanoseconds."""


@dataclass(slots=True)
class ProcessTrace:
    """Spans of one process.

    Attributes:
        process: its name.
        pid: its number.
        host: equal for processes that read one clock.
        began: the clock when its recording began, nanoseconds.
        spans: in the order of their ends, for each thread.
        threads: the kernel's number and the name of threads that were still there, by the number in ``spans``.
        dropped: spans that were too many.
        clock: readings to compare its clock with others'.
    """

    process: str
    pid: int
    host: str
    began: int
    spans: list[Span] = field(default_factory=list)
    threads: dict[int, tuple[int, str]] = field(default_factory=dict)
    dropped: int = 0
    clock: ClockReadings = ()


@dataclass(frozen=True, slots=True)
class TraceSummary:
    """Counts of the written spans.

    Attributes:
        spans: how many.
        processes: of how many processes.
        dropped: how many more there were.
    """

    spans: int
    processes: int
    dropped: int


def check_trace_path(path: str | os.PathLike[str]) -> Path:
    """Return the path of a trace to be written, absolute.

    Raises:
        TypeError: it is not a path.
        ValueError: no file can be written there; gives the reason.
    """
    target = Path(path).absolute()
    if target.is_dir() or str(path).endswith("/") or not os.access(target.parent, os.W_OK | os.X_OK):
        raise ValueError(
            f"no trace can be written to {str(path)!r}; name a file, such as out.json, in a folder that exists and is "
            "writable"
        )
    return target


def host() -> str:
    """Return what processes have in common that read one clock: the machine since it was started, and its namespace."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/time')}"
    return "unknown"


def header(recorder: SpanRecorder, name: str) -> dict[str, object]:
    """Return the first line of a process's spans."""
    return {"process": name, "pid": os.getpid(), "host": host(), "began": recorder.began}


def footer(recorder: SpanRecorder) -> dict[str, object]:
    """Return a line that follows spans: the threads they are of, and how many are missing."""
    return {"threads": recorder.threads, "dropped": recorder.dropped}


def as_lines(items: Iterable[object]) -> bytes:
    """Return each item as a line of JSON; values that are not plain become their text."""
    import msgspec  # here: the launcher does without

    encode = msgspec.json.Encoder(enc_hook=str).encode
    return b"".join(encode(item) + b"\n" for item in items)


def read_part(lines: bytes) -> ProcessTrace | None:
    """Return what ``as_lines`` wrote; ``None`` if there is nothing. A last line cut short is left out."""
    import msgspec

    span = msgspec.json.Decoder(Span)
    part: ProcessTrace | None = None
    for line in lines.split(b"\n"):
        with suppress(msgspec.DecodeError):
            if line.startswith(b"["):
                one = span.decode(line)
                if part is not None:
                    part.spans.append(one)
            elif line:
                facts = msgspec.json.decode(line)
                if part is None:
                    part = ProcessTrace(facts["process"], facts["pid"], facts["host"], facts["began"])
                part.threads |= {int(key): (number, name) for key, (number, name) in facts.get("threads", {}).items()}
                part.dropped = facts.get("dropped", part.dropped)
                part.clock = [(before, after) for before, after in facts.get("clock", part.clock)]
    return part


def offset_between(here: ClockReadings, there: ClockReadings) -> tuple[int, int]:
    """Return what to add to a clock ``there`` to have the clock ``here``, and by how much that may be wrong.

    In each round both took a reading, exchanged something, and took another: neither had the other's part before the
    other had taken its first reading. So every round bounds the offset from both sides, however its ways differ.

    >>> offset_between([(100, 130)], [(1105, 1125)])
    (-1000, 25)

    >>> offset_between([(100, 130), (200, 210)], [(1105, 1125), (1202, 1209)])
    (-1001, 9)
    """
    low = max(ours[0] - theirs[1] for ours, theirs in zip(here, there, strict=True))
    high = min(ours[1] - theirs[0] for ours, theirs in zip(here, there, strict=True))
    return (low + high) // 2, (high - low + 1) // 2


def write_trace(
    path: Path,
    parts: Iterable[ProcessTrace],
    *,
    names: Mapping[str, str] | None = None,
    notes: Mapping[str, object] | None = None,
) -> TraceSummary:
    """Write a trace, replacing an existing file once it is whole.

    Args:
        path: where.
        parts: what processes recorded; the clock of the first is everyone's.
        names: names of the peers of crossings and waits, by their endpoints.
        notes: further facts for the file's ``otherData``.

    Raises:
        OSError: a full disk, a folder that was removed.
    """
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with new.open("w") as file:
            summary = _Writer(file, names or {}).write(sorted(parts, key=_order), notes or {})
        os.replace(new, path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    return summary


def _order(part: ProcessTrace) -> tuple[int, str, int, int]:
    role, _, rank = part.process.partition(" ")
    place = _ROLES.index(role) if role in _ROLES else len(_ROLES)
    return place, role, int(rank) if rank.isdecimal() else 0, part.began


@dataclass(frozen=True, slots=True)
class _End:
    """One end of a flow: where its span is in the file, and whether it is one that failed; times in nanoseconds."""

    pid: int
    tid: int
    start: int
    end: int
    failed: bool = False


class _Writer:
    """Writes the events of one file."""

    def __init__(self, file: IO[str], names: Mapping[str, str]) -> None:
        self._file = file
        self._names = names
        self._separator = "\n"
        self._flows: dict[str, dict[str, list[_End]]] = {}
        self._base = 0

    def write(self, parts: Sequence[ProcessTrace], notes: Mapping[str, object]) -> TraceSummary:
        offsets = [
            (0, 0)
            if part.host == parts[0].host or not parts[0].clock or len(parts[0].clock) != len(part.clock)
            else offset_between(parts[0].clock, part.clock)
            for part in parts
        ]
        self._base = min((part.began + offset for part, (offset, _) in zip(parts, offsets, strict=True)), default=0)
        self._file.write('{"displayTimeUnit":"ms","traceEvents":[')
        pids: set[int] = set()
        for index, (part, (offset, _)) in enumerate(zip(parts, offsets, strict=True)):
            pid = part.pid
            while pid in pids:  # of another machine
                pid += 1 << 22
            pids.add(pid)
            self._put_part(part, pid, index, offset)
        for number, (source, target) in enumerate(self._arrows()):
            self._put_arrow(number, source, target)
        dropped = {part.process: part.dropped for part in parts if part.dropped}
        other = {
            "processes": [
                {"name": part.process, "pid": part.pid, "offset_us": offset / 1e3, "offset_error_us": error / 1e3}
                for part, (offset, error) in zip(parts, offsets, strict=True)
            ],
            "dropped_spans": dropped,
            **notes,
        }
        self._file.write(f'\n],"otherData":{json.dumps(other)}}}\n')
        return TraceSummary(sum(len(part.spans) for part in parts), len(parts), sum(dropped.values()))

    def _put(self, event: Mapping[str, object]) -> None:
        self._file.write(self._separator + json.dumps(event, separators=(",", ":")))
        self._separator = ",\n"

    def _name(self, what: str, pid: int, tid: int, **facts: object) -> None:
        self._put({"ph": "M", "ts": 0, "name": what, "pid": pid, "tid": tid, "args": facts})

    def _put_part(self, part: ProcessTrace, pid: int, index: int, offset: int) -> None:
        self._name("process_name", pid, 0, name=part.process)
        self._name("process_sort_index", pid, 0, sort_index=index)
        lanes = _Lanes(part.threads)
        used: set[int] = set()
        for one in sorted(part.spans, key=lambda one: (one[3], -one[4])):
            name, category, track, start, end, thread, facts, flow = one
            tid = lanes.of(track, start, end) if track else lanes.of_thread(thread)
            if tid not in used:
                used.add(tid)
                self._name("thread_name", pid, tid, name=lanes.name(tid))
                self._name("thread_sort_index", pid, tid, sort_index=tid)
            place = _End(pid, tid, start + offset, max(end, start + 1) + offset, bool(facts and "error" in facts))
            begin, duration = (place.start - self._base) / 1e3, (place.end - place.start) / 1e3
            event = {"ph": "X", "name": name, "cat": category, "ts": begin, "dur": duration, "pid": pid, "tid": tid}
            more = {"cname": _WAIT_COLOUR} if category == "wait" else {}
            self._put({**event, **more, **({"args": self._called(facts)} if facts else {})})
            if flow is not None:
                self._flows.setdefault(flow[1], {}).setdefault(flow[0], []).append(place)

    def _called(self, facts: dict[str, object]) -> dict[str, object]:
        peer = facts.get("peer")
        called = ", ".join(self._names.get(one, one) for one in peer.split(", ")) if isinstance(peer, str) else peer
        return facts if called == peer else {**facts, "peer": called, "endpoint": peer}

    def _arrows(self) -> Iterator[tuple[tuple[_End, int], tuple[_End, int]]]:
        """Both ends of each arrow, with its time there."""
        for ends in self._flows.values():
            for asks, serves in zip(ends.get("ask", ()), ends.get("serve", ())[-1:], strict=False):
                yield (asks, asks.start), (serves, serves.start)
                if not asks.failed:  # else the client was gone before the answer arrived
                    yield (serves, serves.end - 1), (asks, asks.end - 1)
            for sends, receives in zip(ends.get("send", ()), ends.get("receive", ()), strict=False):
                yield (sends, sends.start), (receives, receives.end - 1)
            meet = sorted(ends.get("meet", ()), key=lambda end: end.start)
            for other in meet[:-1]:
                if meet[-1].start < other.end:  # else it waited for nobody: the first rank of a broadcast
                    yield (meet[-1], meet[-1].start), (other, other.end - 1)

    def _put_arrow(self, number: int, source: tuple[_End, int], target: tuple[_End, int]) -> None:
        common = {"name": "flow", "cat": "flow", "id": number}
        for (end, clock), more in ((source, {"ph": "s"}), (target, {"ph": "f", "bp": "e"})):
            self._put({**common, **more, "ts": (clock - self._base) / 1e3, "pid": end.pid, "tid": end.tid})


class _Lanes:
    """Lays overlapping spans of a track side by side; they come in the order of their starts.

    Args:
        threads: number and name of threads, which have a lane each.
    """

    def __init__(self, threads: Mapping[int, tuple[int, str]]) -> None:
        self._ends: dict[str, list[tuple[int, int]]] = {}
        self._numbers = {thread: number for thread, (number, _) in threads.items()}
        self._names = dict(threads.values())
        self._next = _FIRST_LANE

    def _new(self, name: str) -> int:
        self._next += 1
        self._names[self._next] = name
        return self._next

    def of_thread(self, thread: int) -> int:
        """Return the number of a thread's lane; ``thread`` may be the kernel's number."""
        if thread not in self._numbers:
            self._numbers[thread] = thread if thread in self._names else self._new("a thread that has ended")
        return self._numbers[thread]

    def of(self, track: str, start: int, end: int) -> int:
        """Return the number of the first lane that is free."""
        lanes = self._ends.setdefault(track, [])
        for index, (number, busy_until) in enumerate(lanes):
            if busy_until <= start:
                lanes[index] = number, end
                return number
        number = self._new(track if not lanes else f"{track} {len(lanes) + 1}")
        lanes.append((number, end))
        return number

    def name(self, number: int) -> str:
        """Return the name of a lane."""
        return self._names[number]
