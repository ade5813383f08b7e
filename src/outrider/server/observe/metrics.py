"""Prometheus metrics, with vLLM's names after a prefix, so that dashboards for vLLM work."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

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

from outrider.scheduler.pacing.figures import SOURCES
from outrider.server.messages import Counters, Delta, Ending
from outrider.server.observe.figures import Figures

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
ENGINE = "0"

FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
GAPS_S = (0.002, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
REQUESTS_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
TRANSFERS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)

COUNTERS = {
    "spec_decode_num_drafts": ("drafts", "Steps that verified drafts, over all requests."),
    "spec_decode_num_draft_tokens": ("draft_tokens", "Draft tokens that were verified."),
    "spec_decode_num_accepted_tokens": ("accepted_tokens", "Draft tokens that were accepted."),
    "prefix_cache_queries": ("queried_tokens", "Prompt tokens that were looked up in the prefix cache."),
    "prefix_cache_hits": ("hit_tokens", "Prompt tokens that the prefix cache had."),
    "external_prefix_cache_queries": (
        "external_queried_tokens",
        "Prompt tokens that the prefix cache lacked and a prefill worker was to send.",
    ),
    "external_prefix_cache_hits": ("external_hit_tokens", "Prompt tokens whose KV came from a prefill worker."),
    "num_preemptions": ("preemptions", "Requests that lost their KV to other requests and were computed again."),
    "prompt_tokens": ("prompt_tokens", "Prompt tokens of accepted requests."),
    "generation_tokens": ("generated_tokens", "Generated tokens."),
    "spec_decode_num_dropped": ("dropped_drafts", "Times that a request stopped drafting for lack of pages."),
    "spec_decode_drafting_steps": (
        "drafting_steps",
        "Steps that proposed or verified drafts, of those without prompts.",
    ),
    "spec_decode_plain_steps": ("plain_steps", "Steps without drafts, of those without prompts."),
    "spec_decode_probes": ("probes", "Times that drafts were tried which were not expected to pay."),
    "spec_decode_pauses": ("pauses", "Steps without drafts among steps with drafts, to find out what they take."),
    "spec_decode_lookups": ("lookups", "Times that drafts were looked up for a request."),
    "sanitizer_violations": ("violations", "Broken invariants that the sanitizer has seen."),
    "kv_transfer_handed_over": ("handed_over", "Prompts whose KV was held for a decode worker."),
    "kv_transfer_hand_overs_refused": (
        "hand_overs_refused",
        "Prompts that were handed over without KV, because too much was held for decode workers already.",
    ),
    "kv_transfer_leases_expired": ("leases_expired", "Prompts whose KV no decode worker released in time."),
    "kv_transfer_fetches": ("fetches", "Requests that were to start from a prefill worker's KV."),
    "kv_transfer_fetch_failures": ("fetch_failures", "Requests whose KV did not come, or not all of it."),
    "kv_transfer_recomputed_prompts": ("recomputed_prompts", "Prompts that a decode worker computed itself."),
    "kv_transfer_draft_groups_missing": ("draft_groups_missing", "Hand-offs without the drafter's KV."),
    "kv_transfer_bytes": ("transferred_bytes", "Bytes of KV that came from prefill workers."),
    "kv_transfer_fences": ("fences", "Prefill workers that were cut off because a read did not end."),
}
GAUGES = {
    "num_requests_running": ("running", "Continuations in the batch."),
    "num_requests_waiting": ("waiting", "Continuations that wait for a place in the batch."),
    "kv_cache_usage_perc": ("kv_usage", "Fraction of KV pages that requests hold, from 0 to 1."),
    "spec_decode_lookup_tokens": ("lookup_tokens", "Tokens of finished texts that are kept for look-up."),
    "spec_decode_lookup_memory_bytes": ("lookup_memory_bytes", "Size of the texts and indexes of the look-up."),
    "kv_transfer_held_pages": ("held_pages", "KV pages that are held for decode workers."),
    "kv_transfer_leases": ("leases", "Prompts whose KV is held for decode workers."),
}
CHOICES = {
    "spec_decode_expected_tokens_per_second": (
        "rate",
        "Tokens per second that the chosen drafting is expected to give.",
    ),
    "spec_decode_expected_plain_tokens_per_second": (
        "plain_rate",
        "Tokens per second that are expected without drafts.",
    ),
    "spec_decode_observed_tokens_per_second": ("observed_rate", "Tokens per second of the last steps without prompts."),
    "spec_decode_num_drafting_requests": ("drafting_requests", "Requests for which the drafter proposes."),
    "spec_decode_num_chosen_draft_tokens": ("drafts", "Most drafts for each request for which the drafter proposes."),
    "spec_decode_least_probability": (
        "least_probability",
        "Least joint probability with which a draft is worth going on from.",
    ),
    "spec_decode_row_price_tokens": ("row_price", "Tokens that the time of one more row of the target is worth."),
    "spec_decode_machine_speed_factor": (
        "speed",
        "Factor of all times: above 1 where the machine is slower than when costs were learnt.",
    ),
}
"""Gauges by field of Choice. They are absent where the engine does not choose."""
BY_SOURCE = {
    "spec_decode_num_offered_tokens_by_source": ("offered_by_source", "Drafts that were proposed, by their source."),
    "spec_decode_num_verified_tokens_by_source": ("verified_by_source", "Drafts that were verified, by their source."),
    "spec_decode_num_accepted_tokens_by_source": ("accepted_by_source", "Drafts that were accepted, by their source."),
}
"""Counters by source of drafts. They are absent where the engine does not choose."""
BY_TIER = {
    "kv_tier_looked_up_pages": ("looked_up", "Pages that were looked up in a tier behind the KV cache."),
    "kv_tier_found_pages": ("found", "Pages that a tier said that it holds."),
    "kv_tier_loaded_pages": ("loaded", "Pages that were copied back from a tier."),
    "kv_tier_missed_pages": ("missed", "Pages that a tier had said that it holds, and that could not be loaded."),
    "kv_tier_refused_pages": ("refused", "Values in a tier that were not used because they were damaged or foreign."),
    "kv_tier_stored_pages": ("stored", "Pages that were copied to a tier."),
    "kv_tier_not_stored_pages": ("not_stored", "Pages that a tier was to keep and did not take over."),
    "kv_tier_loaded_bytes": ("loaded_bytes", "Bytes of pages that were copied back from a tier."),
    "kv_tier_stored_bytes": ("stored_bytes", "Bytes of pages that were copied to a tier."),
    "kv_tier_look_up_seconds": ("look_up_s", "Time that look-ups in a tier took, added up."),
    "kv_tier_load_seconds": ("load_s", "Time that loads from a tier took, added up."),
    "kv_tier_store_seconds": ("store_s", "Time that copies to a tier took, added up."),
}
"""Counters by tier. They are absent where there is no tier."""
LOOKUP_HITS = {"own_text": "own_lookup_hits", "shared_text": "shared_lookup_hits"}
HISTOGRAMS = {
    "time_to_first_token_seconds": ("Time from arrival to the first token.", FIRST_TOKEN_S),
    "inter_token_latency_seconds": ("Time between two steps that yielded tokens.", GAPS_S),
    "e2e_request_latency_seconds": ("Time from arrival to the last token.", REQUESTS_S),
    "request_queue_time_seconds": ("Time from arrival to the first step.", REQUESTS_S),
    "request_prefill_time_seconds": ("Time from the first step to the first token.", REQUESTS_S),
    "request_decode_time_seconds": ("Time from the first to the last token.", REQUESTS_S),
    "request_prompt_tokens": ("Tokens in the prompt of a request.", TOKENS),
    "request_generation_tokens": ("Tokens generated for a request.", TOKENS),
    "request_max_num_generation_tokens": ("Tokens of the longest continuation.", TOKENS),
    "request_time_per_output_token_seconds": ("Mean time for each token after the first.", GAPS_S),
    "kv_transfer_queued_seconds": ("Time from a prefill worker's offer until reading its KV began.", TRANSFERS_S),
    "kv_transfer_read_seconds": ("Time to read the KV of a prompt.", TRANSFERS_S),
    "kv_transfer_confirm_seconds": ("Time until the prefill worker had confirmed what was read.", TRANSFERS_S),
}


class Metrics:
    def __init__(self, prefix: str, figures: Figures, model_name: str) -> None:
        # The creation time of each series is of no use here, and doubles the number of lines.
        disable_created_metrics()
        self._registry = CollectorRegistry()
        self._model_name = model_name
        labels = ("model_name", "engine")
        self._histograms = {
            name: Histogram(f"{prefix}{name}", text, labels, buckets=buckets, registry=self._registry)
            for name, (text, buckets) in HISTOGRAMS.items()
        }
        for histogram in self._histograms.values():
            # Present from the start, with zeros.
            histogram.labels(model_name, ENGINE)
        self._ended = Counter(
            f"{prefix}request_success",
            "Requests that ended, by reason.",
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

    def _observe(self, name: str, value: float) -> None:
        self._histograms[name].labels(self._model_name, ENGINE).observe(value)

    def _note_gap(self, gap_s: float) -> None:
        self._observe("inter_token_latency_seconds", gap_s)

    def _note_aborts(self, count: int) -> None:
        self._ended.labels(self._model_name, ENGINE, "abort").inc(count)

    def _note_ending(self, delta: Delta, ending: Ending) -> None:
        self._ended.labels(self._model_name, ENGINE, delta.finish_reason or "error").inc()
        self._observe("e2e_request_latency_seconds", ending.finished_s - ending.arrival_s)
        self._observe("request_prompt_tokens", ending.prompt_tokens)
        self._observe("request_generation_tokens", ending.generated_tokens)
        self._observe("request_max_num_generation_tokens", ending.longest_tokens)
        if ending.transfer is not None:
            self._observe("kv_transfer_queued_seconds", ending.transfer.queued_s)
            self._observe("kv_transfer_read_seconds", ending.transfer.read_s)
            self._observe("kv_transfer_confirm_seconds", ending.transfer.confirmed_s)
        if ending.scheduled_s is not None:
            self._observe("request_queue_time_seconds", max(0.0, ending.scheduled_s - ending.arrival_s))
        if ending.first_token_s is not None:
            self._observe("time_to_first_token_seconds", ending.first_token_s - ending.arrival_s)
            decode_s = ending.finished_s - ending.first_token_s
            self._observe("request_decode_time_seconds", decode_s)
            if ending.longest_tokens > 1:
                self._observe("request_time_per_output_token_seconds", decode_s / (ending.longest_tokens - 1))
            if ending.scheduled_s is not None:
                self._observe("request_prefill_time_seconds", max(0.0, ending.first_token_s - ending.scheduled_s))


class _FiguresCollector(Collector):
    """The engine's counters, read at each scrape."""

    def __init__(self, prefix: str, figures: Figures, model_name: str) -> None:
        self._prefix = prefix
        self._figures = figures
        self._model_name = model_name

    def describe(self) -> Iterable[Metric]:
        # Nothing to check for duplicates; without this, registering would already collect.
        return ()

    def collect(self) -> Iterator[Metric]:
        counters = self._figures.totals
        for name, (field, text) in COUNTERS.items():
            yield self._family(CounterMetricFamily, name, text, getattr(counters, field))
        for name, (field, text) in GAUGES.items():
            yield self._family(GaugeMetricFamily, name, text, getattr(counters, field))
        yield self._family(
            CounterMetricFamily, "engine_restarts", "Engine processes that ended.", self._figures.restarts
        )
        family = CounterMetricFamily(
            f"{self._prefix}spec_decode_num_accepted_tokens_per_pos",
            "Accepted drafts by their place in the draft.",
            labels=["model_name", "engine", "position"],
        )
        for position, count in enumerate(counters.accepted_at):
            family.add_metric([self._model_name, ENGINE, str(position)], count)
        yield family
        yield from self._of_choice(counters)
        for name, (field, text) in BY_TIER.items() if counters.tiers else ():
            family = CounterMetricFamily(f"{self._prefix}{name}", text, labels=["model_name", "engine", "tier"])
            for tier, figures in counters.tiers.items():
                family.add_metric([self._model_name, ENGINE, tier], getattr(figures, field))
            yield family

    def _of_choice(self, counters: Counters) -> Iterator[Metric]:
        if counters.choice is not None:
            for name, (field, text) in CHOICES.items():
                yield self._family(GaugeMetricFamily, name, text, getattr(counters.choice, field))
        for name, (field, text) in BY_SOURCE.items():
            # There are none where the engine does not choose.
            yield self._by_source(name, text, dict(zip(SOURCES, getattr(counters, field), strict=False)))
        hits = {source: getattr(counters, field) for source, field in LOOKUP_HITS.items()}
        yield self._by_source("spec_decode_lookup_hits", "Look-ups that found something, by where.", hits)

    def _by_source(self, name: str, text: str, counts: Mapping[str, int]) -> Metric:
        family = CounterMetricFamily(f"{self._prefix}{name}", text, labels=["model_name", "engine", "source"])
        for source, count in counts.items():
            family.add_metric([self._model_name, ENGINE, source], count)
        return family

    def _family(
        self, kind: type[CounterMetricFamily | GaugeMetricFamily], name: str, text: str, value: float
    ) -> Metric:
        family = kind(f"{self._prefix}{name}", text, labels=["model_name", "engine"])
        family.add_metric([self._model_name, ENGINE], value)
        return family
