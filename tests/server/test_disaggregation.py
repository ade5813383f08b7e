"""A prefill and a decode worker answer as one server would, whatever a client asks for and whatever proxies change."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.requirements import require
from tests.server.conftest import API_KEY, FIXED_DRAFTS, OTHER_KEY, TINY
from tests.server.running import RunningServer, wait_until
from tests.server.workers import (
    ASKED,
    CLUSTER_KEY,
    ask,
    counters,
    metrics,
    prefill,
    refusal,
    start_worker,
    state,
    streamed,
    ticket_of,
)

from outrider.server.http.keys import tenant_of
from outrider.transfer.messages import PROTOCOL
from outrider.transfer.offers import prompt_binding
from outrider.transfer.tickets import ClusterKey, Ticket

require("nixl", "nixl_cu12", "nixl_cu13")

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
SCHEMA = {"type": "object", "properties": {"town": {"type": "string", "maxLength": 8}, "size": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}


class Workers(NamedTuple):
    prefill: RunningServer
    decode: RunningServer
    strict: RunningServer
    """A decode worker under the policy fail, with room for one request at a time."""
    single: RunningServer


@pytest.fixture(scope="module")
def workers(tiny_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    key = tmp_path_factory.mktemp("cluster") / "key"
    key.write_text(f"# the cluster's\n{CLUSTER_KEY}\n")
    started = Workers(
        start_worker(tiny_model_path, key, "kv_producer"),
        start_worker(tiny_model_path, key, "kv_consumer"),
        start_worker(tiny_model_path, key, "kv_consumer", "--max-num-seqs", "1", kv_load_failure_policy="fail"),
        RunningServer(tiny_model_path, *TINY, *FIXED_DRAFTS, "--served-model-name", "tiny", "--api-key", API_KEY),
    )
    try:
        for server in started:
            server.wait()
        # Warming up is in no counter.
        assert not any(counters(started.decode).values())
        yield started
        for server in started:
            assert "broken at step" not in server.log, server.log
            assert "Traceback" not in server.log, server.log
            assert CLUSTER_KEY not in server.log
        wait_until(lambda: state(started.prefill)["leases"] == 0)
        assert state(started.prefill)["held_pages"] == 0
    finally:
        for server in started:
            assert server.stop() == 0, server.log


def story(name: str) -> str:
    """A prompt of some pages that shares no page with another one."""
    return f"{name}: the quick brown fox jumps over the lazy dog, and the dog dreams of a slow red fox. " * 3


def chat(name: str, **more: Any) -> tuple[str, dict[str, Any]]:
    return CHAT, {"messages": [{"role": "user", "content": story(name)}], "temperature": 0, "max_tokens": 12, **more}


def text(name: str, **more: Any) -> tuple[str, dict[str, Any]]:
    return COMPLETIONS, {"prompt": story(name), "temperature": 0, "max_tokens": 12, **more}


SEEDED = {"temperature": 0.9, "top_p": 0.95, "seed": 7}
CASES = {
    "greedy": text("greedy", ignore_eos=True),
    "seeded": text("seeded", **SEEDED, presence_penalty=0.5, repetition_penalty=1.2),
    "logprobs": text("logprobs", **SEEDED, logprobs=3),
    "several continuations": text("several", **SEEDED, n=3),
    "least length": text("least", **SEEDED, min_tokens=5),
    "echo": text("echo", echo=True),
    "scores of the prompt": text("scores", echo=True, logprobs=1, max_tokens=4),
    "one token": text("one", max_tokens=1),
    "no tokens": text("none", max_tokens=0, echo=True),
    "few tokens": text("few", **SEEDED, allowed_token_ids=[40, 41, 42, 43], logit_bias={"41": 2}),
    "schema": text("schema", guided_json=SCHEMA, max_tokens=40, **SEEDED),
    "no drafts": text("plain", speculate=False),
    "two drafts": text("two", num_speculative_tokens=2),
    "salted": text("salted", cache_salt="pepper"),
    "chat": chat("chat", return_token_origins=True),
    "chat, seeded, logprobs": chat("chat seeded", **SEEDED, logprobs=True, top_logprobs=2),
    "chat, schema": chat("chat schema", response_format={"type": "json_schema", "json_schema": {"schema": SCHEMA}}),
    "chat, newer length": chat("chat newer", max_tokens=None, max_completion_tokens=12),
    "forced call": chat("call", tools=[TOOL], tool_choice="required", max_tokens=60, **SEEDED),
}


def choices_of(answer: dict[str, Any]) -> Any:
    """Returns what is the same in every answer of equal content: calls get new ids each time."""
    for choice in answer["choices"]:
        for call in choice.get("message", {}).get("tool_calls", ()):
            call["id"] = ""
    return answer["choices"]


@pytest.mark.parametrize("name", CASES)
def test_two_workers_answer_as_one_server(workers: Workers, name: str) -> None:
    route, body = CASES[name]
    before = counters(workers.decode)
    taken = {**body, "kv_transfer_params": ticket_of(workers.prefill, route, body)}
    answer = ask(workers.decode, route, taken)
    assert choices_of(answer) == choices_of(ask(workers.single, route, body))
    usage, now = answer["usage"], counters(workers.decode)
    details = usage["prompt_tokens_details"]
    if name in ("one token", "no tokens", "scores of the prompt"):
        # The first token is the last one, or every row of the prompt is needed here.
        assert details["transferred_tokens"] == 0
    else:
        # Conversations begin alike, so the decode worker has the first tokens of most.
        transferred = usage["prompt_tokens"] - details["cached_tokens"] - (name == "several continuations")
        assert details["transferred_tokens"] == transferred > 20
        assert now["transferred_tokens"] == before["transferred_tokens"] + transferred
        moved, num_bytes = answer["metrics"]["kv_transfer"], now["transferred_bytes"] - before["transferred_bytes"]
        assert (moved["tokens"], moved["bytes"]) == (transferred, num_bytes)
        assert all(moved[phase] >= 0 for phase in ("queued_s", "read_s", "confirmed_s"))
    assert now["fetch_failures"] == before["fetch_failures"]


@pytest.mark.parametrize("name", [name for name, (_, body) in CASES.items() if not (body.get("echo"))])
def test_a_stream_of_two_workers_is_that_of_one_server(workers: Workers, name: str) -> None:
    route, body = CASES[name]
    key = "messages" if route == CHAT else "prompt"
    again = [{"role": "user", "content": story(f"{name} streamed")}] if route == CHAT else story(f"{name} streamed")
    body = {**body, key: again, "return_token_ids": True, "stream_options": {"include_usage": True}}
    taken = {**body, "kv_transfer_params": ticket_of(workers.prefill, route, body)}
    assert streamed(workers.decode, route, taken) == streamed(workers.single, route, body)


def test_responses_are_handed_over_too(workers: Workers) -> None:
    body = {"input": story("responses"), "temperature": 0, "max_output_tokens": 9}
    handed = ask(workers.prefill, RESPONSES, {**body, "kv_transfer_params": ASKED})
    answer = ask(workers.decode, RESPONSES, {**body, "kv_transfer_params": handed["kv_transfer_params"]})
    expected = ask(workers.single, RESPONSES, body)
    assert answer["output"][0]["content"] == expected["output"][0]["content"]
    assert answer["usage"]["input_tokens_details"]["transferred_tokens"] > 20


def test_a_proxy_may_ask_the_prefill_worker_for_a_least_length(workers: Workers) -> None:
    """As llm-d's does. The first token is then drawn where the end of the text is possible: on the decode worker."""
    route, body = text("a least length", **SEEDED, logprobs=1)
    params = ticket_of(workers.prefill, route, body, min_tokens=1, max_completion_tokens=1)
    answer = ask(workers.decode, route, {**body, "kv_transfer_params": params})
    (choice,), (expected,) = answer["choices"], ask(workers.single, route, body)["choices"]
    assert choice["text"] == expected["text"]
    assert choice["logprobs"]["tokens"] == expected["logprobs"]["tokens"]
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(expected["logprobs"]["token_logprobs"])
    details = answer["usage"]["prompt_tokens_details"]
    assert details["transferred_tokens"] == answer["usage"]["prompt_tokens"] - 1


