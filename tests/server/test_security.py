"""Attacks that have succeeded against other engines, tried on this one. docs/serving.md has the limits.

unpickling of messages
    test_a_pickle_is_refused_by_every_decoder
    test_a_frame_that_is_no_message_is_refused
    tests/tidy: no_pickle
sockets that other users can reach
    test_only_http_on_the_loopback_address_can_be_reached
    test_the_socket_to_the_engine_lies_in_a_private_directory
transfer fields of clients and peers
    test_a_client_cannot_reach_the_transfer_plane
    test_disaggregation: test_a_decode_worker_reads_the_ticket_and_nothing_else
    test_disaggregation: test_a_ticket_that_is_not_of_this_cluster_is_refused
    test_disaggregation: test_another_tenants_ticket_loads_nothing
    test_disaggregation: test_neither_the_key_nor_the_endpoint_is_told_to_clients
    tests/transfer: test_an_offer_that_makes_no_sense_is_a_transfer_error
hand-overs that no decode worker fetches
    test_disaggregation_failures: test_kv_that_no_decode_worker_wants_is_given_back_by_an_idle_worker
    test_disaggregation_failures: test_a_full_prefill_worker_gives_no_ticket_and_waits_for_what_it_holds_when_it_ends
n, logprobs and lists without bounds
    test_everything_that_can_be_many_is_bounded_on_every_route
    test_errors: test_a_wrong_field_is_named
    test_prompts_times_n_are_bounded_by_the_queue
    test_access: test_configured_limits_hold, test_a_full_queue_says_when_to_come_back
schemas and grammars without bounds
    test_errors: test_a_wrong_form_is_refused
bodies: size, depth, slow senders
    test_access: test_a_body_that_is_too_large_is_refused_however_it_comes
    test_access: test_a_body_that_never_ends_is_left
    test_errors: test_a_body_that_is_no_request_is_refused
templates that never end or exhaust memory
    test_errors: test_a_template_that_does_not_end_is_interrupted_and_others_are_served
    test_a_template_that_eats_memory_is_an_error_of_the_request
    test_a_template_cannot_leave_its_sandbox
patterns with exponential time
    test_tool_calls: test_white_space_without_end_takes_no_time
invalid token ids
    test_token_ids_that_do_not_exist_harm_nobody
    test_token_ids_in_settings_are_checked_too
addresses that the server is made to fetch
    test_nothing_that_a_client_names_is_fetched
cache timing across tenants
    test_access: test_tenants_do_not_share_a_prefix_cache
state left over from an earlier request
    test_a_request_inherits_nothing_from_those_before_it
routes without a key, admin routes
    test_access: test_a_key_is_needed_on_every_route_but_health_and_the_page
    test_access: test_admin_routes_take_only_the_admin_key
web pages that reach a server without a key
    test_errors: test_a_foreign_host_header_is_refused_without_a_key
    test_errors: test_a_body_of_another_type_is_refused
"""

from __future__ import annotations

import pickle
import socket
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.server.running import RunningServer, wait_until
from tests.server.tiny_model import text_worker

from outrider.server.config import ServerConfig
from outrider.server.messages import Abort, decode_to_engine, decode_to_front, encode
from outrider.server.text_process.messages import BadText, Render, decode_answer, decode_order


