"""What prefill and decode workers are sent, and which requests go to a decode worker directly."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from tests.proxy.fakes import TICKET, Exchange, FakeWorker, Running, decode, prefill, running

ROUTES = {
    "/v1/completions": {"prompt": "Once upon a time"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello"}]},
    "/v1/responses": {"input": "Hello"},
}


async def ask(path: str, body: bytes, **settings: Any) -> tuple[httpx.Response, FakeWorker, FakeWorker, Running]:
    p, d = FakeWorker(prefill), FakeWorker(decode)
    async with running([p], [d], **settings) as proxy:
        answer = await proxy.client.post(path, content=body, headers={"Content-Type": "application/json"})
    return answer, p, d, proxy


@pytest.mark.parametrize(
    ("path", "lengths"),
    [
        ("/v1/completions", {"max_tokens": 1}),
        ("/v1/chat/completions", {"max_tokens": 1, "max_completion_tokens": 1}),
        ("/v1/responses", {"max_output_tokens": 1}),
    ],
)
def test_a_prefill_worker_is_asked_for_one_token_and_its_kv(path: str, lengths: dict[str, int]) -> None:
    given = ROUTES[path] | {"temperature": 0.5, "stream": False, "logprobs": True, "n": 3, "stream_options": {}}
    _answer, p, _d, _proxy = asyncio.run(ask(path, json.dumps(given).encode()))
    asked = p.requests[0].json
    assert asked.pop("kv_transfer_params") == {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
    assert asked == ROUTES[path] | {"temperature": 0.5, "logprobs": True, "stream": False} | lengths


@pytest.mark.parametrize(("given", "asked"), [(0, 0), (1, 1), (7, 1)])
def test_whether_the_first_token_may_end_the_text_is_said(given: int, asked: int) -> None:
    body = json.dumps({"prompt": "x", "min_tokens": given}).encode()
    _answer, p, d, _proxy = asyncio.run(ask("/v1/completions", body))
    assert (p.requests[0].json["min_tokens"], d.requests[0].json["min_tokens"]) == (asked, given)


def test_what_both_said_arrives_at_the_decode_worker_byte_for_byte() -> None:
    # Numbers that no decoder keeps as they were written, blanks, and escapes.
    given = b'{"prompt":"\\u00e9\\ud83d\\ude00",  "seed":123456789012345678901234567890, "top_p":1.0e-05, "x":[1, 2]}'
    answer, _p, d, _proxy = asyncio.run(ask("/v1/completions", given))
    assert answer.json() == {"choices": [{"text": "ok"}]}
    got = d.requests[0].body
    assert f'"kv_transfer_params":{TICKET}'.encode() in got
    for piece in (b'"\\u00e9\\ud83d\\ude00"', b"123456789012345678901234567890", b"1.0e-05", b"[1, 2]"):
        assert piece in got
    assert set(d.requests[0].json) == {"prompt", "seed", "top_p", "x", "kv_transfer_params"}


@pytest.mark.parametrize(
    ("fields", "outcome"),
    [
        ({"prompt": ["one", "two"]}, "skipped_several_prompts"),
        ({"prompt": [[1], [2]]}, "skipped_several_prompts"),
        ({"prompt": "scored", "echo": True, "logprobs": 0}, "skipped_prompt_logprobs"),
        ({"prompt": "short"}, "skipped_short_prompt"),
        ({"prompt": [1, 2, 3]}, "skipped_short_prompt"),
        ({"prompt": ["one text that is long enough"]}, "handed_over"),
        ({"prompt": list(range(9))}, "handed_over"),
        ({"prompt": "echoed, and long enough", "echo": True}, "handed_over"),
    ],
)
def test_a_hand_off_that_cannot_help_is_left_out(fields: dict[str, Any], outcome: str) -> None:
    async def scenario() -> tuple[float, int, Any]:
        p, d = FakeWorker(prefill), FakeWorker(decode)
        async with running([p], [d], prompt_characters_min=20) as proxy:
            assert (await proxy.complete(**fields)).status_code == 200
            return await proxy.metric("hand_offs_total", outcome=outcome), len(p.requests), d.requests[0].json

    counted, asked, sent = asyncio.run(scenario())
    assert counted == 1
    assert asked == (outcome == "handed_over")
    assert ("kv_transfer_params" in sent) == (outcome == "handed_over")


def test_a_prefill_worker_that_hands_nothing_over_is_no_obstacle() -> None:
    async def plain(exchange: Exchange) -> None:
        await exchange.answer('{"choices":[]}')

    async def scenario() -> tuple[int, Any, float]:
        p, d = FakeWorker(plain), FakeWorker(decode)
        async with running([p], [d]) as proxy:
            status = (await proxy.complete()).status_code
            return status, d.requests[0].json, await proxy.metric("hand_offs_total", outcome="without_kv")

    assert asyncio.run(scenario()) == (200, {"prompt": "Once upon a time"}, 1)


BAD_BODIES = (
    b"",
    b"[1]",
    b"null",
    b'"x"',
    b"{",
    b"{} {}",
    b'{"prompt": "x",}',
    b'{"prompt": NaN}',
    b"[" * 9000,
    b'{"prompt": ' + b"[" * 9000 + b"}",
    b'{"prompt": "\xff"}',
    b'{"prompt": "x", "echo": "\xff"}',
    b'{"prompt": "x", "\xff": 1}',
    b'{"prompt": "\\ud800"}',
    b'{"prompt": "x", "user": "\\ud800"}',
    b'{"prompt": "x", "min_tokens": 1e999}',
    b'\xef\xbb\xbf{"prompt": "x"}',
    '{"prompt": "x"}'.encode("utf-16"),
)


@pytest.mark.parametrize("body", BAD_BODIES)
@pytest.mark.parametrize("path", ROUTES)
def test_a_body_that_is_no_object_is_left_to_the_decode_worker(path: str, body: bytes) -> None:
    answer, p, d, _proxy = asyncio.run(ask(path, body, prompt_characters_min=1))
    assert (answer.status_code, len(p.requests), d.requests[0].body) == (200, 0, body)


def test_clients_may_not_speak_about_kv() -> None:
    body = b'{"prompt":"x","kv_transfer_params":{"do_remote_prefill":true,"ticket":"mine"}}'
    answer, p, d, _proxy = asyncio.run(ask("/v1/completions", body))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "kv_transfer_params")
    assert not p.requests + d.requests


@pytest.mark.parametrize(
    "path", ["/admin/cache/reset", "/%61dmin/x", "//admin/x", "/v1/../admin/x", "/./admin/x", "/v1//..//admin//x"]
)
def test_admin_routes_of_workers_are_not_reached(path: str) -> None:
    """Nor are they in writings that a server in front of a worker would resolve."""

    async def scenario() -> tuple[bytes, FakeWorker, FakeWorker]:
        p, d = FakeWorker(prefill), FakeWorker(decode)
        async with running([p], [d]) as proxy:
            url = proxy.client.base_url
            # A client of our own, since others resolve such paths by themselves.
            reader, writer = await asyncio.open_connection(url.host, url.port)
            head = f"POST {path} HTTP/1.1\r\nHost: {url.host}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
            writer.write(head.encode())
            answer = await reader.read()
            writer.close()
            return answer, p, d

    answer, p, d = asyncio.run(scenario())
    assert answer.startswith(b"HTTP/1.1 404 ")
    assert b"no admin routes" in answer
    assert not p.requests + d.requests


def test_headers_that_matter_arrive_at_both_workers() -> None:
    async def scenario() -> tuple[httpx.Response, Exchange, Exchange]:
        p, d = FakeWorker(prefill), FakeWorker(decode)
        async with running([p], [d]) as proxy:
            headers = {"Authorization": "Bearer K", "X-Request-Id": "r-7", "traceparent": "00-a-b-01", "Cookie": "c=1"}
            answer = await proxy.client.post("/v1/completions", json={"prompt": "x"}, headers=headers)
            return answer, p.requests[0], d.requests[0]

    answer, *sent = asyncio.run(scenario())
    assert answer.headers["x-request-id"] == "r-7"
    assert answer.headers["retry-after"] == "7"
    for exchange in sent:
        assert exchange.headers["authorization"] == "Bearer K"
        assert exchange.headers["x-request-id"] == "r-7"
        assert exchange.headers["traceparent"] == "00-a-b-01"
        assert "cookie" not in exchange.headers


@pytest.mark.parametrize(
    ("given", "passed_on"),
    [
        ("http://{worker}/v1/models?a=%2F", "/v1/models?a=%2F"),
        ("https://{worker}/v1/models", "/v1/models"),
        ("http://{worker}//elsewhere/x", "/elsewhere/x"),
        ("/v1/models", "/v1/models"),
        ("http://elsewhere:80/x", "http://elsewhere:80/x"),
        ("http://[no address/x", "http://[no address/x"),
    ],
)
def test_a_redirect_of_a_worker_to_itself_leads_through_the_proxy(given: str, passed_on: str) -> None:
    async def redirect(exchange: Exchange) -> None:
        location = given.format(worker=exchange.headers["host"])
        exchange.writer.write(f"HTTP/1.1 307 X\r\nLocation: {location}\r\nContent-Length: 0\r\n\r\n".encode())
        await exchange.writer.drain()

    async def scenario() -> httpx.Response:
        async with running([FakeWorker(prefill)], [FakeWorker(redirect)]) as proxy:
            return await proxy.client.get("/v1/models/")

    answer = asyncio.run(scenario())
    assert (answer.status_code, answer.headers["location"]) == (307, passed_on)


def test_a_request_without_an_id_gets_one() -> None:
    answer, p, d, _proxy = asyncio.run(ask("/v1/completions", b'{"prompt":"x"}'))
    name = answer.headers["x-request-id"]
    assert len(name) == 24
    assert {p.requests[0].headers["x-request-id"], d.requests[0].headers["x-request-id"]} == {name}


@pytest.mark.parametrize(
    ("method", "target"),
    [("GET", "/v1/models"), ("GET", "/kv?x=%2F&y"), ("POST", "/tokenize"), ("GET", "/v1/models/a%2Fb")],
)
def test_other_routes_go_to_a_decode_worker_as_they_are(method: str, target: str) -> None:
    async def scenario() -> tuple[int, Exchange]:
        p, d = FakeWorker(prefill), FakeWorker(decode)
        async with running([p], [d]) as proxy:
            answer = await proxy.client.request(method, target, content=b'{"a": 1}' if method == "POST" else None)
            assert not p.requests
            return answer.status_code, d.requests[0]

    status, sent = asyncio.run(scenario())
    assert (status, sent.method, sent.target) == (200, method, target)
    assert sent.body == (b'{"a": 1}' if method == "POST" else b"")
