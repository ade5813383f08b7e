"""What a request says about KV of other workers (`kv_transfer_params`), and what a prefill worker answers.

proxy ──do_remote_decode──▶ prefill worker ──ticket──▶ proxy ──do_remote_prefill, ticket──▶ decode worker
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

from outrider.server.front.problems import Problem
from outrider.server.messages import Ending, Facts, TransferFacts
from outrider.server.protocol.fields import SharedFields

FIELD = "kv_transfer_params"
Body = TypeVar("Body", bound=SharedFields)


class HandOff(NamedTuple):
    """A request's part in a hand-off: none of these for an ordinary request."""

    hand_over: bool = False
    ticket: str | None = None
    compute_prompt: bool = False
    """Whether the prefill worker had no room to hold the KV: the prompt is computed here, whatever the policy."""


def asks_for_hand_over(body: SharedFields) -> bool:
    return body.kv_transfer_params is not None and bool(body.kv_transfer_params.do_remote_decode)


def cut_to_first_token(body: Body) -> Body:
    """Returns a request to a prefill worker without what only the decode worker needs. Proxies send what the client
    sent, with a length of one token in some fields; what is left contradicts it."""
    if not asks_for_hand_over(body):
        return body
    one = {"n": 1, "best_of": None, "echo": False, "max_tokens": 1, "max_completion_tokens": 1}
    update: dict[str, Any] = {name: value for name, value in one.items() if name in type(body).model_fields}
    if "min_tokens" in type(body).model_fields:
        # Whether the first token may end the text depends on it, and no more than that.
        update["min_tokens"] = min(1, getattr(body, "min_tokens", 0))
    return body.model_copy(update=update)


def hand_off_of(body: SharedFields, facts: Facts) -> HandOff:
    """Returns what a request asks for, or refuses it where this worker cannot do that."""
    asked, transfer = body.kv_transfer_params, facts.transfer
    if asked is None or not (asked.do_remote_decode or asked.do_remote_prefill):
        if transfer is not None and not transfer.hands_over and transfer.load_failure_policy == "fail":
            raise _problem(
                "the request brings no KV from a prefill worker, and this worker computes no prompts "
                "(kv_load_failure_policy fail); send it to a prefill worker first",
                code="kv_transfer_missing",
            )
        return HandOff()
    if asked.do_remote_decode and asked.do_remote_prefill:
        raise _problem("do_remote_decode is for a prefill worker and do_remote_prefill for a decode worker; send one")
    if transfer is None:
        raise _problem(
            "this server neither hands KV over nor takes it; start it with --kv-transfer-config and --cluster-key, or "
            f"leave {FIELD} out",
            code="kv_transfer_not_configured",
        )
    return _hand_over(body, transfer) if asked.do_remote_decode else _fetch(body, transfer)


def _hand_over(body: SharedFields, transfer: TransferFacts) -> HandOff:
    if not transfer.hands_over:
        raise _problem("this worker hands nothing over (kv_role kv_consumer); send the request to a prefill worker")
    if body.stream:
        raise _problem("a hand-over (do_remote_decode) is answered whole; send stream: false", param="stream")
    return HandOff(hand_over=True)


def _fetch(body: SharedFields, transfer: TransferFacts) -> HandOff:
    asked = body.kv_transfer_params
    assert asked is not None
    if not transfer.fetches:
        raise _problem("this worker only computes prompts (kv_role kv_producer); send the request to a decode worker")
    if asked.ticket is not None:
        return HandOff(ticket=asked.ticket)
    if "ticket" not in asked.model_fields_set:
        raise _problem(
            "do_remote_prefill comes without a ticket, so no prefill worker of this cluster computed the prompt; pass "
            "on what the prefill worker returned, unchanged"
        )
    return HandOff(compute_prompt=True)


def _problem(message: str, *, param: str = FIELD, code: str | None = None) -> Problem:
    return Problem(f"{FIELD}: {message}", param=param, code=code)


def transfer_answer(ending: Ending, request_id: str, facts: Facts) -> dict[str, Any]:
    """Returns the `kv_transfer_params` of a prefill worker's answer, which proxies pass on without reading them.

    All fields but the ticket are those of vLLM, for proxies that look for them.
    """
    assert facts.transfer is not None, "only a worker with a transfer configuration hands over"
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": facts.transfer.engine,
        "remote_request_id": request_id,
        "remote_block_ids": [],
        "remote_host": None,
        "remote_port": None,
        "tp_size": 1,
        "remote_num_tokens": ending.prompt_tokens,
        "ticket": ending.ticket,
    }