class Evil:
    """An object that creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (open, (str(self.path), "w"))


def test_a_pickle_is_refused_by_every_decoder(tmp_path: Path) -> None:
    trap = tmp_path / "sprung"
    for decode in (decode_to_engine, decode_to_front, decode_order, decode_answer):
        with pytest.raises(msgspec.MsgspecError):
            decode(pickle.dumps(Evil(trap)))
    assert not trap.exists()


@pytest.mark.parametrize("frame", [b"", b"\x00", b"\xc1", encode(["Submit", 1]), encode(["System", "rm"]), encode({})])
def test_a_frame_that_is_no_message_is_refused(frame: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        decode_to_engine(frame)
    assert decode_to_engine(encode(Abort(request_id="x"))) == Abort(request_id="x")


def listening_sockets(pids: list[int]) -> list[str]:
    """Addresses (hexadecimal) that these processes accept TCP connections on."""
    inodes = set()
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            try:
                inodes.add(descriptor.readlink().name)
            except OSError:
                continue
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                found.append(fields[1].split(":")[0])
    return found


def test_only_http_on_the_loopback_address_can_be_reached(tiny: RunningServer) -> None:
    children = tiny.children()
    # How many text processes there are depends on who has been ended since: the next order starts another.
    assert {"engine_process", "text_process"} <= set(children)
    pids = [tiny.process.pid, *(pid for several in children.values() for pid in several)]
    assert listening_sockets(pids) == ["0100007F"]
    assert ServerConfig().host == "127.0.0.1"


def test_the_socket_to_the_engine_lies_in_a_private_directory(tiny: RunningServer) -> None:
    paths = [line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines() if "/outrider-" in line]
    assert paths
    for path in paths:
        directory = Path(path).parent
        if directory.exists():
            assert directory.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    "field",
    ["remote", "remote_host", "ticket", "salt", "adapter", "media", "prompt_embeds", "tenant", "request_id"],
)
def test_a_client_cannot_reach_the_transfer_plane(tiny: RunningServer, field: str) -> None:
    for path, body in (
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/responses", {"input": "x"}),
    ):
        answer = tiny.http().post(path, json=body | {field: {"do_remote_prefill": True}})
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "unknown_field"


@pytest.mark.parametrize("path", ["/detokenize", "/v1/completions"])
@pytest.mark.parametrize("token", [-1, 49152, 1 << 31, 1 << 63, 1 << 70])
def test_token_ids_that_do_not_exist_harm_nobody(tiny: RunningServer, path: str, token: int) -> None:
    answer = tiny.http().post(path, json={"tokens": [token]} if path == "/detokenize" else {"prompt": [1, token]})
    assert answer.status_code == 400
    assert tiny.http().post("/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code == 200


def test_a_request_inherits_nothing_from_those_before_it(tiny: RunningServer) -> None:
    http = tiny.http()
    plain = {"prompt": "The sea", "max_tokens": 24, "temperature": 0.9, "seed": 4, "return_token_ids": True}

    def text_of(body: dict[str, Any]) -> str:
        return str(http.post("/v1/completions", json=body).json()["choices"][0]["token_ids"])

    expected = text_of(plain)
    heavy = plain | {
        "logit_bias": {str(token): 90 for token in range(60)},
        "presence_penalty": 2,
        "repetition_penalty": 3,
        "allowed_token_ids": list(range(100)),
        "min_tokens": 24,
        "top_k": 2,
        "n": 8,
    }
    assert text_of(heavy) != expected
    # One that is left half-way gives its slots back with whatever is in them.
    with tiny.http() as other, other.stream("POST", "/v1/completions", json=heavy | {"stream": True}) as answer:
        lines = answer.iter_lines()
        next(lines)
    wait_until(lambda: 'num_requests_running{engine="0",model_name="tiny"} 0.0' in http.get("/metrics").text)
    assert text_of(plain) == expected


def test_a_template_that_eats_memory_is_an_error_of_the_request() -> None:
    template = "{% set ns = namespace(text='x' * 1000000) %}{% for m in messages %}{{ ns.text }}{% endfor %}"
    answer = text_worker(template).carry_out(Render(messages=[{"role": "user", "content": "x"}] * 40, tokens_max=10))
    assert isinstance(answer, BadText)
    assert "characters" in answer.message


def test_a_template_cannot_leave_its_sandbox(tiny: RunningServer) -> None:
    """What a client sends is data: it is not rendered."""
    attack = "{{ ''.__class__.__mro__[1].__subclasses__() }}{% for i in range(10**9) %}x{% endfor %}"
    http = tiny.http()
    body = {"messages": [{"role": "user", "content": attack}]}
    tokens = http.post("/tokenize", json=body).json()["tokens"]
    assert attack in http.post("/detokenize", json={"tokens": tokens}).json()["prompt"]


CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
COMPLETION: dict[str, Any] = {"prompt": "x", "max_tokens": 1}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT | {"n": 17}),
        ("/v1/chat/completions", CHAT | {"n": 1 << 62}),
        ("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 21}),
        ("/v1/chat/completions", {"messages": CHAT["messages"] * 1025}),
        (
            "/v1/chat/completions",
            CHAT | {"tools": [{"type": "function", "function": {"name": f"f{n}"}} for n in range(129)]},
        ),
        ("/v1/chat/completions", CHAT | {"stop": "x" * 257}),
        ("/v1/responses", {"input": [{"role": "user", "content": "x"}] * 1025}),
        ("/v1/responses", {"input": "x", "include": ["message.output_text.logprobs"], "top_logprobs": 21}),
        ("/tokenize", {"messages": CHAT["messages"] * 1025}),
    ],
)
def test_everything_that_can_be_many_is_bounded_on_every_route(
    tiny: RunningServer, path: str, body: dict[str, Any]
) -> None:
    answer = tiny.http().post(path, json=body)
    assert answer.status_code == 400, answer.text
    assert len(answer.content) < 1000


def test_prompts_times_n_are_bounded_by_the_queue(tiny: RunningServer) -> None:
    answer = tiny.http().post("/v1/completions", json={"prompt": ["x"] * 64, "n": 16, "max_tokens": 1})
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")


@pytest.mark.parametrize("token", [-1, 49152, 1 << 31, 1 << 63, 1 << 70])
@pytest.mark.parametrize("field", ["stop_token_ids", "allowed_token_ids", "logit_bias"])
def test_token_ids_in_settings_are_checked_too(tiny: RunningServer, field: str, token: int) -> None:
    value: Any = {str(token): 1.0} if field == "logit_bias" else [token]
    for path, body in (("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)):
        answer = tiny.http().post(path, json=body | {field: value})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"].startswith(field)


def test_nothing_that_a_client_names_is_fetched(tiny: RunningServer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.5)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/secret"
        for path, body in (
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": [_part("image_url", {"url": url})]}]}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": [_part("file", {"file_id": url})]}]}),
            ("/v1/responses", {"input": [{"role": "user", "content": [_part("input_image", url, "image_url")]}]}),
            ("/v1/responses", {"input": "x", "tools": [{"type": "mcp", "server_url": url}]}),
            ("/v1/completions", {"prompt": "x", "model": url}),
        ):
            answer = tiny.http().post(path, json=body)
            assert answer.status_code in (400, 404), answer.text
        with pytest.raises(TimeoutError):
            listener.accept()


def _part(kind: str, value: Any, field: str | None = None) -> dict[str, Any]:
    return {"type": kind, field or kind: value}
