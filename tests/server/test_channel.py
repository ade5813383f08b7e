"""Messages between the event loop and another process arrive, all of them and in order."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

import pytest
import zmq

from outrider.server.front.channel import MESSAGES_AT_ONCE, Channel

ROUNDS, COPIES = 5, 2 * MESSAGES_AT_ONCE + 1
END, QUIET = b"end", b"quiet"


def other_side(endpoint: str) -> None:
    """Says that it is there; then answers each frame with many, until it is told to end."""
    with zmq.Context() as context, context.socket(zmq.PAIR) as socket:
        socket.set_hwm(0)
        socket.connect(endpoint)
        socket.send(b"here")
        while (frame := socket.recv()) != END:
            for number in range(COPIES if frame != QUIET else 0):
                socket.send(b"%s/%d" % (frame, number))


async def converse(endpoint: str, fail_at: int | None) -> tuple[list[bytes], BaseException | None]:
    """What arrived, and what went wrong; the next frame is sent while answers to the last are still coming."""
    got: list[bytes] = []
    enough = asyncio.get_running_loop().create_future()

    def take(frame: bytes) -> None:
        if len(got) == fail_at:
            raise ValueError("cannot be read")
        got.append(frame)
        if len(got) % (COPIES // 2) == 1 and (sent := len(got) // (COPIES // 2)) < ROUNDS:
            channel.send(b"%d" % sent)
        if len(got) == 1 + ROUNDS * COPIES:
            enough.set_result(None)

    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    channel = Channel(context, endpoint, take)
    await asyncio.wait((enough, channel.failed), timeout=60, return_when=asyncio.FIRST_COMPLETED)
    problem = channel.failed.exception() if channel.failed.done() else None
    channel.send(END)
    await asyncio.sleep(0.1)
    channel.close()
    context.destroy(linger=0)
    return got, problem


@pytest.mark.parametrize("fail_at", [None, 0, 70])
def test_everything_arrives_in_order_until_something_cannot_be_read(tmp_path: Path, fail_at: int | None) -> None:
    endpoint = f"ipc://{tmp_path}/socket"
    thread = threading.Thread(target=other_side, args=(endpoint,), daemon=True)
    thread.start()
    got, problem = asyncio.run(converse(endpoint, fail_at))
    expected = [b"here", *(b"%d/%d" % (sent, number) for sent in range(ROUNDS) for number in range(COPIES))]
    assert got == expected[:fail_at]
    assert isinstance(problem, ValueError) == (fail_at is not None)
    thread.join(60)
    assert not thread.is_alive()


def test_what_arrives_while_something_is_sent_is_not_overlooked(tmp_path: Path) -> None:
    """The descriptor tells of an arrival once, and sending can take that in."""

    async def run() -> int:
        got: list[bytes] = []
        arrived = asyncio.Event()

        def take(frame: bytes) -> None:
            got.append(frame)
            if len(got) in (1, 1 + COPIES):
                arrived.set()

        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        channel = Channel(context, endpoint, take)
        await asyncio.wait_for(arrived.wait(), 60)
        arrived.clear()
        channel.send(b"0")
        # The answers come while the loop does not look.
        time.sleep(1)
        channel.send(QUIET)
        await asyncio.wait_for(arrived.wait(), 20)
        channel.send(END)
        await asyncio.sleep(0.1)
        channel.close()
        context.destroy(linger=0)
        return len(got)

    endpoint = f"ipc://{tmp_path}/socket"
    threading.Thread(target=other_side, args=(endpoint,), daemon=True).start()
    assert asyncio.run(run()) == 1 + COPIES
