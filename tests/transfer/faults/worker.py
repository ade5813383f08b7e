"""A worker in a process of its own, which tests kill, stop and ask: a tiny model behind the nixl link.

One JSON object per line: settings as the argument, commands on standard input, answers on standard output.
"""

from __future__ import annotations

import json
import os
import select
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from tests.transfer.faults.faulty_link import FaultyLink, RealClock
from tests.transfer.faults.world import phase_of
from tests.transfer.workers import assert_nothing_left, make_model, make_worker, slots_of, transfer_config

from outrider.config import DEFAULT_MODEL, EngineConfig, SpeculativeConfig
from outrider.engine.build import build_engine
from outrider.engine.engine import Engine
from outrider.engine.transfers import make_link
from outrider.sampling import SamplingParams
from outrider.scheduler import State


def main() -> None:
    torch.set_num_threads(1)
    given = json.loads(sys.argv[1])
    hold, links = given.pop("hold", ""), []

    def faulty(*arguments: Any, **named: Any) -> FaultyLink:
        links.append(FaultyLink(make_link(*arguments, **named), RealClock()))
        links[0].hold(hold)
        return links[0]

    with mock.patch("outrider.engine.transfers.make_link", faulty if hold else make_link):
        engine = start(given)
    assert engine.transfers is not None
    say({"endpoint": engine.transfers.link.endpoint})
    serve(engine, hold, links)
    engine.close()


def start(given: dict[str, Any]) -> Engine:
    role, windows = given.pop("role"), given.pop("windows")
    if windows == DEFAULT_MODEL:
        given.pop("directory")
        return default_worker(given.pop("drafter"), role, **given)
    return make_worker(make_model(windows), given.pop("drafter"), Path(given.pop("directory")), role, **given)


def default_worker(method: str, role: str | None, *, transfer: dict[str, Any], **settings: Any) -> Engine:
    """A worker with the default model and a drafter that is shipped for it."""
    return build_engine(
        EngineConfig(
            num_threads=1,
            kv_cache_memory_bytes=1 << 28,
            # Acceptance is compared step by step, so that how much is drafted must not depend on the time.
            speculative_config=SpeculativeConfig(method=method, draft_confidence=0.2),
            kv_transfer_config=None if role is None else transfer_config(role, **transfer),
            **settings,
        )
    )


def serve(engine: Engine, hold: str, links: list[FaultyLink]) -> None:
    """`hold`: the phase in which requests are kept until the command `open`; reaching it is reported."""
    assert engine.transfers is not None
    pending = b""
    while True:
        limit_s = 0.0 if engine.has_work and not engine.waits else min(0.05, engine.tend_within_s or 0.05)
        ready, _, _ = select.select([sys.stdin, *engine.transfers.files], [], [], limit_s)
        engine.transfers.woken()
        if sys.stdin in ready:
            arrived = os.read(0, 1 << 20)
            if not arrived:
                return
            *lines, pending = (pending + arrived).split(b"\n")
            for line in lines:
                obey(engine, json.loads(line), links)
        if engine.has_work:
            for output in engine.step():
                if output.finished:
                    report(engine, output)
            if hold and phase_of(engine) == hold:
                say({"phase": hold})
                hold = ""
        else:
            engine.tend()


def say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


def report(engine: Engine, output: Any) -> None:
    held = [each for each in engine.scheduler.requests.values() if each.state is State.HELD]
    slots = {}
    for each in held:
        if each.id.startswith(f"{output.request_id}~"):
            slots = {
                group: {position: digest.hex() for position, digest in found.items()}
                for group, found in slots_of(engine, each.id).items()
            }
    say(
        {
            "name": output.request_id,
            "tokens": output.outputs[0].token_ids,
            "origins": [origin.value for origin in output.outputs[0].origins],
            "error": output.error,
            "ticket": output.ticket,
            "slots": slots,
        }
    )


def obey(engine: Engine, command: dict[str, Any], links: list[FaultyLink]) -> None:
    assert engine.transfers is not None
    match command.pop("do"):
        case "run":
            params = SamplingParams(**command.pop("params"))
            engine.add_request(command.pop("name"), command.pop("prompt"), params, **command)
        case "open":
            links[0].open()
        case "reset":
            engine.reset_prefix_cache()
            say({"reset": True})
        case "state":
            counters = engine.transfers.driver.counters
            say(
                {
                    "idle": engine.transfers.driver.is_idle,
                    "live": len(engine._live.requests),
                    "expired": counters.leases_expired,
                    "handed_over": counters.handed_over,
                    "complaints": getattr(engine.transfers.link, "complaints", {}),
                }
            )
        case "check pages":
            assert_nothing_left(engine)
            say({"pages": "all free"})


if __name__ == "__main__":
    main()
