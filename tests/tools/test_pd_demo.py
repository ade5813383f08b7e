"""`scripts/demo-pd`: what it shows with the default model, and that nothing is left after Ctrl-C."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys

import pytest
from tests.requirements import require

from outrider.tools.bench.process_memory import child_pids
from outrider.tools.bench.server_process import wait_until

COMMAND = [sys.executable, "-m", "outrider.tools.pd_demo"]
WIDTH = 44


@pytest.fixture(autouse=True)
def _with_nixl() -> None:
    require("nixl", "nixl_cu12", "nixl_cu13")


@pytest.mark.slow
def test_what_it_shows() -> None:
    done = subprocess.run(
        COMMAND, capture_output=True, text=True, timeout=400, env={**os.environ, "COLUMNS": str(WIDTH)}, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    joined = " ".join(done.stdout.split())
    assert re.search(r"prompt of \d,\d{3} characters", joined)
    assert re.search(r"KV moved 1,\d{3} tokens, \d+\.\d MB", joined)
    assert re.search(r"reading \d+ ms, \d+\.\d GB/s", joined)
    assert joined.count("equal to that of one worker alone") == 2
    # All but the answers, which the terminal breaks itself.
    figures = [line for line in done.stdout.splitlines() if re.match(r"(  )?[a-zKV ]+  +\S", line)]
    assert len(figures) > 8
    assert max(map(len, figures)) <= WIDTH


def test_an_interrupt_leaves_nothing_behind() -> None:
    process = subprocess.Popen(COMMAND, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert wait_until(lambda: len(list(child_pids(process.pid))) >= 2, 60)
        children = list(child_pids(process.pid))
        process.send_signal(signal.SIGINT)
        _out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "Traceback" not in err
    assert wait_until(lambda: not any(_is_alive(pid) for pid in children), 30)


def _is_alive(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")
