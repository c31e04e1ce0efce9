"""``PrometheusSink``: a run's latest numbers at ``/metrics``, for Prometheus."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING

from anabranch.job import job
from anabranch.observe.metrics import family, serve_metrics, waiting_metric

if TYPE_CHECKING:
    from prometheus_client.core import Metric

_FAMILIES = {
    "loss": ("the loss of the newest optimizer step that was read", "step"),
    "gradient_norm": ("the norm of all gradients before clipping", "step"),
    "learning_rate": ("the learning rate of a parameter group", "step", "group"),
    "steps_per_second": ("optimizer steps a second", "step"),
    "rows_per_second": ("rows a second on this worker", "step"),
    "output": ("a number that the step returned", "step", "name"),
}
"""The help text and the label names of a family."""


class PrometheusSink:
    """Serves the metrics of an ``Executor`` at ``http://127.0.0.1:PORT/metrics``, to this machine alone.

    ::

        sink = ab.observe.PrometheusSink(port=9100)
        executor = ab.Executor(step, sinks=[sink])

    ``anabranch_training_loss``, ``..._gradient_norm``, ``..._learning_rate{group}``, ``..._steps_per_second``,
    ``..._rows_per_second`` and ``..._output{name}`` are the latest, ``anabranch_training_steps_total`` counts
    optimizer steps, those of a loaded checkpoint included, and ``anabranch_training_events_total{event}`` events. The
    label ``step`` is the name of the ``TrainStep``, where there are several.

    Args:
        port: of the loopback; 0 takes any.

    Attributes:
        url: where; ``None`` on workers other than the job's rank 0, which are told nothing and do not listen.

    Raises:
        ModuleNotFoundError: without the ``metrics`` extra.
        OSError: the port is taken.
        ValueError: no such port.
    """

    def __init__(self, port: int = 0) -> None:
        self._lock = threading.Lock()
        self._steps = 0
        self._values: dict[str, float] = {}
        self._events: Counter[str] = Counter()
        self._serving = ExitStack()
        self.url: str | None = None
        if job().rank == 0:
            self.url = self._serving.enter_context(serve_metrics(f":{port}", self._collect))

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Take a step's numbers."""
        with self._lock:
            self._steps = step
            self._values.update(values)

    def event(self, name: str, facts: dict[str, object]) -> None:
        """Count an event."""
        with self._lock:
            self._events[name] += 1

    def close(self) -> None:
        """Stop serving."""
        self._serving.close()

    def _collect(self) -> Iterator[Metric]:
        with self._lock:
            values, events, steps = dict(self._values), dict(self._events), self._steps
        families: dict[str, dict[tuple[str, ...], float]] = {}
        for name, value in values.items():
            place, *labels = _place(name)
            families.setdefault(place, {})[tuple(labels)] = value
        yield family("counter", "training_steps", "optimizer steps taken", steps)
        yield family("counter", "training_events", "checkpoints, lost peers and restarts", events, "event")
        for name, samples in families.items():
            yield family("gauge", f"training_{name}", _FAMILIES[name][0], samples, *_FAMILIES[name][1:])
        yield waiting_metric()


def _place(name: str) -> tuple[str, ...]:
    """Return the family that a number belongs to, and the values of its labels."""
    step, _, short = name.rpartition("/")
    short = {"grad_norm": "gradient_norm"}.get(short, short)
    if short in ("loss", "gradient_norm", "steps_per_second", "rows_per_second"):
        return short, step
    head, _, group = name.rpartition("/") if short.isdecimal() else (name, "", "0")
    step, _, short = head.rpartition("/")
    if short == "learning_rate":
        return short, step, group
    step, _, short = name.partition("/") if "/" in name else ("", "", name)
    return "output", step, short
