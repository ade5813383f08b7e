"""Tickets are taken in the very form in which a prefill worker of the cluster sealed them, and in no other."""

from __future__ import annotations

import base64
from typing import Any

import msgspec
import pytest

from outrider.errors import ConfigError, RequestError
from outrider.transfer.messages import PROTOCOL
from outrider.transfer.tickets import ClusterKey, Ticket

SECRET = "a key that only these tests know"
KEY = ClusterKey(SECRET)
FIELDS: dict[str, Any] = {
    "version": PROTOCOL,
    "engine": "e",
    "endpoint": "10.0.0.1:7600",
    "lease": bytes(range(16)),
    "binding": bytes(range(16, 32)),
    "expires_s": 100.0,
    "settings": b"s",
}
TICKET = Ticket(**FIELDS)
SEALED = KEY.seal(TICKET)


def refused(sealed: Any, key: ClusterKey = KEY) -> None:
    with pytest.raises(RequestError, match="not from a worker of this cluster"):
        key.open(sealed)


def test_a_ticket_says_what_was_sealed() -> None:
    assert KEY.open(SEALED) == TICKET


def test_every_changed_character_is_noticed() -> None:
    """Also those whose last bits are not part of any byte."""
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_="
    for engine in ("e", "ee", "eee"):
        sealed = KEY.seal(msgspec.structs.replace(TICKET, engine=engine))
        for place, character in enumerate(sealed):
            for other in {character.swapcase(), *alphabet[::7], *alphabet[-4:]} - {character}:
                refused(sealed[:place] + other + sealed[place + 1 :])


@pytest.mark.parametrize(
    "change",
    [
        lambda sealed: sealed.rstrip("="),
        lambda sealed: sealed + "=",
        lambda sealed: sealed + "====",
        lambda sealed: sealed + "\n",
        lambda sealed: " " + sealed,
        lambda sealed: sealed[:20] + "!" + sealed[20:],
        lambda sealed: sealed[:20] + "\r\n" + sealed[20:],
        lambda sealed: sealed + "AAAA",
        lambda sealed: "AAAA" + sealed,
        lambda sealed: sealed[:-4],
        lambda sealed: sealed + sealed,
        lambda sealed: sealed.upper(),
        lambda sealed: sealed.encode(),
        lambda sealed: base64.b64encode(base64.urlsafe_b64decode(sealed)).decode(),
        lambda sealed: base64.urlsafe_b64decode(sealed).hex(),
        lambda sealed: "\uff21" + sealed[1:],
    ],
)
def test_other_writings_of_a_ticket_are_refused(change: Any) -> None:
    # Bytes whose standard encoding differs from the one for URLs.
    sealed = next(
        each
        for number in range(99)
        if "_" in (each := KEY.seal(msgspec.structs.replace(TICKET, lease=bytes([number] * 16)))) and each[-1] == "="
    )
    refused(change(sealed))
    KEY.open(sealed)


@pytest.mark.parametrize("sealed", [None, 5, b"", "", "=", "A" * 5000, [], {}, True, "\x00", "\ud800"])
def test_what_is_no_ticket_is_refused(sealed: Any) -> None:
    refused(sealed)


@pytest.mark.parametrize(
    "content",
    [
        [],
        list(FIELDS.values())[:-2],
        [*FIELDS.values(), 1],
        ["1", *list(FIELDS.values())[1:]],
        FIELDS,
        {**FIELDS, "more": 1},
        None,
    ],
)
def test_the_seal_of_something_else_is_no_ticket(content: Any) -> None:
    body = msgspec.msgpack.encode(content)
    refused(base64.urlsafe_b64encode(KEY._mac(body) + body).decode())


@pytest.mark.parametrize("secret", ["A key that only these tests know", SECRET + " ", SECRET[:-1]])
def test_the_ticket_of_a_cluster_with_a_similar_key_is_refused(secret: str) -> None:
    refused(SEALED, ClusterKey(secret))


def test_keys_for_different_purposes_differ() -> None:
    assert KEY.derive("ticket") != KEY.derive("control server")
    with pytest.raises(ConfigError):
        ClusterKey("short")


@pytest.mark.parametrize(
    ("changes", "binding", "now_s", "reason"),
    [
        ({}, FIELDS["binding"], 99.9, ""),
        ({}, FIELDS["binding"], 100.0, "expired"),
        ({}, bytes(16), 0.0, "another prompt"),
        ({}, b"", 0.0, "another prompt"),
        ({"binding": b""}, FIELDS["binding"], 0.0, "another prompt"),
        ({"version": PROTOCOL + 1}, FIELDS["binding"], 0.0, "another version"),
    ],
)
def test_a_ticket_is_of_use_to_one_prompt_and_for_a_while(
    changes: dict[str, Any], binding: bytes, now_s: float, reason: str
) -> None:
    refusal = Ticket(**FIELDS | changes).refusal(binding, now_s)
    assert reason in refusal
    assert bool(reason) == bool(refusal)
