"""What memory of the host behind a small KV cache brings: hits and times to first token of conversations that take
turns, with it and without."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import mean, median
from typing import Any

from outrider.config import EngineConfig
from outrider.engine.build import build_engine
from outrider.engine.engine import Engine
from outrider.kv.checked import whole_number
from outrider.models.load import LoadedModel
from outrider.sampling import SamplingParams
from outrider.tools.bench.prefix import PrefixBenchConfig, Turn

GIB = 1 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class TierBenchConfig:
    conversations: int = 20
    turns: int = 6
    answer_tokens: int = 24
    message_tokens: tuple[int, int] = (20, 60)
    system_tokens: int = 100
    device_bytes: int = 64 << 20
    host_gib: float = 1.0

    def __post_init__(self) -> None:
        for name in ("conversations", "turns", "answer_tokens", "device_bytes"):
            whole_number(getattr(self, name), name, at_least=1)

    @property
    def chats(self) -> PrefixBenchConfig:
        return PrefixBenchConfig(
            conversations=self.conversations,
            turns=self.turns,
            system_tokens=self.system_tokens,
            message_tokens=self.message_tokens,
            answer_tokens=self.answer_tokens,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TierRow:
    """All turns with one size of memory."""

    name: str
    turns: tuple[Turn, ...]
    acceptance_length: float
    tier: dict[str, float]
    """Counters of the host's memory; empty without it."""

    def as_json(self) -> dict[str, Any]:
        prompt, hit = (sum(getattr(turn, name) for turn in self.turns) for name in ("prompt_tokens", "hit_tokens"))
        times = sorted(1e3 * turn.first_token_s for turn in self.turns)
        return {
            "name": self.name,
            "turns": len(self.turns),
            "prompt_tokens": prompt,
            "hit_tokens": hit,
            "hit_share": hit / prompt,
            "first_token_ms": {
                "median": median(times),
                "mean": mean(times),
                "p90": times[min(len(times) - 1, int(0.9 * len(times)))],
            },
            "mean_acceptance_length": self.acceptance_length,
            "tier": self.tier,
        }


def run_to_end(engine: Engine, name: str, prompt: Sequence[int], params: SamplingParams) -> Turn:
    """Runs one request alone, as a server would: without steps while nothing can be done."""
    engine.add_request(name, prompt, params)
    output = engine.output(name)
    while engine.has_work:
        if engine.waits:
            engine.wait()
        engine.step()
    metrics = output.metrics
    assert output.error is None and metrics.first_token_s is not None, output.error
    return Turn(
        prompt_tokens=len(prompt),
        hit_tokens=metrics.cached_tokens,
        first_token_s=metrics.first_token_s - metrics.arrival_s,
        answer=tuple(output.outputs[0].token_ids),
    )


def take_turns(engine: Engine, config: PrefixBenchConfig) -> list[Turn]:
    """Runs all conversations, a turn of each one after the other, so that each comes back when the others have used
    the cache."""
    system, conversations = config.messages()
    params = SamplingParams(temperature=0, max_tokens=config.answer_tokens, ignore_eos=True)
    texts = [list(system) for _conversation in conversations]
    turns: list[Turn] = []
    for number in range(config.turns):
        for text, messages in zip(texts, conversations, strict=True):
            text += messages[number]
            turns.append(run_to_end(engine, str(len(turns)), text, params))
            text += turns[-1].answer
    return turns


def settle(engine: Engine) -> None:
    """Let copies to tiers end."""
    transfers = engine.transfers
    while transfers is not None and not transfers.driver.is_idle:
        transfers.wait(0.1)
        engine.tend()


def measure(config: TierBenchConfig, engine_config: EngineConfig, progress: Callable[[str], None]) -> Iterator[TierRow]:
    """Measures the device alone, then with memory of the host behind it. The second row must have the same answers."""
    chats = config.chats
    small = replace(
        engine_config, max_model_len=chats.longest + 64, kv_cache_memory_bytes=config.device_bytes, max_num_seqs=4
    )
    model: LoadedModel | None = None
    device = f"{config.device_bytes / (1 << 20):g} MiB"
    for name, host_gib in ((device, None), (f"{device} + {config.host_gib:g} GiB host", config.host_gib)):
        progress(name)
        engine = build_engine(replace(small, kv_offloading_size=host_gib), model=model)
        model = engine.model
        # The first step of each shape takes longer; neither engine is to pay for it.
        run_to_end(engine, "warm-up", list(range(100, 180)), SamplingParams(temperature=0, max_tokens=8))
        engine.reset_prefix_cache()
        turns = take_turns(engine, chats)
        settle(engine)
        host = engine.tier_counters().get("host")
        tier = {} if host is None else {each: getattr(host, each) for each in type(host).__slots__}
        yield TierRow(
            name=name,
            turns=tuple(turns),
            acceptance_length=engine.speculation.mean_acceptance_length,
            tier=tier,
        )
        engine.close()
        del engine
        gc.collect()


def report_of(config: TierBenchConfig, rows: Sequence[TierRow]) -> dict[str, Any]:
    alone, behind = rows
    return {
        "conversations": config.conversations,
        "turns": config.turns,
        "rows": [row.as_json() for row in rows],
        "identical_answers": [turn.answer for turn in alone.turns] == [turn.answer for turn in behind.turns],
    }
