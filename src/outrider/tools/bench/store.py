"""A shared store behind two workers: what the second one finds of what the first one computed, and what happens when
the store's parts die or its values are damaged.

Everything runs in this process and its children: Mooncake's master, a node that lends memory, two engines with the
store and one without, whose texts are the right ones.
"""

from __future__ import annotations

import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from outrider.config import EngineConfig, KVStoreConfig
from outrider.engine.build import build_engine
from outrider.engine.engine import Engine
from outrider.engine.tiers import store_process
from outrider.errors import ConfigError
from outrider.sampling import SamplingParams
from outrider.tools.bench.prefix import LARGEST_TEXT_TOKEN, SMALLEST_TEXT_TOKEN, Turn
from outrider.tools.bench.tiers import run_to_end, settle
from outrider.transfer.tiers.mooncake import PAGES_MAX, stored_name
from outrider.transfer.tiers.sealing import TRAILER_BYTES
from outrider.transfer.tiers.store_messages import Put, Remove
from outrider.transfer.tiers.store_process import StoreProcess

MASTER_PORT, METRICS_PORT = 50061, 50062
READY_LIMIT_S = 60.0
BACK_LIMIT_S = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreBenchConfig:
    prompts: int = 8
    prompt_tokens: int = 400
    answer_tokens: int = 24
    node_bytes: int = 1 << 30
    seed: int = 11

    def texts(self) -> list[list[int]]:
        random = Random(self.seed)
        return [
            [random.randrange(SMALLEST_TEXT_TOKEN, LARGEST_TEXT_TOKEN) for _ in range(self.prompt_tokens)]
            for _ in range(self.prompts)
        ]


@dataclass(kw_only=True)
class Phase:
    """All prompts on the second worker, whose own cache was empty."""

    name: str
    hit_tokens: int
    prompt_tokens: int
    first_token_ms: float
    """Median over the prompts."""
    wrong_texts: int
    counters: dict[str, float] = field(default_factory=dict)
    """What its tier did in this phase."""


