"""The other process of `outrider bench transfer`: pages behind a link, or a prefill worker with an engine.

It reads one JSON object per line and answers each. The first line says what to be:

    {"pages": …}                        pages of a shape, full of known bytes (`PageWorker`)
    {"engine": …}                       a prefill worker (`PrefillWorker`)
                                        → {"endpoint": …, "memory": …, "metadata": …}
    {"prompt": ids, "max_tokens": n}    → {"ticket": …, "ended_s": …, "tokens": ids}: compute it and hand it over
    {"bare": true}                      → {"serving": true}, and bare readers are served until the next line
    {"stop": true}                      → {}

It ends with its standard input. Times are those of the monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

import json
import select
import sys
import time
from abc import ABC, abstractmethod
from dataclasses import asdict
from typing import Any, TextIO

import msgspec

from outrider.config import EngineConfig, KVTransferConfig, SpeculativeConfig
from outrider.engine.build import build_engine
from outrider.errors import RequestError
from outrider.sampling import SamplingParams
from outrider.tools.bench.transfer_bare import BareServer
from outrider.tools.bench.transfer_pages import PagedMemory
from outrider.transfer.desk import Desk
from outrider.transfer.leases import LeaseBook
from outrider.transfer.links.memory import MemoryMap
from outrider.transfer.links.nixl import NixlLink
from outrider.transfer.offers import BINDING_BYTES, GroupSignature, Offer
from outrider.transfer.tickets import ClusterKey

DIGEST = b"bench of a link!"
LEASE_S = 3600.0
READER = "bench"
TEND_S = 1.0
"""Longest time between two looks at what is held for others."""


def engine_settings(config: EngineConfig) -> dict[str, Any]:
    """Returns the settings of an engine as JSON."""
    return asdict(config)


def engine_config(settings: dict[str, Any]) -> EngineConfig:
    """Returns the settings that `engine_settings` made JSON of."""
    nested = {
        "speculative_config": SpeculativeConfig.of(settings["speculative_config"]),
        "kv_transfer_config": KVTransferConfig.of(settings["kv_transfer_config"]),
    }
    return EngineConfig(**(settings | nested))


class Worker(ABC):
    memory: MemoryMap
    endpoint: str

    @property
    @abstractmethod
    def files(self) -> tuple[int, ...]:
        """Descriptors that are readable when `tend` has something to do."""

    @abstractmethod
    def tend(self) -> None: ...

    @abstractmethod
    def hand_over(self, prompt: list[int], max_tokens: int) -> dict[str, Any]: ...

    @abstractmethod
    def close(self) -> None: ...


class PageWorker(Worker):
    """Pages that can be read through the link, as those of a prompt that was handed over."""

    def __init__(self, settings: dict[str, Any]) -> None:
        shape = msgspec.convert(settings["shape"], MemoryMap)
        self._pages = PagedMemory(shape, num_tokens=settings["num_tokens"], seed=settings["seed"])
        self._pages.fill()
        self.memory = self._pages.map
        book = LeaseBook(LEASE_S)
        offer = Offer(engine="pages", binding=bytes(BINDING_BYTES), num_tokens=1, first_token=0, groups={})
        # Some lease is always claimed, as it is while a decode worker reads.
        book.claim(book.grant("prompt", offer, time.monotonic()), READER, time.monotonic())
        signature = GroupSignature("prompt", "full", 1, 0, "target", "bench")
        desk = Desk(engine="pages", digest=DIGEST, signatures=[signature], leases=book, clock=time.monotonic)
        self._link = NixlLink(
            self.memory, desk, ClusterKey(settings["key"]), host="127.0.0.1", port=0, engine="pages", transport="auto"
        )
        self.endpoint = self._link.endpoint

    @property
    def files(self) -> tuple[int, ...]:
        return ()

    def tend(self) -> None:
        pass

    def hand_over(self, prompt: list[int], max_tokens: int) -> dict[str, Any]:
        raise RequestError("this worker has pages, but no engine")

    def close(self) -> None:
        self._link.close()


class PrefillWorker(Worker):
    """An engine that computes prompts and hands them over, in a loop like that of a server."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._engine = build_engine(engine_config(settings))
        assert self._engine.transfers is not None
        self._transfers = self._engine.transfers
        self.memory = self._engine.runner.store.memory_map()
        self.endpoint = self._transfers.link.endpoint

    @property
    def files(self) -> tuple[int, ...]:
        return self._transfers.files

    def tend(self) -> None:
        self._transfers.woken()
        self._engine.tend()

    def hand_over(self, prompt: list[int], max_tokens: int) -> dict[str, Any]:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        self._engine.add_request("prompt", prompt, params, hand_over=True)
        output = self._engine.output("prompt")
        while not output.finished:
            self._engine.step()
        return {
            "ticket": output.ticket,
            "error": output.error,
            "ended_s": time.monotonic(),
            "tokens": output.outputs[0].token_ids,
        }

    def close(self) -> None:
        self._engine.close()


def serve(worker: Worker, requests: TextIO, answers: TextIO) -> None:
    def answer(fields: dict[str, Any]) -> None:
        print(json.dumps(fields), file=answers, flush=True)

    bare = BareServer(worker.memory)
    memory = msgspec.to_builtins(worker.memory)
    answer({"endpoint": worker.endpoint, "memory": memory, "metadata": bare.metadata.hex()})
    while True:
        ready, _, _ = select.select([requests.fileno(), *worker.files], [], [], TEND_S)
        worker.tend()
        if requests.fileno() not in ready:
            continue
        line = requests.readline()
        if not line:
            break
        request = json.loads(line)
        if "prompt" in request:
            answer(worker.hand_over(request["prompt"], request["max_tokens"]))
        elif "bare" in request:
            answer({"serving": True})
            bare.serve(lambda: bool(select.select([requests], [], [], 0.0)[0]))
        else:
            answer({})
    bare.close()
    worker.close()


def main() -> None:
    # Answers go to the original stdout; whatever a library prints must not get between them.
    answers, sys.stdout = sys.stdout, sys.stderr
    given = json.loads(sys.stdin.readline())
    worker = PageWorker(given["pages"]) if "pages" in given else PrefillWorker(given["engine"])
    serve(worker, sys.stdin, answers)


if __name__ == "__main__":
    main()
