"""Messages between a decode worker (D) and a prefill worker (P): typed, as MessagePack. Nothing is ever unpickled.

    D ──Hello──▶ P      is this worker's KV of any use to us?          P ──Welcome | Refused──▶ D
    D ──Fetch──▶ P      claim a lease                                  P ──Offered | Refused──▶ D
    D ──Renew──▶ P      keep the pages of these leases                 (no answer)
    D ──Confirm──▶ P    did the lease hold until now?                  P ──Confirmed──▶ D
    D ──Release──▶ P    the pages are not needed any more              (no answer)

Every message may be lost, late or repeated. A repeated question gets the same answer.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from outrider.errors import TransferError

PROTOCOL = 2
"""Raised whenever these messages, a ticket or the order of bytes in a page change their meaning."""
MESSAGE_BYTES_MAX = 4 << 20
LEASE_BYTES = 16


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True, forbid_unknown_fields=True):
    """Base of all messages. They are encoded as arrays, without field names."""


class Part(msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """Base of the parts of messages."""


class Hello(Message, frozen=True, kw_only=True):
    digest: bytes
    """Digest of the protocol and of the target's KV: `offers.layout_digest`. It is compared before anything else."""
    reader: str
    """Engine id of the worker that asks, new at each start."""


class Signature(Part, frozen=True, kw_only=True):
    """`offers.GroupSignature` on the wire."""

    name: str
    kind: str
    slot_bytes: int
    reach: int
    owner: str
    identity: str


class Welcome(Message, frozen=True, kw_only=True):
    engine: str
    signatures: list[Signature]
    """The KV groups of this worker, in the order of its layout."""
    lease_s: float
    """How long this worker holds KV for a reader that does not prolong its lease."""
    introduction: bytes
    """What the link of the worker that asks must know before it can read: `Link.introduction`."""


class Fetch(Message, frozen=True, kw_only=True):
    lease: bytes
    reader: str


class ScoredToken(Part, frozen=True, kw_only=True):
    """A token with its log-probability and those of the most likely tokens."""

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


class OfferedPages(Part, frozen=True, kw_only=True):
    """The slots of one group that are held, and the pages that hold them."""

    group: int
    start: int
    end: int
    page_tokens: int
    pages: list[int]
    """Pages under [start, end), in order."""


class Offered(Message, frozen=True, kw_only=True):
    lease: bytes
    engine: str
    binding: bytes
    num_tokens: int
    """Length of the prompt, which `binding` names."""
    first_token: int
    """The token that P sampled after the prompt."""
    logprobs: ScoredToken | None
    seed: int
    drafts: list[int]
    """Drafts of the tokens after the first one, for D to verify in its first step."""
    drafts_worth_asking: int | None
    """How many drafts P would ask its drafter for next; None for as many as may be."""
    groups: list[OfferedPages]


class Renew(Message, frozen=True, kw_only=True):
    leases: list[bytes]
    reader: str


class Confirm(Message, frozen=True, kw_only=True):
    lease: bytes
    reader: str
    question: int
    """The reader's number of a hand-off, which the answer repeats: a late answer to an earlier hand-off under the same
    lease says nothing about what was read since."""
    digests_of: list[tuple[int, int, int]] = []
    """(P's group number, start, end) of slots whose digest is asked for; empty without byte checks."""


class Confirmed(Message, frozen=True, kw_only=True):
    lease: bytes
    question: int
    held: bool
    """Whether the pages were in place from the offer until now."""
    digests: list[bytes] = []


class Release(Message, frozen=True, kw_only=True):
    lease: bytes
    reader: str


class Refused(Message, frozen=True, kw_only=True):
    lease: bytes = b""
    """The lease that is refused; empty if the worker is."""
    reason: str
    signatures: list[Signature] = []
    """The KV groups of a worker that refuses a greeting because they differ, so that its sender can tell in what."""


AnyMessage = Hello | Welcome | Fetch | Offered | Renew | Confirm | Confirmed | Release | Refused

encode: Callable[[Message], bytes] = msgspec.msgpack.Encoder().encode
_decode: Callable[[bytes], Message] = msgspec.msgpack.Decoder(AnyMessage).decode


def decode(frame: bytes) -> Message:
    """Returns the message in a frame. Raises TransferError for anything else."""
    if len(frame) > MESSAGE_BYTES_MAX:
        raise TransferError(f"a peer sent a message of {len(frame):,} bytes; at most {MESSAGE_BYTES_MAX:,} are taken")
    try:
        return _decode(frame)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise TransferError(f"a peer sent something that is no message: {error}") from error
