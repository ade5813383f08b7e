"""The trailer of a page outside the device: by it, a value that is not what its key says is never used.

    value     [ bytes of the page ][ version | digest of version, key and bytes under a secret ]

A process that can write to a shared store and does not know the secret cannot make a value that is used.
"""

from __future__ import annotations

from hashlib import blake2b, sha256
from hmac import compare_digest

VERSION = b"OUTRPG1\0"
DIGEST_BYTES = 24
TRAILER_BYTES = len(VERSION) + DIGEST_BYTES
Data = bytes | bytearray | memoryview


class Sealer:
    def __init__(self, secret: bytes) -> None:
        """`secret`: at most 64 bytes, known to all workers whose values are to be used here."""
        self._secret = secret

    def trailer(self, key: bytes, data: Data) -> bytes:
        """Returns what goes behind the bytes of the page with this key."""
        # The pages are long: SHA-256 has instructions of its own, and the secret is mixed in afterwards.
        hasher = sha256(len(key).to_bytes(4, "little") + key)
        hasher.update(data)
        return VERSION + blake2b(VERSION + hasher.digest(), key=self._secret, digest_size=DIGEST_BYTES).digest()

    def is_intact(self, key: bytes, data: Data, trailer: Data) -> bool:
        """Whether these are the bytes that were sealed under this key."""
        return compare_digest(self.trailer(key, data), bytes(trailer))
