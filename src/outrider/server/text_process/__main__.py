"""Entry point of a text process: `python -m outrider.server.text_process`, started by the front end.

It ends when its standard input does. It never writes anything but answers to its standard output.
"""

from __future__ import annotations

import os
import resource
import signal
import sys

from outrider.frames import read_frame
from outrider.server.text_process.messages import decode_order, decode_setup, framed
from outrider.server.text_process.worker import TextWorker


def main() -> int:
    for ignored in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)
    orders = sys.stdin.buffer
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    # Whatever a library prints must not get in between.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    first = read_frame(orders)
    if first is None:
        return 0
    setup = decode_setup(first)
    resource.setrlimit(resource.RLIMIT_AS, (setup.memory_bytes_max, setup.memory_bytes_max))
    worker = TextWorker(setup)
    while (frame := read_frame(orders)) is not None:
        answers.write(framed(worker.obey(decode_order(frame))))
        answers.flush()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
