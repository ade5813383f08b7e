"""Entry point of a text process: `python -m outrider.server.text_process`, started by the front end.

It ends when its standard input does. Its standard output carries answers only.
"""

from __future__ import annotations

import os
import resource
import signal
import sys

from outrider.frames import read_frame
from outrider.server.text_process.messages import decode_facts, decode_order, framed
from outrider.server.text_process.worker import TextWorker

MEMORY_BYTES_MAX = 4 << 30
"""Address space of this process; a template that needs more gets a MemoryError."""


def main() -> int:
    for ignored in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)
    orders = sys.stdin.buffer
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    # Libraries that print to standard output must not corrupt the answers.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    first = read_frame(orders)
    if first is None:
        return 0
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES_MAX, MEMORY_BYTES_MAX))
    worker = TextWorker(decode_facts(first))
    while (frame := read_frame(orders)) is not None:
        answers.write(framed(worker.carry_out(decode_order(frame))))
        answers.flush()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
