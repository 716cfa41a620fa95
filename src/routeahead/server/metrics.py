"""Metrics for Prometheus: the stream's totals, and what requests came."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from routeahead.server.live import Snapshot

Latest = Callable[[], Snapshot]
Load = Callable[[], tuple[int, int]]  # jobs that run, jobs that wait

# Field of `Totals` → name and meaning (telemetry/counters.py defines them).
_TOTALS = {
    "tokens": ("tokens", "Rows evaluated."),
    "wall_s": ("evaluation_seconds", "Time inside llama_decode."),
    "compute_s": ("compute_seconds", "The part of it that computed."),
    "stall_s": ("stall_seconds", "The part of it that waited for bytes."),
    "mgmt_s": ("management_seconds", "The part of it that kept the books."),
    "bytes_read": ("read_bytes", "Bytes of experts read from disk."),
    "reads": ("reads", "Reads of experts."),
    "hits": ("expert_hits", "Experts that were in memory."),
    "misses": ("expert_misses", "Experts that had to be read."),
    "drafted": ("drafted_tokens", "Rows that were guesses."),
    "accepted": ("accepted_tokens", "Guesses that were right."),
}
_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 900)


class Metrics:
    """One server's metrics."""

    def __init__(self, snapshot: Latest, load: Load) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Stream(snapshot, load))
        self._requests = Counter(
            "routeahead_requests", "Requests.", ["path", "status"], registry=self._registry
        )
        self._latency = Histogram(
            "routeahead_request_seconds",
            "Time until a response had ended.",
            ["path"],
            buckets=_SECONDS,
            registry=self._registry,
        )

    def count(self, path: str, status: int, seconds: float) -> None:
        """Counts a response; `path` is a route's, so that their number is bounded."""
        self._requests.labels(path, str(status)).inc()
        self._latency.labels(path).observe(seconds)

    def text(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self._registry)


class _Stream(Collector):
    """Reads the latest snapshot when it is asked."""

    def __init__(self, snapshot: Latest, load: Load) -> None:
        self._snapshot, self._load = snapshot, load

    def collect(self) -> Iterator[Metric]:
        latest = self._snapshot()
        for field, (name, meaning) in _TOTALS.items():
            family = CounterMetricFamily(f"routeahead_{name}", meaning, labels=["phase"])
            family.add_metric(["prefill"], getattr(latest.prefill, field))
            family.add_metric(["decode"], getattr(latest.decode, field))
            if field == "bytes_read":
                family.add_metric(["idle"], latest.idle_bytes)
            yield family
        for name, value in latest.cache.items():
            unit = "_bytes" if name in ("used", "budget") else ""
            yield GaugeMetricFamily(
                f"routeahead_cache_{name}{unit}", f"Cache: {name}.", value=value
            )
        running, waiting = self._load()
        yield GaugeMetricFamily("routeahead_running", "Requests being answered.", value=running)
        yield GaugeMetricFamily("routeahead_waiting", "Requests in the queue.", value=waiting)
