"""``RunTrace``: a trace of the workers during some optimizer steps, as one file for Perfetto.

Each worker keeps its own spans in memory; after the last step rank 0 gathers them. Where workers are on several
machines their clocks are compared over the same connections, before and after.
"""

from __future__ import annotations

import time
import warnings
from pathlib import Path

from anabranch.collectives import Workers
from anabranch.executor.exchange import exchange, together
from anabranch.record import spans
from anabranch.record.process import process_name
from anabranch.record.trace import as_lines, check_trace_path, footer, header, read_part, write_trace

_ROUNDS = 8


class RunTrace:
    """Records from construction to ``finish``; every worker makes one.

    Args:
        path: where rank 0 writes.
        steps: how many optimizer steps to record; ``None``: all until ``finish``.
        first: steps taken before.
        everyone: the workers; ``None`` alone.

    Raises:
        ValueError, TypeError: a number of steps below 1, a path that cannot be written, workers that request different
            numbers; raised on all workers.
    """

    def __init__(self, path: object, steps: object, *, first: int, everyone: Workers | None) -> None:
        self._everyone = everyone
        self._first = first
        self._clock: list[tuple[int, int]] = []

        def check() -> tuple[int | None, Path]:
            writes = everyone is None or everyone.rank == 0
            return _check_steps(steps), check_trace_path(path) if writes else Path()  # type: ignore[arg-type]

        self._steps, self._path = together(everyone, check, "cannot trace", "trace", ValueError)
        if len(set(numbers := exchange(everyone, self._steps, int | None, "trace"))) > 1:  # type: ignore[arg-type]
            raise ValueError(f"all workers must trace the same number of steps; they requested {numbers}")
        self._read_clock()
        self._recorder = spans.SpanRecorder(spans.CAPACITY)
        self._spans: list[spans.Span] = []
        spans.start(self._recorder.add)

    def _read_clock(self) -> None:
        """Bound this clock's distance from the others', see ``offset_between``."""
        for _ in range(_ROUNDS if self._everyone is not None else 0):
            before = time.monotonic_ns()
            exchange(self._everyone, None, type(None), "trace")
            self._clock.append((before, time.monotonic_ns()))

    def over(self, step: int) -> bool:
        """Return True once all steps have been recorded; called after each."""
        self._spans += self._recorder.take()
        return self._steps is not None and step - self._first >= self._steps

    def finish(self, step: int, *, alone: bool = False) -> None:
        """Gather the spans of all workers and write them; every worker calls it, after the same step or at its end.

        ``alone``: write rank 0's only, since the others may be lost.
        """
        spans.stop(self._recorder.add)
        self._spans += self._recorder.take()
        if not alone:
            self._read_clock()
        name = process_name() if self._everyone is None else f"worker {self._everyone.rank}"
        last = {**footer(self._recorder), "clock": self._clock}
        texts = [as_lines([header(self._recorder, name), *self._spans, last])]
        if self._everyone is not None and not alone:
            texts = self._everyone.gather_bytes(texts[0], operation="trace")
        parts = [part for part in map(read_part, texts) if part is not None]
        if not parts or (self._everyone is not None and self._everyone.rank != 0):
            return
        complete = not alone and (self._steps is None or self.over(step))
        try:
            write_trace(self._path, parts, notes={"first_step": self._first, "last_step": step, "complete": complete})
        except OSError as error:
            warnings.warn(f"no trace was written to {self._path}: {error.strerror}", RuntimeWarning, stacklevel=4)


def _check_steps(steps: object) -> int | None:
    if isinstance(steps, bool) or not isinstance(steps, int | None):
        raise TypeError(f"steps is a number of optimizer steps, or None, got {steps!r}")
    if steps is not None and steps < 1:
        raise ValueError(f"steps is a number of optimizer steps, at least 1, got {steps}")
    return steps