def test_a_request_without_a_seed_goes_on_with_the_prefill_workers(workers: Workers) -> None:
    route, body = text("no seed", temperature=1.0, max_tokens=8)
    handed = prefill(workers.prefill, route, body)
    answer = ask(workers.decode, route, {**body, "kv_transfer_params": handed["kv_transfer_params"]})
    first = handed["choices"][0]["text"]
    assert first
    assert answer["choices"][0]["text"].startswith(first)


def test_a_stop_string_ends_the_text_where_one_server_would(workers: Workers) -> None:
    route, body = text("stop string", return_token_origins=True)
    (choice,) = ask(workers.single, route, body)["choices"]
    for place in (0, 4):
        stopping = {**body, "stop": [choice["token_origins"][place]["text"][-3:], "never"]}
        params = ticket_of(workers.prefill, route, stopping)
        answer = ask(workers.decode, route, {**stopping, "kv_transfer_params": params})
        assert answer["choices"] == ask(workers.single, route, stopping)["choices"]
        assert answer["choices"][0]["finish_reason"] == "stop"


def test_a_first_token_that_ends_the_text_ends_it_on_the_decode_worker(workers: Workers) -> None:
    route, body = text("stop token", max_tokens=12, return_token_ids=True)
    (first, *_), *_ = [choice["token_ids"] for choice in ask(workers.single, route, body)["choices"]]
    body |= {"stop_token_ids": [first]}
    params = ticket_of(workers.prefill, route, body)
    answer = ask(workers.decode, route, {**body, "kv_transfer_params": params})
    assert answer["choices"] == ask(workers.single, route, body)["choices"]
    assert answer["choices"][0]["finish_reason"] == "stop"
    wait_until(lambda: state(workers.prefill)["leases"] == 0)


