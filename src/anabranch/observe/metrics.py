"""``/metrics`` for Prometheus: the counts of a server of experts, parameters or names, read on request.

Nothing is counted only for this page: a server keeps its statistics anyway, and the page translates them. It is plain
HTTP and contains only counts; it listens on the loopback by default.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal, TypeAlias

from anabranch.experts import DirectoryServer, ExpertServer
from anabranch.parameter_server import ParameterServer
from anabranch.record.spans import open_spans
from anabranch.transport import ServerStatistics

if TYPE_CHECKING:
    from prometheus_client.core import Metric

_Kind: TypeAlias = Literal["counter", "gauge"]
_Values: TypeAlias = float | Mapping[str, float] | Mapping[tuple[str, ...], float]


def family(kind: _Kind, name: str, says: str, values: _Values, *labels: str) -> Metric:
    """Return one thing that is counted, with a value for each set of labels, or one without labels."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    make = CounterMetricFamily if kind == "counter" else GaugeMetricFamily
    made = make(f"anabranch_{name}", says, labels=labels)
    for key, value in values.items() if isinstance(values, Mapping) else [((), values)]:
        made.add_metric([key] if isinstance(key, str) else key, value)
    return made


@contextmanager
def serve_metrics(address: str, collect: Callable[[], Iterable[Metric]]) -> Iterator[str]:
    """Serve the results of ``collect`` at ``http://HOST:PORT/metrics`` while the block runs; yields that address.

    Args:
        address: ``HOST:PORT``, or ``:PORT`` for the loopback; port 0 takes any.
        collect: called for each request; returns families of ``prometheus_client``.

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
        from prometheus_client.registry import Collector
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "metrics need prometheus_client: pip install 'anabranch[metrics]'", name="prometheus_client"
        ) from error

    class Page(Collector):
        def collect(self) -> Iterable[Metric]:
            return collect()

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


_OF_A_POOL: tuple[tuple[str, str, _Kind, str], ...] = (
    ("tasks", "tasks", "counter", "requests queued"),
    ("batches", "batches", "counter", "batches run"),
    ("rows", "rows", "counter", "rows run"),
    ("dropped_tasks", "dropped", "counter", "requests whose caller had stopped waiting"),
    ("declined_tasks", "declined", "counter", "requests that found the queue full"),
    ("busy_seconds", "busy_seconds", "counter", "seconds spent running batches"),
    ("queue_tasks", "waiting_tasks", "gauge", "requests in the queue"),
    ("queue_rows", "waiting_rows", "gauge", "rows in the queue"),
    ("queue_bytes", "waiting_bytes", "gauge", "bytes in the queue"),
)


def expert_metrics(server: ExpertServer) -> Iterator[Metric]:
    """Count of an expert server: calls done, and calls waiting."""
    facts = server.statistics()
    yield from _transport_metrics(facts.transport)
    for name, attribute, kind, says in _OF_A_POOL:
        values = {pool: float(getattr(counts, attribute)) for pool, counts in facts.pools.items()}
        yield family(kind, f"expert_{name}", says, values, "pool")
    yield family("counter", "expert_updates", "updates of the expert's parameters", facts.updates, "uid")
    yield family("gauge", "expert_sessions", "open inference sessions", facts.sessions, "uid")
    yield family("gauge", "expert_session_bytes", "bytes of sessions' caches", facts.session_bytes)
    yield _refused_values(facts.not_finite)


def parameter_metrics(server: ParameterServer) -> Iterator[Metric]:
    """Count of a shard."""
    facts = server.statistics()
    yield from _transport_metrics(server.transport_statistics())
    yield _refused_values(facts.refused_values)
    yield family("counter", "shard_replayed_records", "records replayed from the log", facts.replayed)


def directory_metrics(server: DirectoryServer) -> Iterator[Metric]:
    """Count of a directory's server."""
    return _transport_metrics(server.transport_statistics())


def _transport_metrics(facts: ServerStatistics) -> Iterator[Metric]:
    yield family("counter", "requests", "requests taken", facts.requests, "verb")
    yield family("counter", "errors", "responses that were errors", facts.errors, "kind")
    yield family("counter", "refused", "requests and connections rejected", facts.refused)
    yield family("counter", "received_bytes", "bytes of tensors received", facts.bytes_received)
    yield family("counter", "sent_bytes", "bytes of tensors sent", facts.bytes_sent)
    yield family("gauge", "connections", "open connections", facts.connections)
    yield family("gauge", "calls_in_flight", "requests being served", facts.calls)
    yield family("gauge", "in_flight_bytes", "bytes of requests being served", facts.bytes_in_flight)
    yield waiting_metric()


def waiting_metric() -> Metric:
    """Return the waits of this process that have lasted half a second, and how long."""
    longest: dict[tuple[str, ...], float] = {}
    for one in open_spans():
        if one["name"] == "wait":
            longest.setdefault((one["peer"], one["operation"]), time.monotonic() - one["since"])
    return family("gauge", "waiting_seconds", "time spent waiting for others", longest, "peer", "operation")


def _refused_values(by_peer: Mapping[str, float]) -> Metric:
    return family("counter", "refused_values", "requests refused for NaN, Inf or too large numbers", by_peer, "peer")
