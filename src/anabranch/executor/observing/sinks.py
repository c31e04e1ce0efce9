"""``Sink``: a receiver of the metrics of a training run; and ``SinkFeed``, which feeds it without slowing the run.

::

    run: step, {name: tensor}  ──> kept as they are, on their device ──> once a second: read together ──> every sink

Nothing is read from a device in between: a step costs an append. Sinks are ordinary code on the training thread, so
the feed measures what they take of each reading, and keeps steps so far apart that they take ``_SHARE`` of the run.
"""

from __future__ import annotations

import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

_EVERY = 1.0  # seconds between two readings
_MOST = 200  # steps of one reading
_SHARE = 0.003  # of the run's time, for reading and sinks together
_HEAD_START = 0.05  # seconds that they may take before that, so that a short run is reported completely

_Step: TypeAlias = "tuple[int, dict[str, Tensor | float]]"


@runtime_checkable
class Sink(Protocol):
    """A receiver of a run's metrics, given to ``Executor(sinks=[...])``.

    >>> class Printed:
    ...     def scalars(self, step, values):
    ...         print(step, sorted(values))
    ...     def event(self, name, facts):
    ...         print(name, facts)
    ...     def close(self):
    ...         print("closed")
    >>> isinstance(Printed(), Sink)
    True

    All methods are called on the training thread, and only on rank 0 (``close`` on all ranks), unless the sink has a
    true attribute ``every_rank``. A sink that raises is removed with one ``RuntimeWarning``; training continues.
    """

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Receive the metrics of an optimizer step, up to a second after it; steps come in order.

        Args:
            step: the number of optimizer steps taken, from 1.
            values: ``loss``, single numbers returned by the step's function, ``learning_rate`` (with several parameter
                groups ``learning_rate/0``, ...), ``grad_norm`` if the run computed it, and at times
                ``steps_per_second`` and ``rows_per_second``. With several ``TrainStep``s their names are a prefix:
                ``generator/loss``.
        """

    def event(self, name: str, facts: dict[str, object]) -> None:
        """Receive the name of an event of ``Executor.on`` but ``"step"``, with its record's fields as plain values."""

    def close(self) -> None:
        """Close the sink after all events. Called once, when the executor is closed."""


def check_sinks(sinks: Iterable[Sink]) -> tuple[Sink, ...]:
    """Return ``sinks`` as a tuple.

    Raises:
        TypeError: it is not an iterable of sinks.
    """
    every = tuple(sinks) if isinstance(sinks, Iterable) else (None,)
    if any(isinstance(sink, type) or not isinstance(sink, Sink) for sink in every):
        raise TypeError(f"sinks is a list of objects with scalars, event and close, got {sinks!r}")
    return every


class SinkFeed:
    """Feeds steps and events to sinks.

    Args:
        sinks: all that were given.
        rank: this worker's; only sinks that write on it are fed.
        clock: seconds.

    Attributes:
        idle: true without sinks.
    """

    def __init__(self, sinks: Iterable[Sink], rank: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._open = list(sinks)
        self._fed = [sink for sink in self._open if rank == 0 or getattr(sink, "every_rank", False)]
        self.idle = not self._fed
        self._clock = clock
        self._last = self._last_kept = clock()
        self._spent = self._spacing = 0.0  # seconds of reading so far, and between two steps that are kept
        self._pending: list[_Step] = []
        self._rows = 0.0
        self._rated: int | None = None  # the step up to which rates have been reported

    @property
    def due(self) -> bool:
        """True if the next step should be passed to ``step``."""
        if self.idle:
            return False
        now = self._clock()
        return now - self._last >= _EVERY or (len(self._pending) < _MOST and now - self._last_kept >= self._spacing)

    def step(self, step: int, values: dict[str, Tensor | float], rows: float) -> None:
        """Record the metrics of an optimizer step; tensors stay on their devices for now."""
        self._pending.append((step, values))
        self._rows += rows
        self._last_kept = now = self._clock()
        if self._rated is None:
            self._rated = step - 1
        if now - self._last >= _EVERY:
            self.flush()

    def log(self, step: int, values: dict[str, float]) -> None:
        """Pass on numbers that no step reports, after the steps before them."""
        self.flush()
        self._call(lambda sink: sink.scalars(step, dict(values)))

    def event(self, name: str, facts: Mapping[str, object]) -> None:
        """Pass on an event, after the steps before it."""
        self.flush()
        self._call(lambda sink: sink.event(name, dict(facts)))

    def flush(self) -> None:
        """Pass on everything recorded."""
        began = self._clock()
        pending, rows, seconds = self._pending, self._rows, began - self._last
        self._pending, self._rows, self._last = [], 0.0, began
        if not pending or self.idle:
            return
        newest, values = pending[-1]
        if seconds > 0 and self._rated is not None and newest > self._rated:
            rate = (newest - self._rated) / seconds
            values.update(steps_per_second=rate, rows_per_second=rate * rows / len(pending))
        self._rated = newest
        for (step, _), numbers in zip(pending, _read([values for _, values in pending]), strict=True):
            self._call(lambda sink, step=step, numbers=numbers: sink.scalars(step, dict(numbers)))  # type: ignore[misc]
        spent = self._clock() - began
        self._spent += spent
        self._spacing = spent / len(pending) / _SHARE if self._spent > _HEAD_START else 0.0

    def _call(self, call: Callable[[Sink], None]) -> None:
        for sink in tuple(self._fed):
            try:
                call(sink)
            except Exception as error:  # noqa: BLE001 - of the user's or a library's, and no reason to end a training
                self._drop(sink, error)

    def _drop(self, sink: Sink, error: Exception) -> None:
        self._fed.remove(sink)
        self._open.remove(sink)
        self.idle = not self._fed
        with suppress(Exception):
            sink.close()
        _warn(sink, error, "it receives nothing more, and training continues without it")

    def close(self) -> None:
        """Flush and close every sink, including those of other ranks."""
        try:
            self.flush()
        finally:
            sinks, self._open, self._fed, self.idle = self._open, [], [], True
            for sink in sinks:
                try:
                    sink.close()
                except Exception as error:  # noqa: BLE001 - as above
                    _warn(sink, error, "it may have lost some records")


def _warn(sink: Sink, error: Exception, consequence: str) -> None:
    warnings.warn(
        f"the sink {type(sink).__name__} raised {type(error).__name__}: {error}; {consequence}",
        RuntimeWarning,
        stacklevel=3,
    )


def _read(steps: list[dict[str, Tensor | float]]) -> list[dict[str, float]]:
    """Return plain numbers for tensors of one element; each device is waited for once."""
    alike: defaultdict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for value in (value for values in steps for value in values.values()):
        if isinstance(value, Tensor):
            alike[value.device, value.dtype].append(value)
    numbers: dict[Tensor | float, float] = {}
    for tensors in alike.values():
        numbers.update(zip(tensors, torch.stack([tensor.reshape(()) for tensor in tensors]).tolist(), strict=True))
    return [{name: float(numbers.get(value, value)) for name, value in values.items()} for values in steps]
