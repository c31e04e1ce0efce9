"""``RunTrace``: a trace of the workers during some optimizer steps, as one file for Perfetto.

Each worker keeps its own spans in memory; after the last step rank 0 gathers them. Where workers are on several
machines their clocks are compared over the same connections, before and after.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile, record_function

from anabranch.collectives import Workers
from anabranch.record import spans
from anabranch.record.process import process_name
from anabranch.record.trace import as_lines, check_trace_path, footer, header, read_part, write_trace

_ROUNDS = 8
_MARK = "anabranch clock"


class RunTrace:
    """Records from construction to ``finish`` or ``give_up``; every worker makes one.

    Args:
        path: where rank 0 writes.
        steps: how many optimizer steps to record; ``None``: all until ``finish``.
        operators: record PyTorch's operators of this thread, too.
        first: steps taken before.
        everyone: the workers; ``None`` alone.

    Raises:
        ValueError, TypeError: a number of steps below 1, a path that cannot be written, workers that request different
            numbers; raised on all workers.
        RuntimeError: a profiler of PyTorch's runs already.
    """

    def __init__(self, path: object, steps: object, *, operators: bool, first: int, everyone: Workers | None) -> None:
        self._everyone = everyone
        self._first = first
        self._profile: profile | None = None
        self._clock: list[tuple[int, int]] = []
        try:
            self._steps = _check_steps(steps)
            self._path = check_trace_path(path) if everyone is None or everyone.rank == 0 else Path()  # type: ignore[arg-type]
            if operators:
                self._profile = _begin_profile()
        except (TypeError, ValueError, RuntimeError) as error:
            self._agree(str(error), steps)
            raise
        self._agree("", steps)
        self._read_clock()
        self._marks = [] if self._profile is None else [_mark() for _ in range(_ROUNDS)]
        self._recorder = spans.SpanRecorder(spans.CAPACITY)
        self._spans: list[spans.Span] = []
        spans.start(self._recorder.add)

    def _agree(self, refused: str, steps: object) -> None:
        if self._everyone is None:
            return
        answers = [text.decode().partition("\n") for text in self._gather(f"{steps!r}\n{refused}".encode())]
        refusals = [(rank, why) for rank, (_, _, why) in enumerate(answers) if why]
        numbers = [number for number, _, _ in answers]
        if refused or (not refusals and len(set(numbers)) == 1):
            return
        self._end_profile()
        if refusals:
            raise ValueError("trace was refused on rank {}: {}".format(*refusals[0]))
        raise ValueError(f"all workers must trace the same number of steps; they requested {numbers}")

    def _gather(self, data: bytes) -> list[bytes]:
        assert self._everyone is not None
        return self._everyone.all_gather_bytes(data, operation="trace")

    def _read_clock(self) -> None:
        """Bound this clock's distance from the others', see ``offset_between``."""
        for _ in range(_ROUNDS if self._everyone is not None else 0):
            before = time.monotonic_ns()
            self._gather(b"")
            self._clock.append((before, time.monotonic_ns()))

    def over(self, step: int) -> bool:
        """Return True once all steps have been recorded; called after each."""
        self._spans += self._recorder.take()
        return self._steps is not None and step - self._first >= self._steps

    def finish(self, step: int) -> None:
        """Gather the spans of all workers and write them; every worker calls it, after the same step or at its end."""
        part = self._part()
        everyone = self._everyone
        parts = [part] if everyone is None else everyone.gather_bytes(part, operation="trace")
        self._write(parts, step, complete=self._steps is None or self.over(step))

    def give_up(self, step: int) -> None:
        """Write this worker's spans if it is rank 0: the others may be lost."""
        part = self._part(alone=True)
        if self._everyone is None or self._everyone.rank == 0:
            self._write([part], step, complete=False)

    def _part(self, *, alone: bool = False) -> bytes:
        spans.stop(self._recorder.add)
        self._spans += self._recorder.take()
        operators = self._operators()
        if not alone:
            self._read_clock()
        name = process_name() if self._everyone is None else f"worker {self._everyone.rank}"
        last = {**footer(self._recorder), "clock": self._clock}
        return as_lines([header(self._recorder, name), *self._spans, *operators, last])

    def _write(self, texts: list[bytes], step: int, *, complete: bool) -> None:
        parts = [part for part in map(read_part, texts) if part is not None]
        if not parts:
            return
        try:
            write_trace(self._path, parts, notes={"first_step": self._first, "last_step": step, "complete": complete})
        except OSError as error:
            warnings.warn(f"no trace was written to {self._path}: {error.strerror}", RuntimeWarning, stacklevel=4)

    # PyTorch's operators.

    def _end_profile(self) -> list[FunctionEvent]:
        running, self._profile = self._profile, None
        if running is None:
            return []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the profiler warns about events that it cannot record
            running.stop()
            return list(running.events() or ())  # type: ignore[no-untyped-call]

    def _operators(self) -> list[spans.Span]:
        operators = [one for one in _as_spans(self._end_profile(), self._marks) if one[3] >= self._recorder.began]
        self._recorder.dropped += max(0, len(operators) - spans.CAPACITY)
        return operators[: spans.CAPACITY]


def _check_steps(steps: object) -> int | None:
    if isinstance(steps, bool) or not isinstance(steps, int | None):
        raise TypeError(f"steps is a number of optimizer steps, or None, got {steps!r}")
    if steps is not None and steps < 1:
        raise ValueError(f"steps is a number of optimizer steps, at least 1, got {steps}")
    return steps


def _begin_profile() -> profile:
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])
    running = profile(activities=activities)
    running.start()
    return running


def _mark() -> tuple[int, int]:
    """Leave a mark in the profile; return the clock before and after it."""
    before = time.monotonic_ns()
    with record_function(_MARK):
        pass
    return before, time.monotonic_ns()


def _as_spans(events: list[FunctionEvent], marks: list[tuple[int, int]]) -> Iterator[spans.Span]:
    """Yield a profile's events on our clock: each mark lies between the two readings that were taken around it."""
    times = [(event, int(event.time_range.start * 1e3), int(event.time_range.end * 1e3)) for event in events]
    seen = sorted((start, end) for event, start, end in times if event.name == _MARK)
    if not seen or len(seen) != len(marks):
        return
    low = max(before - start for (before, _), (start, _) in zip(marks, seen, strict=True))
    high = min(after - end for (_, after), (_, end) in zip(marks, seen, strict=True))
    offset = (low + high) // 2
    for event, start, end in times:
        if event.name != _MARK:
            thread = event.device_resource_id
            yield event.name, "operator", _track(event), start + offset, end + offset, thread, None, None


def _track(event: FunctionEvent) -> str:
    # Not among the spans of its thread: the offset is known to a few microseconds only, and viewers draw spans that
    # overlap without nesting in the wrong place.
    if event.device_type.name == "CPU":
        return "operators in the background" if event.is_async else "operators"
    return f"{event.device_type.name.lower()}:{event.device_index} stream {event.device_resource_id}"
