"""What a proxy makes of a request's body: the prefill worker's request, and the decode worker's.

Values are passed on as the bytes that the client wrote, and what a prefill worker says to a decode worker as the bytes
that it wrote; nothing of either is read here except the fields that decide whether a hand-off can help.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import msgspec

from outrider.server.front.problems import Problem

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
LENGTH_FIELDS = {
    CHAT: ("max_tokens", "max_completion_tokens"),
    COMPLETIONS: ("max_tokens",),
    RESPONSES: ("max_output_tokens",),
}
"""Routes that generate text, and their fields for the longest answer."""
TRANSFER_FIELD = "kv_transfer_params"
ASK_FOR_HAND_OVER = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
NOT_OF_THE_FIRST_TOKEN = ("stream_options", "n", "best_of", "echo")
"""Fields that do not affect the first token of an answer, and that do not go with a request for that token alone."""

NULL = msgspec.Raw(b"null")

Fields = dict[str, msgspec.Raw]


class Skip(Enum):
    """Reasons to go to a decode worker directly, since a hand-off could not help."""

    SEVERAL_PROMPTS = "several_prompts"
    """A hand-off is that of one prompt."""
    PROMPT_LOGPROBS = "prompt_logprobs"
    """The decode worker must compute the prompt itself, since each of its positions is scored."""
    SHORT_PROMPT = "short_prompt"
    """Computing the prompt takes less time than handing it over."""


class _Handed(msgspec.Struct):
    kv_transfer_params: msgspec.Raw = NULL


class _Error(msgspec.Struct):
    code: str | None = None


class _Refusal(msgspec.Struct):
    error: _Error


def fields_of(body: bytes) -> Fields | None:
    """Returns the fields of a JSON object; None for anything else, which a decode worker then refuses by itself."""
    try:
        # The values as well, which are passed on unread: they are invalid if their text is not UTF-8, for example.
        msgspec.json.decode(body)
        fields = msgspec.json.decode(body, type=Fields)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    if TRANSFER_FIELD in fields and bytes(fields[TRANSFER_FIELD]) != b"null":
        raise Problem(
            f"{TRANSFER_FIELD} is what this proxy and its workers tell each other; leave it out",
            param=TRANSFER_FIELD,
            code="unknown_field",
        )
    return fields


def reason_to_skip(path: str, fields: Fields, *, characters_min: int) -> Skip | None:
    if path == COMPLETIONS:
        prompt = _value(fields, "prompt")
        if isinstance(prompt, list) and not (prompt and isinstance(prompt[0], int)) and len(prompt) != 1:
            return Skip.SEVERAL_PROMPTS
        if _value(fields, "echo") and _value(fields, "logprobs") is not None:
            return Skip.PROMPT_LOGPROBS
    if characters_min and _characters(path, fields) < characters_min:
        return Skip.SHORT_PROMPT
    return None


def for_prefill(path: str, fields: Fields) -> bytes:
    """Returns the request for the prompt alone: one token, not streamed, whose KV is handed over."""
    kept: dict[str, Any] = {name: value for name, value in fields.items() if name not in NOT_OF_THE_FIRST_TOKEN}
    kept |= {"stream": False, TRANSFER_FIELD: ASK_FOR_HAND_OVER, **dict.fromkeys(LENGTH_FIELDS[path], 1)}
    if "min_tokens" in fields:
        # Whether the first token may end the text depends on it, and nothing else does.
        least = _value(fields, "min_tokens")
        kept["min_tokens"] = min(1, least) if isinstance(least, int) else fields["min_tokens"]
    return msgspec.json.encode(kept)


def for_decode(fields: Fields, handed: msgspec.Raw) -> bytes:
    """Returns the client's request, with what the prefill worker said beside it."""
    return msgspec.json.encode(fields | {TRANSFER_FIELD: handed})


def handed_over(answer: bytes) -> msgspec.Raw | None:
    """Returns what a prefill worker tells the decode worker, unread; None if its answer has nothing of the kind."""
    try:
        handed = msgspec.json.decode(answer, type=_Handed).kv_transfer_params
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return None if bytes(handed) == b"null" else handed.copy()


def error_code(answer: bytes) -> str | None:
    """Returns the code in an answer that is OpenAI's error object."""
    try:
        return msgspec.json.decode(answer, type=_Refusal).error.code
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _value(fields: Fields, name: str) -> Any:
    raw = fields.get(name)
    try:
        return None if raw is None else msgspec.json.decode(raw)
    except (msgspec.MsgspecError, RecursionError):
        return None


def _characters(path: str, fields: Fields) -> int:
    """Returns about how long the prompt is; a token of a list counts as four characters."""
    if path != COMPLETIONS:
        names = ("messages", "tools", "instructions", "input")
        return sum(len(bytes(fields[name])) for name in names if name in fields)
    prompt = _value(fields, "prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    return 4 * len(prompt) if isinstance(prompt, list) else len(prompt) if isinstance(prompt, str) else 0
