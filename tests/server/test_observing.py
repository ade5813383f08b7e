"""Counts that survive an engine, and traces."""

from __future__ import annotations

import gzip
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.server.conftest import TINY
from tests.server.running import RunningServer

from outrider.engine.speculation import SpeculationCounts
from outrider.errors import ConfigError
from outrider.scheduler.pacing.figures import Choice
from outrider.server.messages import Counters, Delta, Ending, StepReport, TransferFigures
from outrider.server.observe.figures import Figures
from outrider.server.observe.metrics import Metrics
from outrider.server.observe.stat_log import line, transfer_line
from outrider.server.observe.tracing import make_tracer, traces_url

ENDING = Ending(
    arrival_s=10.0,
    scheduled_s=10.5,
    first_token_s=11.0,
    finished_s=13.0,
    prompt_tokens=7,
    generated_tokens=5,
    longest_tokens=3,
    cached_tokens=2,
    steps=3,
    speculation=SpeculationCounts(drafts=2, draft_tokens=8, accepted_tokens=3, accepted_at=[2, 1, 0, 0]),
)
LAST = Delta(request_id="r", index=0, text="", token_ids=[], pieces=[], origins="", finish_reason="stop", ending=ENDING)


def report(**counters: object) -> StepReport:
    return StepReport(deltas=[], counters=Counters(**counters), gaps_s=[])  # type: ignore[arg-type]


def test_counters_never_fall_when_an_engine_is_replaced() -> None:
    figures = Figures()
    figures.take(report(drafts=5, accepted_at=[4, 1], running=3))
    figures.engine_ended()
    assert (figures.totals.drafts, figures.totals.running) == (5, 0)
    figures.take(report(drafts=2, accepted_at=[1, 1, 1], running=1))
    assert figures.totals == Counters(drafts=7, accepted_at=[5, 2, 1], running=1)


def test_endings_and_gaps_become_histograms() -> None:
    figures = Figures()
    metrics = Metrics("x:", figures, "m")
    figures.take(StepReport(deltas=[LAST], counters=Counters(accepted_at=[3, 1], aborted=2), gaps_s=[0.01, 0.02]))
    text = metrics.text().decode()
    for expected in (
        'x:time_to_first_token_seconds_sum{engine="0",model_name="m"} 1.0',
        'x:request_max_num_generation_tokens_sum{engine="0",model_name="m"} 3.0',
        'x:request_time_per_output_token_seconds_sum{engine="0",model_name="m"} 1.0',
        'x:request_queue_time_seconds_sum{engine="0",model_name="m"} 0.5',
        'x:e2e_request_latency_seconds_sum{engine="0",model_name="m"} 3.0',
        'x:inter_token_latency_seconds_count{engine="0",model_name="m"} 2.0',
        'x:request_success_total{engine="0",finished_reason="stop",model_name="m"} 1.0',
        'x:request_success_total{engine="0",finished_reason="abort",model_name="m"} 2.0',
        'x:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 1.0',
    ):
        assert expected in text


def test_hand_offs_are_counted_over_engines_and_what_is_held_is_the_engines_own() -> None:
    figures = Figures()
    metrics = Metrics("x:", figures, "m")
    moved = msgspec.structs.replace(
        ENDING, transfer=TransferFigures(queued_s=0.5, read_s=2.0, confirmed_s=0.25, bytes=100), transferred_tokens=5
    )
    ended = msgspec.structs.replace(LAST, ending=moved)
    counters = Counters(handed_over=3, fetches=2, transferred_bytes=100, held_pages=7, leases=2)
    figures.take(StepReport(deltas=[ended], counters=counters, gaps_s=[]))
    assert figures.prompts_held == 2
    text = metrics.text().decode()
    for expected in (
        'x:kv_transfer_queued_seconds_sum{engine="0",model_name="m"} 0.5',
        'x:kv_transfer_read_seconds_sum{engine="0",model_name="m"} 2.0',
        'x:kv_transfer_confirm_seconds_sum{engine="0",model_name="m"} 0.25',
        'x:kv_transfer_held_pages{engine="0",model_name="m"} 7.0',
    ):
        assert expected in text
    figures.engine_ended()
    assert figures.prompts_held == 0
    figures.take(report(handed_over=1))
    assert figures.totals == Counters(handed_over=4, fetches=2, transferred_bytes=100)


def test_the_log_tells_what_was_handed_over_since_the_line_before() -> None:
    before = Counters(handed_over=2, fetches=1, transferred_bytes=10)
    now = Counters(handed_over=5, hand_overs_refused=1, fetches=4, fetch_failures=1, held_pages=8, leases=2)
    now = msgspec.structs.replace(now, transferred_bytes=5_000_010, recomputed_prompts=1)
    text = transfer_line(before, now, 2.0)
    assert "3 prompts handed over, 1 without KV" in text
    assert "Held: 2 prompts, 8 pages" in text
    assert "Fetches: 3, 1 failed" in text
    assert "Received: 2.5 MB/s" in text


CHOICE = Choice(
    rate=250.5,
    plain_rate=100.0,
    observed_rate=240.0,
    drafting_requests=3,
    drafts=7,
    least_probability=0.15,
    row_price=0.25,
    speed=1.5,
)


