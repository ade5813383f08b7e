"""What a proxy carries from a prefill worker to a decode worker: opaque to it, and useless for any other prompt.

A ticket names the lease and where to ask for it. It is authenticated under the cluster's key, so a decode worker never
talks to an address that a client made up; and it names the prompt it is for, which the decode worker compares with its
own tokens and tenant.
"""

from __future__ import annotations

import hmac
from base64 import urlsafe_b64decode, urlsafe_b64encode
from hashlib import blake2b, sha256

import msgspec

from outrider.errors import ConfigError, RequestError
from outrider.transfer.messages import PROTOCOL

MAC_BYTES = 32
TICKET_CHARACTERS_MAX = 2048
KEY_CHARACTERS_MIN = 16


class Ticket(msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    version: int
    engine: str
    endpoint: str
    lease: bytes
    binding: bytes
    expires_s: float
    """Time of day after which the ticket is not worth a question. The lease itself ends by the prefill worker's
    clock."""
    settings: bytes = b""
    """Digest of the sampling settings that the first token was drawn with. A proxy may have changed them."""

    def refusal(self, binding: bytes, now_s: float) -> str:
        """Returns why this ticket, which is of this cluster, is of no use to a request with this binding; nothing if it
        is of use. `now_s`: the time of day."""
        if self.version != PROTOCOL:
            return "the ticket is of another version of the protocol"
        if self.binding != binding:
            return (
                "the ticket is for another prompt, or for another tenant's (workers of different models make different "
                "prompts of one text)"
            )
        if now_s >= self.expires_s:
            return f"the ticket has expired, {now_s - self.expires_s:,.0f} s ago by this machine's clock"
        return ""


class ClusterKey:
    """The secret that the workers of a cluster share. Every use has a key of its own, derived from it."""

    def __init__(self, secret: str) -> None:
        if not isinstance(secret, str) or len(secret) < KEY_CHARACTERS_MIN:
            raise ConfigError(
                f"the cluster key must have at least {KEY_CHARACTERS_MIN} characters; make one with: "
                "python3 -c 'import secrets; print(secrets.token_urlsafe(32))'"
            )
        self._secret = secret.encode()

    def derive(self, purpose: str) -> bytes:
        """Returns 32 bytes that only holders of the secret can compute, for one purpose."""
        root = sha256(self._secret).digest()
        return blake2b(purpose.encode(), key=root, digest_size=32).digest()

    def seal(self, ticket: Ticket) -> str:
        body = msgspec.msgpack.encode(ticket)
        return urlsafe_b64encode(self._mac(body) + body).decode()

    def open(self, sealed: str) -> Ticket:
        """Returns the ticket if it was sealed with this key. Raises RequestError otherwise."""
        refusal = RequestError(
            "kv_transfer_params: the ticket is not from a worker of this cluster; pass on what the prefill worker "
            "returned, unchanged, and give all workers the same --cluster-key"
        )
        if not isinstance(sealed, str) or len(sealed) > TICKET_CHARACTERS_MAX:
            raise refusal
        try:
            raw = urlsafe_b64decode(sealed.encode("ascii"))
        except ValueError:
            raise refusal from None
        # The decoder takes other padding, other bits at the end and characters in between, too.
        if urlsafe_b64encode(raw).decode() != sealed:
            raise refusal
        mac, body = raw[:MAC_BYTES], raw[MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(body)):
            raise refusal
        try:
            return msgspec.msgpack.decode(body, type=Ticket)
        except msgspec.MsgspecError:
            raise refusal from None

    def _mac(self, body: bytes) -> bytes:
        return blake2b(body, key=self.derive("ticket"), digest_size=MAC_BYTES).digest()