class Master:
    """Mooncake's master, which knows what lies where."""

    def __init__(self) -> None:
        self._program = Path(sys.executable).parent / "mooncake_master"
        if not self._program.exists():
            raise ConfigError("mooncake_master is not installed beside this Python; pip install 'outrider[store]'")
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{MASTER_PORT}"

    def start(self) -> None:
        self._process = subprocess.Popen(
            [
                str(self._program),
                "--rpc_address=127.0.0.1",
                f"--rpc_port={MASTER_PORT}",
                "--metrics_host=127.0.0.1",
                f"--metrics_port={METRICS_PORT}",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


class StoreScene:
    """The processes and engines of one run."""

    def __init__(self, config: StoreBenchConfig, engine_config: EngineConfig, progress: Callable[[str], None]) -> None:
        self.config = config
        self._progress = progress
        self._texts = config.texts()
        self._params = SamplingParams(temperature=0, max_tokens=config.answer_tokens, ignore_eos=True)
        self.master = Master()
        self._numbers = 0
        self._store = KVStoreConfig(master_server_address=self.master.address, cluster_key=secrets.token_hex(16))
        progress("starting")
        self.master.start()
        self._node = self._start_node()
        alone = replace(engine_config, max_model_len=config.prompt_tokens + config.answer_tokens + 64, max_num_seqs=4)
        self._alone = build_engine(alone)
        shared = replace(alone, kv_store_config=self._store)
        self.first = build_engine(shared, model=self._alone.model)
        self.second = build_engine(shared, model=self._alone.model)
        for engine in (self._alone, self.first, self.second):
            self._run(engine, [[token + 1 for token in self._texts[0]]])
            settle(engine)
        self._right = self._run(self._alone, self._texts)

    def _start_node(self) -> StoreProcess:
        node = store_process(replace(self._store, global_segment_size=self.config.node_bytes), (1 << 20,))
        node.wait_ready(READY_LIMIT_S)
        return node

    def _run(self, engine: Engine, texts: Sequence[Sequence[int]]) -> list[Turn]:
        turns = []
        for text in texts:
            self._numbers += 1
            turns.append(run_to_end(engine, f"r{self._numbers}", list(text), self._params))
        return turns

    def without_store(self) -> Phase:
        self._alone.reset_prefix_cache()
        return self._phase("without the store", self._run(self._alone, self._texts), {})

    def warm(self) -> None:
        """Have the first worker compute all prompts, and store their pages."""
        self.first.reset_prefix_cache()
        self._run(self.first, self._texts)
        settle(self.first)

    def second_reads(self, name: str) -> Phase:
        self._progress(name)
        self.second.reset_prefix_cache()
        counters = self.second.tier_counters()["store"]
        fields = type(counters).__slots__
        before = {each: getattr(counters, each) for each in fields}
        turns = self._run(self.second, self._texts)
        settle(self.second)
        return self._phase(name, turns, {each: getattr(counters, each) - before[each] for each in fields})

    def _phase(self, name: str, turns: Sequence[Turn], counters: dict[str, float]) -> Phase:
        return Phase(
            name=name,
            hit_tokens=sum(turn.hit_tokens for turn in turns),
            prompt_tokens=sum(turn.prompt_tokens for turn in turns),
            first_token_ms=1e3 * median(turn.first_token_s for turn in turns),
            wrong_texts=sum(turn.answer != right.answer for turn, right in zip(turns, self._right, strict=True)),
            counters=counters,
        )

    # ---- faults ------------------------------------------------------------------------------------

    def kill_node(self) -> None:
        self._node.end(time.monotonic())

    def restart_node(self) -> None:
        self._node.close()
        self._node = self._start_node()

    def wait_until_warm(self, name: str) -> Phase:
        """Have the first worker store again until the second one finds it: a store takes a while to notice what has
        died."""
        end_s = time.monotonic() + BACK_LIMIT_S
        while True:
            self.warm()
            phase = self.second_reads(name)
            if phase.hit_tokens > phase.prompt_tokens // 2 or phase.wrong_texts or time.monotonic() > end_s:
                return phase
            time.sleep(2.0)

    def damage(self) -> int:
        """Replace the values of half of the first prompts' pages by noise of the same size; returns their number."""
        layout, pool = self.first.scheduler.kv.layout, self.first.scheduler.kv.pool
        pages = [(g, key) for g, index in enumerate(pool.indexes) for key in index.pages]
        rogue = store_process(self._store, tuple(spec.page_bytes for spec in layout.groups))
        rogue.wait_ready(READY_LIMIT_S)
        sizes = [spec.page_bytes + TRAILER_BYTES for spec in layout.groups]
        noise, slot = Random(1).randbytes(max(sizes)), max(sizes)
        chosen = pages[::2]
        for first in range(0, len(chosen), PAGES_MAX):
            part = chosen[first : first + PAGES_MAX]
            names = [stored_name(layout.tags[g] + key) for g, key in part]
            for place in range(len(part)):
                rogue.stage[place * slot : (place + 1) * slot] = noise
            rogue.send(Remove(keys=names))
            # A value is dropped on another thread of the process, before this is sent.
            time.sleep(0.2)
            offsets = [place * slot for place in range(len(part))]
            rogue.send(Put(number=first, keys=names, offsets=offsets, sizes=[sizes[g] for g, _key in part]))
            end_s = time.monotonic() + READY_LIMIT_S
            while not rogue.receive(time.monotonic()) and time.monotonic() < end_s:
                time.sleep(0.005)
        rogue.close()
        return len(chosen)

    def close(self) -> None:
        for engine in (self.first, self.second, self._alone):
            engine.close()
        self._node.close()
        self.master.kill()


def measure(config: StoreBenchConfig, engine_config: EngineConfig, progress: Callable[[str], None]) -> dict[str, Any]:
    scene = StoreScene(config, engine_config, progress)
    try:
        phases = [scene.without_store()]
        scene.warm()
        phases.append(scene.second_reads("warmed by the first"))
        scene.master.kill()
        phases.append(scene.second_reads("master killed"))
        scene.master.start()
        phases.append(scene.wait_until_warm("master restarted"))
        scene.kill_node()
        phases.append(scene.second_reads("node killed"))
        scene.restart_node()
        phases.append(scene.wait_until_warm("node restarted"))
        damaged = scene.damage()
        phases.append(scene.second_reads("values damaged"))
        violations = [
            str(violation)
            for engine in (scene.first, scene.second)
            if engine.sanitizer is not None
            for violation in engine.sanitizer.violations
        ]
    finally:
        scene.close()
    found = {phase.name: phase for phase in phases}
    return {
        "prompts": config.prompts,
        "prompt_tokens": config.prompt_tokens,
        "phases": [vars(phase) for phase in phases],
        "damaged_values": damaged,
        "violations": violations,
        "healthy": not violations
        and not any(phase.wrong_texts for phase in phases)
        and all(
            found[name].hit_tokens > found[name].prompt_tokens // 2
            for name in ("warmed by the first", "master restarted", "node restarted")
        )
        and found["values damaged"].counters["refused"] > 0,
    }
