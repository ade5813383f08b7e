"""OpenTelemetry traces: one span for each client request. The library is imported only if an endpoint is set."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from outrider.errors import ConfigError
from outrider.server.front.totals import Totals

DEFAULT_PATH = "/v1/traces"
INSTALL = "pip install 'outrider[otel]'"


class Tracer:
    """Records nothing, for servers without an endpoint for traces."""

    def record(self, headers: Mapping[str, str], request_id: str, model: str, totals: Totals) -> None:
        pass

    def close(self) -> None:
        pass


def make_tracer(endpoint: str | None) -> Tracer:
    return Tracer() if endpoint is None else OtlpTracer(endpoint)


def traces_url(endpoint: str) -> str:
    """Returns the endpoint with the usual path of collectors, if it has none."""
    try:
        where = urlsplit(endpoint)
    except ValueError:
        # As for http://[::1, an address without its end.
        where = urlsplit("")
    if where.scheme not in ("http", "https") or not where.netloc:
        raise ConfigError(
            f"--otlp-traces-endpoint {endpoint!r} is not a URL; write http://HOST:4318, the address of a collector"
        )
    return endpoint if where.path.strip("/") else where._replace(path=DEFAULT_PATH).geturl()


class OtlpTracer(Tracer):
    def __init__(self, endpoint: str) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.propagate import extract
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError:
            raise ConfigError(f"--otlp-traces-endpoint needs OpenTelemetry: {INSTALL}") from None
        self._extract = extract
        self._provider = TracerProvider(resource=Resource.create({"service.name": "outrider"}))
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=traces_url(endpoint))))
        self._tracer = self._provider.get_tracer("outrider.server")

    def record(self, headers: Mapping[str, str], request_id: str, model: str, totals: Totals) -> None:
        if not totals.endings:
            return
        # The engine uses the monotonic clock, traces the wall clock.
        offset_s = time.time() - time.monotonic()
        begun = min(ending.arrival_s for ending in totals.endings)
        ended = max(ending.finished_s for ending in totals.endings)
        span = self._tracer.start_span(
            "llm_request", context=self._extract(dict(headers)), start_time=_nanoseconds(begun + offset_s)
        )
        for name, value in _attributes(request_id, model, totals).items():
            if value is not None:
                span.set_attribute(name, value)
        span.end(end_time=_nanoseconds(ended + offset_s))

    def close(self) -> None:
        self._provider.shutdown()


def _attributes(request_id: str, model: str, totals: Totals) -> dict[str, Any]:
    metrics, usage = totals.metrics(), totals.usage()
    speculation = metrics["speculative_decoding"]
    return {
        "gen_ai.request.id": request_id,
        "gen_ai.response.model": model,
        "gen_ai.usage.prompt_tokens": usage["prompt_tokens"],
        "gen_ai.usage.completion_tokens": usage["completion_tokens"],
        "gen_ai.usage.cached_tokens": totals.cached_tokens,
        "gen_ai.latency.time_in_queue": metrics["time_in_queue_s"],
        "gen_ai.latency.time_to_first_token": metrics["time_to_first_token_s"],
        "gen_ai.latency.e2e": metrics["engine_time_s"],
        "outrider.speculation.drafts": speculation["drafts"],
        "outrider.speculation.acceptance_length": speculation["acceptance_length"],
    }


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
