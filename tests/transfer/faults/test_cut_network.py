"""A network that is cut while KV moves: two workers in a network namespace of their own, whose only device goes down.

The rest of the machine is not affected. Making a namespace needs root and the program `ip`.
"""

from __future__ import annotations

import os
import random
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
from tests.requirements import missing, require
from tests.transfer.faults.process_rows import LEASE_S, LIMITS
from tests.transfer.faults.processes import WorkerProcess
from tests.transfer.faults.world import MAIN
from tests.transfer.workers import ask, make_model, make_worker

from outrider.sampling import SamplingParams

require("nixl", "nixl_cu12", "nixl_cu13")
PARAMS = SamplingParams(temperature=0, max_tokens=8)
ALL = bool(os.environ.get("OUTRIDER_ALL_COMBINATIONS"))
GIVEN_UP_S = 12.0
"""Longer than all limits of a hand-off together: two questions, the reads, and a lease."""


CASES = tuple(product("cefg", ("recompute", "fail"))) if ALL else (("e", "recompute"), ("f", "fail"))
"""The phases that need no further request: asking, reading, confirming and decoding."""


def command(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=10)


@pytest.fixture(scope="module")
def namespace() -> Iterator[str]:
    name = f"outrider-{secrets.token_hex(4)}"
    if shutil.which("ip") is None:
        missing("iproute2", "iproute2 is not installed")
    try:
        command("netns", "add", name)
    except subprocess.CalledProcessError as problem:
        missing("netns", f"netns: no network namespace can be made here: {problem.stderr.decode().strip()}")
    try:
        yield name
    finally:
        command("netns", "delete", name)


class Network:
    """The loopback device of a namespace, over which its workers talk."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self.mend()

    def cut(self) -> None:
        command("-n", self._namespace, "link", "set", "lo", "down")

    def mend(self) -> None:
        command("-n", self._namespace, "link", "set", "lo", "up")


@pytest.mark.parametrize(("phase", "policy"), CASES)
def test_a_hand_off_survives_a_cut_network(phase: str, policy: str, namespace: str, tmp_path: Path) -> None:
    """The text is right or the request fails within the limits, and every page comes back on both sides; once the
    network is there again, the next hand-off moves its KV."""
    network, rng = Network(namespace), random.Random(f"{phase} {policy}")
    prompts = [[rng.randrange(256) for _ in range(70)] for _ in range(2)]
    single = make_worker(make_model("mixed"), "none", tmp_path, None)
    expected = [ask(single, f"alone {number}", prompt, PARAMS) for number, prompt in enumerate(prompts)]
    transfer = LIMITS | {"kv_transport": "tcp", "kv_load_failure_policy": policy}
    with (
        WorkerProcess("kv_producer", tmp_path, windows="mixed", namespace=namespace, transfer=LIMITS) as prefill,
        WorkerProcess(
            "kv_consumer", tmp_path, windows="mixed", namespace=namespace, transfer=transfer, hold=phase
        ) as decode,
    ):
        ticket = prefill.run(MAIN, prompts[0], PARAMS, hand_over=True)["ticket"]
        decode.start(MAIN, prompts[0], PARAMS, ticket=ticket)
        assert decode.read() == {"phase": phase}
        network.cut()
        decode.tell("open")
        answer = decode.read(GIVEN_UP_S)
        if phase == "g" or policy == "recompute":
            assert (answer["tokens"], answer["error"]) == (expected[0].outputs[0].token_ids, None)
        else:
            assert "send the request again" in answer["error"]
        # The lease of a reader that is not heard of any more ends by itself.
        assert prefill.until_idle(LEASE_S + GIVEN_UP_S)["handed_over"] == 1
        decode.until_idle(GIVEN_UP_S)
        network.mend()
        for number in range(10):
            # The first questions may be lost while the connection is made again.
            name = f"b{number}"
            ticket = prefill.run(name, prompts[1], PARAMS, hand_over=True)["ticket"]
            decode.start(name, prompts[1], PARAMS, ticket=ticket)
            answer = decode.read(GIVEN_UP_S)
            if answer["error"] is None:
                break
        assert answer["tokens"] == expected[1].outputs[0].token_ids
        decode.until_idle(GIVEN_UP_S)
        prefill.until_idle(LEASE_S + GIVEN_UP_S)
