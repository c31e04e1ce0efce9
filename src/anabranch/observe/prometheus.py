"""``PrometheusSink``: a run's latest numbers at ``/metrics``, for Prometheus."""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import ExitStack

from anabranch.job import job
from anabranch.observe.metrics import Metric, serve_metrics, waiting_metric

__all__ = ["PrometheusSink"]

_RATE = "learning_rate"
_KNOWN = {
    "loss": Metric("training_loss", "gauge", "the loss of the newest optimizer step that was read", ("step",)),
    "grad_norm": Metric("training_gradient_norm", "gauge", "the norm of all gradients before clipping", ("step",)),
    "steps_per_second": Metric("training_steps_per_second", "gauge", "optimizer steps a second", ("step",)),
    "rows_per_second": Metric("training_rows_per_second", "gauge", "rows a second on this worker", ("step",)),
}


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

    def _collect(self) -> list[Metric]:
        with self._lock:
            values, events, steps = dict(self._values), dict(self._events), self._steps
        families: dict[str, tuple[Metric, list[tuple[tuple[str, ...], float]]]] = {}
        for name, value in values.items():
            metric, labels = _place(name)
            families.setdefault(metric.name, (metric, []))[1].append((labels, value))
        happened = [((name,), float(count)) for name, count in sorted(events.items())]
        return [
            Metric("training_steps", "counter", "optimizer steps taken", (), [((), steps)]),
            Metric("training_events", "counter", "checkpoints, lost peers and restarts", ("event",), happened),
            *(Metric(m.name, m.kind, m.help, m.labels, found) for m, found in families.values()),
            waiting_metric(),
        ]


def _place(name: str) -> tuple[Metric, tuple[str, ...]]:
    """Return the metric that a number belongs to, and the values of its labels."""
    step, _, short = name.rpartition("/")
    if short in _KNOWN:
        return _KNOWN[short], (step,)
    head, _, group = name.rpartition("/") if short.isdecimal() else (name, "", "0")
    step, _, short = head.rpartition("/")
    if short == _RATE:
        return Metric("training_learning_rate", "gauge", "the learning rate of a parameter group", ("step", "group")), (
            step,
            group,
        )
    step, _, short = name.partition("/") if "/" in name else ("", "", name)
    return Metric("training_output", "gauge", "a number that the step returned", ("step", "name")), (step, short)
