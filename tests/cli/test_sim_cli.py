"""`outrider sim` as a person or a script calls it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from outrider.tools.wording import counted

REQUIRED = {
    "scenarios", "steps", "faults", "violations", "wrong_outputs", "leaked_pages", "hit_mismatches", "seconds"
}  # fmt: skip


def outrider(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    script = Path(sys.executable).with_name("outrider")
    return subprocess.run([str(script), *arguments], capture_output=True, text=True, cwd=cwd, check=False)


def test_the_package_can_be_run_as_a_module() -> None:
    module = subprocess.run([sys.executable, "-m", "outrider", "--version"], capture_output=True, text=True, check=True)
    assert module.stdout == outrider("--version").stdout != ""


def test_json_is_one_object_with_the_promised_fields() -> None:
    run = outrider("sim", "--seed", "3", "--scenarios", "30", "--json")
    assert run.returncode == 0, run.stderr
    counts = json.loads(run.stdout)
    assert set(counts) >= REQUIRED
    assert counts["scenarios"] == 30
    assert counts["violations"] == counts["wrong_outputs"] == counts["leaked_pages"] == counts["hit_mismatches"] == 0


def test_a_bug_put_back_is_named_traced_and_replayed(tmp_path: Path) -> None:
    run = outrider("sim", "--mutate", "double_free", "--trace-dir", str(tmp_path))
    assert run.returncode == 1
    assert "I5 broken" in run.stdout
    (trace,) = tmp_path.glob("*.json")
    again = outrider("sim", "--replay", str(trace), "--json")
    assert again.returncode == 1
    result = json.loads(again.stdout)
    assert result["exact"]
    assert result["invariant"] == "I5"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(("--replay", "nowhere.json"), "error: cannot read nowhere.json"), (("--scenarios", "0"), "scenarios")],
)
def test_what_cannot_be_run_is_said_without_a_traceback(arguments: tuple[str, ...], words: str) -> None:
    run = outrider("sim", *arguments)
    assert run.returncode == 2
    assert words in run.stderr
    assert "Traceback" not in run.stderr


def test_one_is_not_many() -> None:
    assert [counted(number, "request") for number in (0, 1, 2, 1000)] == [
        "0 requests", "1 request", "2 requests", "1,000 requests"
    ]  # fmt: skip
    run = outrider("sim", "--scenarios", "1")
    assert "1 scenario" in run.stdout
    assert "1 scenarios" not in run.stdout


def test_the_demo_shows_a_run_a_campaign_and_a_bug() -> None:
    run = outrider("sim", "--demo")
    assert run.returncode == 0, run.stderr
    for part in ("alice", "hits 20 of 21 tokens", "all outputs equal the oracle's", "violations", "I1 broken"):
        assert part in run.stdout


def test_ctrl_c_ends_a_campaign() -> None:
    """With all the work that is still queued."""
    script = str(Path(sys.executable).with_name("outrider"))
    # Tests that run in the background inherit ignored interrupts.
    listen = "signal.signal(signal.SIGINT, signal.default_int_handler)"
    start = f"import os, signal, sys; {listen}; os.execv(sys.argv[1], sys.argv[1:])"
    command = [sys.executable, "-c", start, script, "sim", "--scenarios", "1000000", "--processes", "2"]
    process = subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        while len(children.read_text().split()) < 2:
            assert process.poll() is None
            time.sleep(0.05)
        # To it alone: those who work for it must not be left to finish what is queued.
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(timeout=60) == 130
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def test_a_mutation_of_pacing_is_tried_on_synthetic_machines() -> None:
    run = outrider("sim", "--mutate", "cost_model_that_never_forgets")
    assert run.returncode == 1, run.stdout
    assert "I12: the pacer reaches" in run.stdout
