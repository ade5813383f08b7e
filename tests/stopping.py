"""Stopping a process, as an overloaded or paused machine does."""

import signal
import subprocess
import time
from pathlib import Path
from typing import Any

LIMIT_S = 5.0


def stop(process: subprocess.Popen[Any]) -> None:
    """Returns once no thread of the process runs any more, which is some time after the signal was sent."""
    process.send_signal(signal.SIGSTOP)
    end_s = time.monotonic() + LIMIT_S
    while not _all_stopped(process.pid):
        assert time.monotonic() < end_s, f"process {process.pid} does not stop"
        time.sleep(0.001)


def _all_stopped(pid: int) -> bool:
    threads = Path(f"/proc/{pid}/task").glob("*/status")
    return all("T (stopped)" in thread.read_text() for thread in threads)
