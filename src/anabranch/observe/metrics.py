"""``/metrics`` for Prometheus: the counts of a server of experts, parameters or names, read on request.

Nothing is counted only for this page: a server keeps its statistics anyway, and the page translates them. It is plain
HTTP and contains only counts; it listens on the loopback by default.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, TypeAlias

from anabranch.experts import DirectoryServer, ExpertServer, PoolStatistics
from anabranch.parameter_server import ParameterServer
from anabranch.record.spans import open_spans
from anabranch.transport import ServerStatistics

__all__ = ["Metric", "directory_metrics", "expert_metrics", "parameter_metrics", "serve_metrics", "waiting_metric"]

Kind: TypeAlias = Literal["counter", "gauge"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One thing that is counted, with a value for each set of labels.

    Attributes:
        name: without the leading ``anabranch_``; a counter's gets ``_total`` behind it.
        kind: a counter only grows, a gauge is what is so now.
        help: what it is.
        labels: the names of the labels.
        values: the labels' values, in order, and the number.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    values: Sequence[tuple[tuple[str, ...], float]] = ()


@contextmanager
def serve_metrics(address: str, collect: Callable[[], Iterable[Metric]]) -> Iterator[str]:
    """Serve the results of ``collect`` at ``http://HOST:PORT/metrics`` while the block runs; yields that address.

    Args:
        address: ``HOST:PORT``, or ``:PORT`` for the loopback; port 0 takes any.
        collect: called for each request.

    Raises:
        ValueError: no such address.
        ModuleNotFoundError: without the ``metrics`` extra.
        OSError: the port is taken.
    """
    host, colon, port = address.rpartition(":")
    if not colon or not port.isascii() or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"metrics are served at HOST:PORT or :PORT, got {address!r}")
    try:
        from prometheus_client import CollectorRegistry, start_http_server
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
        from prometheus_client.core import Metric as Family
        from prometheus_client.registry import Collector
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "metrics need prometheus_client: pip install 'anabranch[metrics]'", name="prometheus_client"
        ) from error

    class Page(Collector):
        def collect(self) -> Iterator[Family]:
            for metric in collect():
                kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
                family = kind(f"anabranch_{metric.name}", metric.help, labels=metric.labels)
                for labels, value in metric.values:
                    family.add_metric(labels, value)
                yield family

    registry = CollectorRegistry()
    registry.register(Page())
    host = host.removeprefix("[").removesuffix("]") or "127.0.0.1"
    server, thread = start_http_server(int(port), addr=host, registry=registry)
    try:
        yield f"http://{host}:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=10.0)


_OF_A_POOL: tuple[tuple[str, Kind, str, Callable[[PoolStatistics], float]], ...] = (
    ("tasks", "counter", "requests queued", lambda pool: pool.tasks),
    ("batches", "counter", "batches run", lambda pool: pool.batches),
    ("rows", "counter", "rows run", lambda pool: pool.rows),
    ("dropped_tasks", "counter", "requests whose caller had stopped waiting", lambda pool: pool.dropped),
    ("declined_tasks", "counter", "requests that found the queue full", lambda pool: pool.declined),
    ("busy_seconds", "counter", "seconds spent running batches", lambda pool: pool.busy_seconds),
    ("queue_tasks", "gauge", "requests in the queue", lambda pool: pool.waiting_tasks),
    ("queue_rows", "gauge", "rows in the queue", lambda pool: pool.waiting_rows),
    ("queue_bytes", "gauge", "bytes in the queue", lambda pool: pool.waiting_bytes),
)


def expert_metrics(server: ExpertServer) -> list[Metric]:
    """Count of an expert server: calls done, and calls waiting."""
    facts = server.statistics()
    metrics = [
        Metric(f"expert_{name}", kind, says, ("pool",), [((pool,), read(made)) for pool, made in facts.pools.items()])
        for name, kind, says, read in _OF_A_POOL
    ]
    updates = [((uid,), float(count)) for uid, count in facts.updates.items()]
    sessions = [((uid,), float(count)) for uid, count in facts.sessions.items()]
    return [
        *_transport_metrics(facts.transport),
        *metrics,
        Metric("expert_updates", "counter", "updates of the expert's parameters", ("uid",), updates),
        Metric("expert_sessions", "gauge", "open inference sessions", ("uid",), sessions),
        Metric("expert_session_bytes", "gauge", "bytes of sessions' caches", (), [((), facts.session_bytes)]),
        _refused_values(facts.not_finite),
    ]


def parameter_metrics(server: ParameterServer) -> list[Metric]:
    """Count of a shard."""
    facts = server.statistics()
    return [
        *_transport_metrics(server.transport_statistics()),
        _refused_values(facts.refused_values),
        Metric("shard_replayed_records", "counter", "records replayed from the log", (), [((), facts.replayed)]),
    ]


def directory_metrics(server: DirectoryServer) -> list[Metric]:
    """Count of a directory's server."""
    return _transport_metrics(server.transport_statistics())


def _transport_metrics(facts: ServerStatistics) -> list[Metric]:
    def one(name: str, kind: Kind, says: str, values: dict[str, int] | int, label: str = "") -> Metric:
        if isinstance(values, int):
            return Metric(name, kind, says, (), [((), values)])
        return Metric(name, kind, says, (label,), [((key,), value) for key, value in sorted(values.items())])

    return [
        one("requests", "counter", "requests taken", facts.requests, "verb"),
        one("errors", "counter", "responses that were errors", facts.errors, "kind"),
        one("refused", "counter", "requests and connections rejected", facts.refused),
        one("received_bytes", "counter", "bytes of tensors received", facts.bytes_received),
        one("sent_bytes", "counter", "bytes of tensors sent", facts.bytes_sent),
        one("connections", "gauge", "open connections", facts.connections),
        one("calls_in_flight", "gauge", "requests being served", facts.calls),
        one("in_flight_bytes", "gauge", "bytes of requests being served", facts.bytes_in_flight),
        waiting_metric(),
    ]


def waiting_metric() -> Metric:
    """Return the waits of this process that have lasted half a second, and how long."""
    longest: dict[tuple[str, ...], float] = {}
    for one in open_spans():
        if one["name"] == "wait":
            longest.setdefault((one["peer"], one["operation"]), time.monotonic() - one["since"])
    return Metric(
        "waiting_seconds", "gauge", "time spent waiting for others", ("peer", "operation"), [*longest.items()]
    )


def _refused_values(by_peer: dict[str, int]) -> Metric:
    values = [((peer,), float(count)) for peer, count in sorted(by_peer.items())]
    return Metric("refused_values", "counter", "requests refused because they held NaN or Inf", ("peer",), values)