def test_the_answer_of_a_prefill_worker_has_what_proxies_look_for(workers: Workers) -> None:
    route, body = text("formality")
    answer = prefill(workers.prefill, route, body | {"n": 2, "best_of": 2, "min_tokens": 3, "echo": True})
    assert len(answer["choices"]) == 1
    assert answer["usage"]["completion_tokens"] == 1
    params = answer["kv_transfer_params"]
    assert params.pop("ticket")
    assert params == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": state(workers.prefill)["engine_id"],
        "remote_request_id": f"{answer['id']}-0",
        "remote_block_ids": [],
        "remote_host": None,
        "remote_port": None,
        "tp_size": 1,
        "remote_num_tokens": answer["usage"]["prompt_tokens"],
    }


@pytest.mark.parametrize("params", [None, {}, {"do_remote_decode": False, "do_remote_prefill": None, "ticket": "x"}])
def test_other_requests_are_served_as_ever(workers: Workers, params: Any) -> None:
    route, body = text("ordinary")
    expected = ask(workers.single, route, body)["choices"]
    for worker in (workers.prefill, workers.decode, workers.single):
        answer = ask(worker, route, {**body, "kv_transfer_params": params})
        assert answer["choices"] == expected
        assert "kv_transfer_params" not in answer
        assert "transferred_tokens" not in answer["usage"]["prompt_tokens_details"]


def test_a_decode_worker_reads_the_ticket_and_nothing_else(workers: Workers) -> None:
    route, body = text("addresses")
    ticket = ticket_of(workers.prefill, route, body)["ticket"]
    strange: dict[str, Any] = {"remote_host": ["10.0.0.1"], "remote_port": {"a": [1]}, "remote_block_ids": "all"}
    strange |= {"remote_engine_id": 5, "tp_size": -1, "remote_num_tokens": 10**9, "something new": True}
    params = {**strange, "do_remote_prefill": True, "ticket": ticket}
    answer = ask(workers.decode, route, {**body, "kv_transfer_params": params})
    assert answer["usage"]["prompt_tokens_details"]["transferred_tokens"] == answer["usage"]["prompt_tokens"]


def forged(**changes: Any) -> str:
    """A ticket of this cluster, as far as its seal goes."""
    fields: dict[str, Any] = {"version": PROTOCOL, "engine": "e", "endpoint": "127.0.0.1:9", "lease": bytes(16)}
    fields |= {"binding": bytes(16), "expires_s": time.time() + 60}
    return ClusterKey(changes.pop("key", CLUSTER_KEY)).seal(Ticket(**fields | changes))


