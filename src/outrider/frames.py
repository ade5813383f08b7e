"""Messages over a pipe to a process and back: each behind its length in bytes."""

from __future__ import annotations

from typing import BinaryIO

LENGTH_BYTES = 4


def frame(body: bytes) -> bytes:
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


def length_of(head: bytes) -> int:
    """Of the body behind these bytes."""
    return int.from_bytes(head, "little")


def read_frame(stream: BinaryIO) -> bytes | None:
    """The next body; None at the end, which may come in the middle of one: whoever wrote it was killed."""
    head = stream.read(LENGTH_BYTES)
    if len(head) < LENGTH_BYTES:
        return None
    body = stream.read(length_of(head))
    return body if len(body) == length_of(head) else None
