"""Frames for messages over a pipe to another process: the length in bytes, then the body."""

from __future__ import annotations

from typing import BinaryIO

LENGTH_BYTES = 4


def frame(body: bytes) -> bytes:
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


def length_of(head: bytes) -> int:
    """Returns the length of the body that follows these bytes."""
    return int.from_bytes(head, "little")


def read_frame(stream: BinaryIO) -> bytes | None:
    """Returns the next body; None at the end of the stream, or if the writer was killed in the middle of a frame."""
    head = stream.read(LENGTH_BYTES)
    if len(head) < LENGTH_BYTES:
        return None
    body = stream.read(length_of(head))
    return body if len(body) == length_of(head) else None