BAD_TICKETS = {
    "empty": "",
    "garbage": "garbage",
    "not ASCII": "ä" * 40,
    "long": "A" * 100_000,
    "of another cluster": forged(key="the key of another cluster"),
    "changed": forged()[:-8] + "AAAAAAA=",
    "number": 5,
    "list": ["x"],
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("ticket", BAD_TICKETS.values(), ids=BAD_TICKETS)
def test_a_ticket_that_is_not_of_this_cluster_is_refused(workers: Workers, ticket: Any, stream: bool) -> None:
    route, body = text("bad ticket", stream=stream)
    body |= {"kv_transfer_params": {"do_remote_prefill": True, "ticket": ticket}}
    for worker in (workers.decode, workers.strict):
        before = counters(worker)
        status, error = refusal(worker, route, body)
        assert status == 400
        assert "ticket" in error["message"]
        assert error["param"].startswith("kv_transfer_params")
        assert counters(worker) == before


@pytest.mark.parametrize("stream", [False, True])
def test_tickets_that_are_of_no_use_follow_the_policy(workers: Workers, stream: bool) -> None:
    route, body = text("stale", stream=stream)
    ids = ask(workers.single, "/tokenize", {"prompt": body["prompt"]})["tokens"]
    binding = prompt_binding(ids, salt=tenant_of(API_KEY))
    tickets = {
        "expired": forged(expires_s=time.time() - 1, binding=binding),
        "another prompt": ticket_of(workers.prefill, route, text("another prompt")[1])["ticket"],
        "another version": forged(version=PROTOCOL + 1, binding=binding),
    }
    for reason, ticket in tickets.items():
        asked = {**body, "kv_transfer_params": {"do_remote_prefill": True, "ticket": ticket}}
        status, error = refusal(workers.strict, route, asked)
        assert (status, error["code"]) == (503, "kv_transfer_failed")
        assert reason in error["message"]
        before = counters(workers.decode)["recomputed_prompts"]
        if stream:
            assert streamed(workers.decode, route, asked) == streamed(workers.single, route, body)
        else:
            assert ask(workers.decode, route, asked)["choices"] == ask(workers.single, route, body)["choices"]
        assert counters(workers.decode)["recomputed_prompts"] == before + 1


def test_another_tenants_ticket_loads_nothing(workers: Workers) -> None:
    route, body = text("secret")
    params = ticket_of(workers.prefill, route, body, key=API_KEY)
    taken = {**body, "kv_transfer_params": params}
    status, error = refusal(workers.strict, route, taken, key=OTHER_KEY)
    assert (status, error["code"]) == (503, "kv_transfer_failed")
    other = ask(workers.decode, route, taken, key=OTHER_KEY)
    assert other["usage"]["prompt_tokens_details"] == {"cached_tokens": 0, "transferred_tokens": 0}
    assert other["choices"] == ask(workers.single, route, body)["choices"]
    # The tenant itself can still use it: the workers derive its salt from its key alone.
    own = ask(workers.decode, route, taken, key=API_KEY)
    assert own["usage"]["prompt_tokens_details"]["transferred_tokens"] == own["usage"]["prompt_tokens"]


def test_a_prompt_without_room_on_the_prefill_worker_is_computed_under_either_policy(workers: Workers) -> None:
    route, body = text("no room")
    asked = {**body, "kv_transfer_params": {"do_remote_prefill": True, "ticket": None}}
    expected = ask(workers.single, route, body)["choices"]
    assert ask(workers.decode, route, asked)["choices"] == ask(workers.strict, route, asked)["choices"] == expected


def test_a_strict_decode_worker_refuses_prompts_that_no_prefill_worker_has_seen(workers: Workers) -> None:
    status, error = refusal(workers.strict, *text("plain"))
    assert (status, error["code"]) == (400, "kv_transfer_missing")
    before = counters(workers.decode)["recomputed_prompts"]
    ask(workers.decode, *text("plain on a decode worker"))
    assert counters(workers.decode)["recomputed_prompts"] == before + 1


def test_what_a_worker_cannot_do_is_refused_by_name(workers: Workers) -> None:
    route, body = text("refused")
    fetch = {"do_remote_prefill": True, "ticket": forged()}
    for worker, more, said in (
        (workers.single, {"kv_transfer_params": ASKED}, "--kv-transfer-config"),
        (workers.single, {"kv_transfer_params": fetch}, "--kv-transfer-config"),
        (workers.prefill, {"kv_transfer_params": fetch}, "kv_producer"),
        (workers.decode, {"kv_transfer_params": ASKED}, "kv_consumer"),
        (workers.prefill, {"kv_transfer_params": ASKED, "stream": True}, "stream: false"),
        (workers.prefill, {"kv_transfer_params": ASKED, "prompt": ["a", "b"]}, "one prompt"),
        (workers.decode, {"kv_transfer_params": fetch, "prompt": ["a", "b"]}, "one prompt"),
        (workers.decode, {"kv_transfer_params": {"do_remote_prefill": True}}, "without a ticket"),
        (workers.decode, {"kv_transfer_params": {**ASKED, **fetch}}, "send one"),
        (workers.decode, {"kv_transfer_params": {"do_remote_prefill": "yes"}}, "boolean"),
        (workers.decode, {"kv_transfer_params": "now"}, "kv_transfer_params"),
        (workers.decode, {"max_completion_tokens": 3}, "max_tokens"),
    ):
        status, error = refusal(worker, route, {**body, **more})
        assert status == 400
        assert said in error["message"]


def test_metrics_and_the_log_tell_what_was_transferred(workers: Workers) -> None:
    route, body = text("metrics")
    p_before, d_before = metrics(workers.prefill), metrics(workers.decode)
    taken = {**body, "kv_transfer_params": ticket_of(workers.prefill, route, body)}
    held = metrics(workers.prefill)
    assert held["kv_transfer_leases"] >= 1
    assert held["kv_transfer_held_pages"] > 0
    assert held["kv_transfer_handed_over_total"] == p_before["kv_transfer_handed_over_total"] + 1
    tokens = ask(workers.decode, route, taken)["usage"]["prompt_tokens"]
    after = metrics(workers.decode)
    gained = {name: after[name] - d_before[name] for name in after if name in d_before}
    assert gained["external_prefix_cache_queries_total"] == gained["external_prefix_cache_hits_total"] == tokens
    assert gained["kv_transfer_fetches_total"] == gained["kv_transfer_read_seconds_count"] == 1
    assert gained["kv_transfer_bytes_total"] > 0
    assert gained["kv_transfer_fetch_failures_total"] == 0
    assert gained["prefix_cache_hits_total"] == 0
    wait_until(lambda: "KV transfer: 1 prompts handed over" in workers.prefill.log)
    wait_until(lambda: "Fetches: 1, 0 failed" in workers.decode.log)
    assert "KV transfer" not in workers.single.log


def test_the_route_tells_peers_what_must_be_equal(workers: Workers) -> None:
    one, other = state(workers.prefill), state(workers.decode)
    assert (one["role"], other["role"]) == ("kv_producer", "kv_consumer")
    assert one["connector"] == "nixl"
    assert state(workers.strict)["load_failure_policy"] == "fail"
    for name in ("protocol", "layout_digest"):
        assert one[name] == other[name]
    for name in ("endpoint", "engine_id"):
        assert one[name] != other[name]
    assert bytes.fromhex(one["layout_digest"])
    assert one["endpoint"].startswith("127.0.0.1:")
    assert workers.prefill.http().get("/kv_transfer").status_code == 401
    missing = workers.single.http(API_KEY).get("/kv_transfer")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "kv_transfer_not_configured")


def test_neither_the_key_nor_the_endpoint_is_told_to_clients(workers: Workers) -> None:
    endpoint = state(workers.prefill)["endpoint"]
    for path in ("/version", "/v1/models", "/health", "/ready", "/kv", "/metrics", "/openapi.json", "/kv_transfer"):
        said = workers.prefill.http(API_KEY).get(path).text
        assert CLUSTER_KEY not in said
        assert path == "/kv_transfer" or endpoint not in said
    for kind in ("engine_process", "text_process"):
        for process in (workers.prefill.process.pid, *workers.prefill.children()[kind]):
            assert CLUSTER_KEY.encode() not in Path(f"/proc/{process}/cmdline").read_bytes()


def test_the_openapi_document_has_the_field(workers: Workers) -> None:
    document = workers.prefill.http(API_KEY).get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    assert set(schemas["KVTransferParams"]["properties"]) == {"do_remote_decode", "do_remote_prefill", "ticket"}
    for name in ("CompletionRequest", "ChatRequest", "ResponsesRequest"):
        assert "KVTransferParams" in json.dumps(schemas[name]["properties"]["kv_transfer_params"])
