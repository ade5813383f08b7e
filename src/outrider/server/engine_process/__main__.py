"""Entry point of the engine process: `python -m outrider.server.engine_process`, started by the front end.

Its settings are the first line of its standard input. When that input ends, the front end is gone, and this process
exits too. Signals that a terminal or a service manager sends to all processes are left to the front end.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading

import msgspec
import zmq

from outrider.errors import OutriderError
from outrider.server.messages import Broken, Loading, Setup, encode

BROKEN_STATUS = 3
ORPHANED_STATUS = 4


def main() -> int:
    # Hardly anything that is loaded is ever freed: searching it for garbage would only take time, now and later.
    gc.disable()
    for ignored in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", stream=sys.stderr)
    setup = msgspec.json.decode(sys.stdin.buffer.readline(), type=Setup)
    threading.Thread(target=_end_with_front_end, daemon=True).start()
    socket: zmq.Socket[bytes] = zmq.Context().socket(zmq.PAIR)
    socket.set_hwm(0)
    socket.connect(setup.endpoint)

    def progress(what: str, done: int, total: int) -> None:
        socket.send(encode(Loading(what=what, done=done, total=total)))

    try:
        # Importing torch takes seconds, and nothing above needs it.
        from outrider.engine.build import build_engine
        from outrider.engine.step_costs import know_costs
        from outrider.server.engine_process.loop import EngineLoop
        from outrider.server.engine_process.warm_up import warm_up

        engine = build_engine(setup.engine, progress=progress)
    except OutriderError as error:
        socket.send(encode(Broken(kind=type(error).__name__, message=str(error))))
        return BROKEN_STATUS
    warm_up(engine)
    know_costs(engine, progress)
    gc.freeze()
    gc.enable()
    EngineLoop(engine, socket).run()
    return 0


def _end_with_front_end() -> None:
    # Not through sys.stdin: the interpreter would wait for its lock when it exits.
    while os.read(0, 1 << 16):
        pass
    os._exit(ORPHANED_STATUS)


if __name__ == "__main__":
    raise SystemExit(main())
