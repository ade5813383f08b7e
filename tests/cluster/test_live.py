"""A real front end and two real workers, one of which dies now and then."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.requirements import missing, require

LIMIT_S = 900.0


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Any:
    require("dynamo", "dynamo")
    require("uvloop", "uvloop")
    flags = ["-n"] if os.geteuid() == 0 else ["-r", "-n"]
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, *flags, "true"], capture_output=True).returncode:
        missing("namespaces", "no network namespace can be made here")
    directory = tmp_path_factory.mktemp("cluster")
    command = [sys.executable, "-m", "tests.cluster.live", str(directory)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, cwd=Path(__file__).parents[2])
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout.splitlines()[-1])


def test_texts_are_a_single_engines(seen: Any) -> None:
    assert seen["texts"] == seen["right"]


def test_prompts_of_different_salts_share_nothing(seen: Any) -> None:
    first, second, third = seen["salted"]
    assert (first, third) == (0, 0)
    assert second > 0


def test_structured_output_and_stop_strings_come_through(seen: Any) -> None:
    assert set(json.loads(seen["json"])) == {"age"}
    assert "." not in seen["stopped"]
    assert seen["stopped"]


def test_several_texts_at_once_are_refused_by_name(seen: Any) -> None:
    assert "n must be 1" in seen["several"]


def test_a_text_whose_worker_dies_goes_on_elsewhere_token_for_token(seen: Any) -> None:
    assert seen["moved"] == 2
    assert seen["killed"] == seen["undisturbed"]


def test_a_text_that_cannot_be_continued_exactly_ends_with_an_error(seen: Any) -> None:
    assert "frequency_penalty" in seen["penalised"]["error"]
    assert "send the request again" in seen["penalised"]["error"]
    assert seen["penalised_again"].startswith(seen["penalised"]["text"])


def test_what_died_was_started_again_and_the_cluster_ended_in_order(seen: Any) -> None:
    assert seen["restarts"] == 2
    assert seen["status"] == 0


def test_only_the_request_that_was_lost_leaves_a_mark(seen: Any) -> None:
    assert seen["marks"] == 1


def test_a_text_that_is_being_written_when_the_cluster_ends_is_finished(seen: Any) -> None:
    assert seen["ended_meanwhile"] == {"error": None, "finish_reason": "length"}
