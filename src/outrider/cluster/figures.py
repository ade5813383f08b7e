"""Figures of a worker, for Prometheus and for the cluster's screen."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge

from outrider.engine.engine import Engine
from outrider.engine.outputs import RequestOutput


class Figures:
    def __init__(self, worker: str) -> None:
        self.registry = CollectorRegistry()
        self._worker = worker

        def counter(name: str, what: str) -> Counter:
            return Counter(f"outrider_worker_{name}", what, ("worker",), registry=self.registry)

        def gauge(name: str, what: str) -> Gauge:
            return Gauge(f"outrider_worker_{name}", what, ("worker",), registry=self.registry)

        self._requests = counter("requests", "Requests that ended here.")
        self._prompt = counter("prompt_tokens", "Prompt tokens of these requests.")
        self._cached = counter("cached_tokens", "Prompt tokens that were found in the prefix cache.")
        self._transferred = counter("transferred_tokens", "Prompt tokens whose KV came from a prefill worker.")
        self._generated = counter("generated_tokens", "Tokens that were generated.")
        self._drafts = counter("draft_steps", "Steps of a request that verified drafts.")
        self._accepted = counter("accepted_tokens", "Drafts that were accepted.")
        self._running = gauge("running_requests", "Requests in the engine now.")
        self._kv = gauge("kv_usage", "Share of the KV cache's pages in use.")
        self._leases = gauge("kv_leases", "Prompts whose KV is held for decode workers.")

    def note(self, output: RequestOutput) -> None:
        """Count a request that has ended."""
        metrics, name = output.metrics, self._worker
        self._requests.labels(name).inc()
        self._prompt.labels(name).inc(output.prompt_len)
        self._cached.labels(name).inc(metrics.cached_tokens)
        self._transferred.labels(name).inc(metrics.transferred_tokens)
        self._generated.labels(name).inc(sum(continuation.num_tokens for continuation in output.outputs))
        self._drafts.labels(name).inc(metrics.speculation.drafts)
        self._accepted.labels(name).inc(metrics.speculation.accepted_tokens)

    def read(self, engine: Engine, *, used_share: float) -> None:
        """Read what changes without a request's end."""
        self._running.labels(self._worker).set(len(engine.live_requests))
        self._kv.labels(self._worker).set(used_share)
        self._leases.labels(self._worker).set(engine.transfer_counters().leases)
