"""Prometheus metrics under the names that vLLM's dashboards and tools look for, behind a prefix."""

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
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from outrider.server.messages import Counters, Delta, Ending
from outrider.server.observe.figures import Figures

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
ENGINE = "0"

FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
GAPS_S = (0.002, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
REQUESTS_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)

COUNTERS = {
    "spec_decode_num_drafts": ("drafts", "Steps that verified drafts, over all requests."),
    "spec_decode_num_draft_tokens": ("draft_tokens", "Draft tokens that were verified."),
    "spec_decode_num_accepted_tokens": ("accepted_tokens", "Draft tokens that were accepted."),
    "prefix_cache_queries": ("queried_tokens", "Prompt tokens that were looked up in the prefix cache."),
    "prefix_cache_hits": ("hit_tokens", "Prompt tokens that the prefix cache had."),
    "external_prefix_cache_queries": ("external_queried_tokens", "The same, of tiers outside the device."),
    "external_prefix_cache_hits": ("external_hit_tokens", "The same, of tiers outside the device."),
    "num_preemptions": ("preemptions", "Requests that gave up their KV to others and were computed again."),
    "prompt_tokens": ("prompt_tokens", "Prompt tokens of requests that were taken."),
    "generation_tokens": ("generated_tokens", "Tokens generated."),
    "spec_decode_num_dropped": ("dropped_drafts", "Times that a request gave up drafting for lack of pages."),
    "sanitizer_violations": ("violations", "Broken invariants that the sanitizer has seen."),
}
GAUGES = {
    "num_requests_running": ("running", "Continuations that run."),
    "num_requests_waiting": ("waiting", "Continuations that wait."),
    "kv_cache_usage_perc": ("kv_usage", "Share of KV pages that somebody holds; 1 is all."),
}


class Metrics:
    def __init__(self, prefix: str, figures: Figures, model_name: str) -> None:
        # When a series began helps nobody here, and doubles the number of lines.
        disable_created_metrics()
        self._registry = CollectorRegistry()
        self._model_name = model_name
        labels = ("model_name", "engine")

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"{prefix}{name}", text, labels, buckets=buckets, registry=self._registry)

        self._first_token = histogram("time_to_first_token_seconds", "From arrival to the first token.", FIRST_TOKEN_S)
        self._gap = histogram("inter_token_latency_seconds", "Between two steps that yielded tokens.", GAPS_S)
        self._whole = histogram("e2e_request_latency_seconds", "From arrival to the last token.", REQUESTS_S)
        self._queued = histogram("request_queue_time_seconds", "From arrival to the first step.", REQUESTS_S)
        self._prefill = histogram("request_prefill_time_seconds", "From the first step to the first token.", REQUESTS_S)
        self._decode = histogram("request_decode_time_seconds", "From the first to the last token.", REQUESTS_S)
        self._prompt = histogram("request_prompt_tokens", "Tokens of a prompt.", TOKENS)
        self._generated = histogram("request_generation_tokens", "Tokens generated for a request.", TOKENS)
        self._longest = histogram("request_max_num_generation_tokens", "Tokens of the longest continuation.", TOKENS)
        self._per_token = histogram(
            "request_time_per_output_token_seconds", "Mean time for each token after the first.", GAPS_S
        )
        self._ended = Counter(
            f"{prefix}request_success",
            "Requests that ended, by why.",
            (*labels, "finished_reason"),
            registry=self._registry,
        )
        self._http = Counter(
            f"{prefix}http_requests",
            "HTTP requests, by route and status.",
            ("handler", "status"),
            registry=self._registry,
        )
        self._registry.register(_FiguresCollector(prefix, figures, model_name))
        ProcessCollector(registry=self._registry)
        figures.on_gap = self._note_gap
        figures.on_abort = self._note_aborts
        figures.on_ending = self._note_ending

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def count_http(self, handler: str, status: int) -> None:
        self._http.labels(handler, str(status)).inc()

    def _note_gap(self, gap_s: float) -> None:
        self._gap.labels(self._model_name, ENGINE).observe(gap_s)

    def _note_aborts(self, count: int) -> None:
        self._ended.labels(self._model_name, ENGINE, "abort").inc(count)

    def _note_ending(self, delta: Delta, ending: Ending) -> None:
        labels = (self._model_name, ENGINE)
        self._ended.labels(*labels, delta.finish_reason or "error").inc()
        self._whole.labels(*labels).observe(ending.finished_s - ending.arrival_s)
        self._prompt.labels(*labels).observe(ending.prompt_tokens)
        self._generated.labels(*labels).observe(ending.generated_tokens)
        self._longest.labels(*labels).observe(ending.longest_tokens)
        if ending.scheduled_s is not None:
            self._queued.labels(*labels).observe(max(0.0, ending.scheduled_s - ending.arrival_s))
        if ending.first_token_s is not None:
            self._first_token.labels(*labels).observe(ending.first_token_s - ending.arrival_s)
            decode_s = ending.finished_s - ending.first_token_s
            self._decode.labels(*labels).observe(decode_s)
            if ending.longest_tokens > 1:
                self._per_token.labels(*labels).observe(decode_s / (ending.longest_tokens - 1))
            if ending.scheduled_s is not None:
                self._prefill.labels(*labels).observe(max(0.0, ending.first_token_s - ending.scheduled_s))


class _FiguresCollector(Collector):
    """What the engine counts, read when somebody asks."""

    def __init__(self, prefix: str, figures: Figures, model_name: str) -> None:
        self._prefix = prefix
        self._figures = figures
        self._model_name = model_name

    def describe(self) -> Iterable[Metric]:
        # Nothing to check for duplicates; without this, registering would already collect.
        return ()

    def collect(self) -> Iterator[Metric]:
        counters, labels = self._figures.totals, ["model_name", "engine"]
        values = [self._model_name, ENGINE]
        for name, (field, text) in COUNTERS.items():
            family = CounterMetricFamily(f"{self._prefix}{name}", text, labels=labels)
            family.add_metric(values, getattr(counters, field))
            yield family
        yield self._accepted_per_position(counters, labels, values)
        for name, (field, text) in GAUGES.items():
            gauge = GaugeMetricFamily(f"{self._prefix}{name}", text, labels=labels)
            gauge.add_metric(values, getattr(counters, field))
            yield gauge
        restarts = CounterMetricFamily(f"{self._prefix}engine_restarts", "Engine processes that ended.", labels=labels)
        restarts.add_metric(values, self._figures.restarts)
        yield restarts

    def _accepted_per_position(self, counters: Counters, labels: list[str], values: list[str]) -> Metric:
        family = CounterMetricFamily(
            f"{self._prefix}spec_decode_num_accepted_tokens_per_pos",
            "Accepted drafts by their place in the draft.",
            labels=[*labels, "position"],
        )
        for position, count in enumerate(counters.accepted_at):
            family.add_metric([*values, str(position)], count)
        return family
