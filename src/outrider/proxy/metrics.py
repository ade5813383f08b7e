"""Prometheus metrics of a proxy: requests, hand-offs, and what each worker did."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from outrider.proxy.workers import State, Worker, Workers
from outrider.server.observe.metrics import FIRST_TOKEN_S

PREFIX = "outrider:proxy_"
WORKER_LABELS = ("role", "worker")


class ProxyMetrics:
    def __init__(self, workers: Workers) -> None:
        disable_created_metrics()
        self._registry = registry = CollectorRegistry()
        self._http = Counter(
            f"{PREFIX}http_requests",
            "Requests of clients, by route and status.",
            ("handler", "status"),
            registry=registry,
        )
        self._answers = Counter(
            f"{PREFIX}worker_answers",
            "Answers of workers, by status.",
            (*WORKER_LABELS, "status"),
            registry=registry,
        )
        self._failures = Counter(
            f"{PREFIX}worker_failures",
            "Requests that a worker did not serve; another worker was asked where there was one.",
            WORKER_LABELS,
            registry=registry,
        )
        self._hand_offs = Counter(
            f"{PREFIX}hand_offs",
            "Generating requests by what came of the hand-off: handed_over, without_kv (the prefill worker holds too "
            "much for others), no_prefill_worker, refused, skipped_….",
            ("outcome",),
            registry=registry,
        )
        self._lost = Counter(
            f"{PREFIX}streams_lost", "Streams that ended with an error, since their worker was lost.", registry=registry
        )
        self._prompt_s = Histogram(
            f"{PREFIX}prompt_seconds",
            "Time that prefill workers took to answer.",
            buckets=FIRST_TOKEN_S,
            registry=registry,
        )
        self._first_event_s = Histogram(
            f"{PREFIX}first_event_seconds",
            "Time that decode workers took to begin a stream.",
            buckets=FIRST_TOKEN_S,
            registry=registry,
        )
        registry.register(_WorkersCollector(workers))
        ProcessCollector(registry=registry)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def count_http(self, handler: str, status: int) -> None:
        self._http.labels(handler, str(status)).inc()

    def answered(self, worker: Worker, status: int) -> None:
        self._answers.labels(worker.role.value, worker.url, str(status)).inc()

    def failed(self, worker: Worker) -> None:
        self._failures.labels(worker.role.value, worker.url).inc()

    def hand_off(self, outcome: str) -> None:
        self._hand_offs.labels(outcome).inc()

    def stream_lost(self) -> None:
        self._lost.inc()

    def prompt_took(self, seconds: float) -> None:
        self._prompt_s.observe(seconds)

    def stream_began(self, seconds: float) -> None:
        self._first_event_s.observe(seconds)


class _WorkersCollector(Collector):
    """The state of each worker, read at each scrape."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        ready = GaugeMetricFamily(f"{PREFIX}worker_ready", "Whether a worker serves: 1 or 0.", labels=WORKER_LABELS)
        busy = GaugeMetricFamily(
            f"{PREFIX}worker_requests", "Open requests that this proxy has sent to a worker.", labels=WORKER_LABELS
        )
        for worker in self._workers.all:
            labels = [worker.role.value, worker.url]
            ready.add_metric(labels, float(worker.state is State.READY))
            busy.add_metric(labels, worker.num_requests)
        yield ready
        yield busy