def test_the_choice_is_the_engines_own_and_drafts_are_counted_by_source() -> None:
    figures = Figures()
    metrics = Metrics("x:", figures, "m")
    assert "x:spec_decode_row_price_tokens" not in metrics.text().decode()
    figures.take(
        report(
            choice=CHOICE,
            probes=2,
            offered_by_source=[9, 4, 0, 1],
            verified_by_source=[6, 3, 0, 1],
            shared_lookup_hits=5,
            lookup_tokens=70,
        )
    )
    text = metrics.text().decode()
    for expected in (
        'x:spec_decode_expected_tokens_per_second{engine="0",model_name="m"} 250.5',
        'x:spec_decode_expected_plain_tokens_per_second{engine="0",model_name="m"} 100.0',
        'x:spec_decode_observed_tokens_per_second{engine="0",model_name="m"} 240.0',
        'x:spec_decode_num_drafting_requests{engine="0",model_name="m"} 3.0',
        'x:spec_decode_num_chosen_draft_tokens{engine="0",model_name="m"} 7.0',
        'x:spec_decode_row_price_tokens{engine="0",model_name="m"} 0.25',
        'x:spec_decode_machine_speed_factor{engine="0",model_name="m"} 1.5',
        'x:spec_decode_probes_total{engine="0",model_name="m"} 2.0',
        'x:spec_decode_num_offered_tokens_by_source_total{engine="0",model_name="m",source="drafter"} 9.0',
        'x:spec_decode_num_verified_tokens_by_source_total{engine="0",model_name="m",source="own_text"} 3.0',
        'x:spec_decode_lookup_hits_total{engine="0",model_name="m",source="shared_text"} 5.0',
        'x:spec_decode_lookup_tokens{engine="0",model_name="m"} 70.0',
    ):
        assert expected in text, expected
    figures.engine_ended()
    figures.take(report(probes=1, offered_by_source=[1, 0, 0, 0]))
    text = metrics.text().decode()
    assert "x:spec_decode_row_price_tokens" not in text
    assert 'x:spec_decode_num_offered_tokens_by_source_total{engine="0",model_name="m",source="drafter"} 10.0' in text
    assert 'x:spec_decode_probes_total{engine="0",model_name="m"} 3.0' in text
    assert 'x:spec_decode_lookup_tokens{engine="0",model_name="m"} 0.0' in text


def test_the_log_tells_what_is_chosen() -> None:
    text = line(Counters(), Counters(choice=CHOICE), 2.0)
    assert "Drafting for: 3 reqs, up to 7 tokens, Expected: 250.5 tokens/s, 100.0 without drafts" in text
    assert "Drafting for" not in line(Counters(), Counters(), 2.0)


def test_acceptance_in_the_log_counts_the_bonus_token() -> None:
    text = line(Counters(), Counters(drafts=4, draft_tokens=16, accepted_tokens=6, generated_tokens=10), 2.0)
    assert "Avg generation throughput: 5.0 tokens/s" in text
    assert "Mean acceptance length: 2.50" in text


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ("http://collector:4318", "http://collector:4318/v1/traces"),
        ("https://collector/", "https://collector/v1/traces"),
        ("http://collector:4318/v1/traces", "http://collector:4318/v1/traces"),
        ("http://gateway/team/otlp", "http://gateway/team/otlp"),
    ],
)
def test_a_collector_may_be_named_without_a_path(given: str, used: str) -> None:
    assert traces_url(given) == used


@pytest.mark.parametrize("endpoint", ["collector:4318", "grpc://collector:4317", "", "http://", "http://[::1"])
def test_what_is_no_collector_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="not a URL; write http"):
        make_tracer(endpoint)


class Collector(ThreadingHTTPServer):
    """Takes spans as an OpenTelemetry collector does."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), TakeSpans)
        self.spans: list[Any] = []


class TakeSpans(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        assert self.path == "/v1/traces"
        assert isinstance(self.server, Collector)
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            for scope in resource.scope_spans:
                self.server.spans += scope.spans
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def test_a_collector_gets_a_span_for_each_request(tiny_model_path: Path) -> None:
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    with Collector() as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{collector.server_port}"
        server = RunningServer(tiny_model_path, *TINY, "--otlp-traces-endpoint", endpoint)
        try:
            asked = (
                server.wait()
                .http()
                .post(
                    "/v1/completions",
                    json={"prompt": "Hi there", "max_tokens": 4, "ignore_eos": True},
                    headers={"traceparent": f"00-{trace}-{parent}-01"},
                )
            )
            assert asked.status_code == 200, asked.text
        finally:
            # What has not been sent yet is sent before it ends.
            assert server.stop() == 0, server.log
        collector.shutdown()
    (span,) = collector.spans
    told = {each.key: each.value for each in span.attributes}
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (trace, parent)
    assert told["gen_ai.usage.completion_tokens"].int_value == 4
    assert told["gen_ai.request.id"].string_value == asked.json()["id"]
    assert 0 < told["gen_ai.latency.time_in_queue"].double_value < told["gen_ai.latency.e2e"].double_value
    assert span.end_time_unix_nano - span.start_time_unix_nano == pytest.approx(
        told["gen_ai.latency.e2e"].double_value * 1e9, rel=1e-3
    )
    counts = asked.json()["metrics"]["speculative_decoding"]
    assert told["outrider.speculation.acceptance_length"].double_value == counts["acceptance_length"]


def test_traces_without_the_library_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match="pip install"):
        make_tracer("http://127.0.0.1:1")
