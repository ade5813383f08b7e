"""Attacks that other engines have fallen to, tried on this one; further ones are in test_errors and test_access.

| what others got wrong                       | tried in                                                        |
|---------------------------------------------|-----------------------------------------------------------------|
| unpickling what arrives                     | here, and tests/tidy                                            |
| sockets that others can reach               | here                                                            |
| transfer fields of clients                  | here                                                            |
| n, logprobs, schema and body without bounds | test_errors, test_access                                        |
| templates that never end                    | test_errors; templates that eat memory: here                    |
| token ids that do not exist                 | test_errors, here                                               |
| a cache that tells tenants of each other    | test_access                                                     |
| state of a slot that its next user inherits | here                                                            |
| routes without a key, admin routes          | test_access                                                     |
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.server.running import RunningServer, wait_until
from tests.server.tiny_model import real_text

from outrider.server.config import ServerConfig
from outrider.server.messages import Abort, decode_to_engine, decode_to_front, encode
from outrider.server.text_process.messages import BadText, Render, TextSetup, decode_answer, decode_order
from outrider.server.text_process.worker import TextWorker


class Evil:
    """Whoever unpickles it creates a file."""

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
    pids = [tiny.process.pid, *(pid for several in tiny.children().values() for pid in several)]
    assert len(pids) == 4
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
    "field", ["kv_transfer_params", "remote", "salt", "adapter", "media", "prompt_embeds", "tenant", "request_id"]
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
    worker = TextWorker(
        TextSetup(
            tokenizer=real_text().tokenizer.to_json(),
            tokenizer_source="test",
            bos_id=None,
            eos_ids=(),
            templates={"default": template},
            template_source="test",
            template_variables={},
            memory_bytes_max=1 << 34,
        )
    )
    answer = worker.obey(Render(messages=[{"role": "user", "content": "x"}] * 40, tokens_max=10))
    assert isinstance(answer, BadText)
    assert "characters" in answer.message


def test_a_template_cannot_leave_its_sandbox(tiny: RunningServer) -> None:
    """What a client sends is data: it is not rendered."""
    attack = "{{ ''.__class__.__mro__[1].__subclasses__() }}{% for i in range(10**9) %}x{% endfor %}"
    http = tiny.http()
    body = {"messages": [{"role": "user", "content": attack}]}
    tokens = http.post("/tokenize", json=body).json()["tokens"]
    assert attack in http.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
