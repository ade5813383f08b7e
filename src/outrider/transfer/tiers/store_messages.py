"""What a worker and its store process say to each other. Pages lie in memory that both have mapped."""

from __future__ import annotations

import msgspec

LARGEST_MESSAGE = 1 << 17


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    pass


class SetUp(Message, frozen=True, kw_only=True):
    """The first message to the process."""

    local_hostname: str
    metadata_server: str
    global_segment_size: int
    local_buffer_size: int
    protocol: str
    device_name: str
    master_server_address: str
    replica_num: int
    stage_bytes: int
    """Size of the mapped memory."""


class Ready(Message, frozen=True, kw_only=True):
    """The process is connected to the store."""


class Problem(Message, frozen=True, kw_only=True):
    """The process could not connect, and ends."""

    reason: str
    is_permanent: bool
    """Whether it makes no sense to try again: something must be installed or configured."""


class Ask(Message, frozen=True, kw_only=True):
    number: int
    keys: list[str]


class Put(Message, frozen=True, kw_only=True):
    """Store values, unless the store has some under their keys already."""

    number: int
    keys: list[str]
    offsets: list[int]
    sizes: list[int]


class Get(Message, frozen=True, kw_only=True):
    number: int
    keys: list[str]
    offsets: list[int]
    sizes: list[int]


class Remove(Message, frozen=True, kw_only=True):
    """Drop values that are not what their keys say. Nothing is answered."""

    keys: list[str]


class Reply(Message, frozen=True, kw_only=True):
    number: int
    codes: list[int]
    """What the store said of each key: for Ask 1 or 0, for Put 0, for Get the size of the value; below 0 on errors."""


ToProcess = SetUp | Ask | Put | Get | Remove
FromProcess = Ready | Problem | Reply

_to_process = msgspec.msgpack.Decoder(ToProcess)
_from_process = msgspec.msgpack.Decoder(FromProcess)


def encode(message: ToProcess | FromProcess) -> bytes:
    return msgspec.msgpack.encode(message)


def decode_to_process(frame: bytes) -> ToProcess:
    message: ToProcess = _to_process.decode(frame)
    return message


def decode_from_process(frame: bytes) -> FromProcess:
    message: FromProcess = _from_process.decode(frame)
    return message
