"""Prefix-cache hits of conversations: the same with any drafter as with none, token for token.

Conversations share a system prompt and run one after the other. Every turn sends the whole conversation so far and
one message more; its cache hit, the tokens it computes again and its time to first token are noted.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from statistics import median
from typing import Any

import torch

from outrider.backends.registry import select_backend
from outrider.config import EngineConfig, SpeculativeConfig
from outrider.engine.build import build_engine, resolve_device, resolve_dtype
from outrider.engine.engine import Engine
from outrider.errors import ConfigError
from outrider.kv.checked import whole_number
from outrider.models.load import LoadedModel, load_model
from outrider.sampling import SamplingParams
from outrider.speculative.drafter import Drafter
from outrider.speculative.settings import DrafterSettings
from outrider.tools.bench.random_models import RANDOM_DRAFTERS, VOCABULARY, MostlyRight, random_model

RANDOM_WINDOW = 24
RANDOM_BLOCK_TOKENS = 8
RANDOM_DRAFTS = 4
RANDOM_LAYERS: Mapping[str, tuple[int | None, ...]] = {
    "plain": (None,) * 6,
    "hybrid": (*(RANDOM_WINDOW,) * 5, None),
}
HYBRID_RETENTIONS = ("dense", "tail")
OFF = "none"
LARGEST_TEXT_TOKEN = 200
"""Ids of messages are drawn below this one: special tokens lie at either end of a vocabulary."""
SMALLEST_TEXT_TOKEN = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefixBenchConfig:
    conversations: int = 20
    turns: int = 6
    system_tokens: int = 100
    message_tokens: tuple[int, int] = (6, 30)
    """Fewest and most tokens of a message."""
    answer_tokens: int = 12
    seed: int = 7

    def __post_init__(self) -> None:
        for name in ("conversations", "turns", "system_tokens", "answer_tokens"):
            whole_number(getattr(self, name), name, at_least=1)

    @property
    def longest(self) -> int:
        return self.system_tokens + self.turns * (self.message_tokens[1] + self.answer_tokens)

    def messages(self) -> tuple[list[int], list[list[list[int]]]]:
        """Returns the system prompt and the messages of every conversation, the same for all engines compared."""
        random = Random(self.seed)

        def drawn(count: int) -> list[int]:
            return [random.randrange(SMALLEST_TEXT_TOKEN, LARGEST_TEXT_TOKEN) for _ in range(count)]

        return drawn(self.system_tokens), [
            [drawn(random.randint(*self.message_tokens)) for _turn in range(self.turns)]
            for _conversation in range(self.conversations)
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    prompt_tokens: int
    hit_tokens: int
    first_token_s: float
    answer: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Results of all conversations with one model and one drafter."""

    model: str
    retention: str
    drafter: str
    turns: tuple[Turn, ...]
    acceptance_length: float
    against: tuple[Turn, ...]
    """Turns of the same conversations without a drafter."""

    @property
    def different_hits(self) -> int:
        return sum(a.hit_tokens != b.hit_tokens for a, b in zip(self.turns, self.against, strict=True))

    @property
    def different_answers(self) -> int:
        return sum(a.answer != b.answer for a, b in zip(self.turns, self.against, strict=True))

    def as_json(self) -> dict[str, Any]:
        prompt, hit = (sum(getattr(turn, name) for turn in self.turns) for name in ("prompt_tokens", "hit_tokens"))
        return {
            "model": self.model,
            "kv_retention": self.retention,
            "drafter": self.drafter,
            "turns": len(self.turns),
            "prompt_tokens": prompt,
            "hit_tokens": hit,
            "recomputed_tokens": prompt - hit,
            "hit_share": hit / prompt,
            "time_to_first_token_ms": 1e3 * median(turn.first_token_s for turn in self.turns),
            "mean_acceptance_length": self.acceptance_length,
            "hits": [turn.hit_tokens for turn in self.turns],
            "turns_with_other_hits": self.different_hits,
            "turns_with_other_answers": self.different_answers,
        }


def converse(engine: Engine, config: PrefixBenchConfig) -> list[Turn]:
    """Runs every conversation turn by turn, one request at a time."""
    system, conversations = config.messages()
    params = SamplingParams(temperature=0, max_tokens=config.answer_tokens, ignore_eos=True)
    turns: list[Turn] = []
    for messages in conversations:
        known = list(system)
        for message in messages:
            known += message
            name = str(len(turns))
            engine.add_request(name, known, params)
            output = engine.output(name)
            while engine.has_work:
                engine.step()
            metrics, answer = output.metrics, tuple(output.outputs[0].token_ids)
            assert metrics.first_token_s is not None
            turns.append(
                Turn(
                    prompt_tokens=len(known),
                    hit_tokens=metrics.cached_tokens,
                    first_token_s=metrics.first_token_s - metrics.arrival_s,
                    answer=answer,
                )
            )
            known += answer
    return turns


def texts_of(turns: Sequence[Turn], config: PrefixBenchConfig) -> Iterator[list[int]]:
    """Yields the tokens of every finished conversation."""
    system, conversations = config.messages()
    answers = iter(turn.answer for turn in turns)
    for messages in conversations:
        text = list(system)
        for message in messages:
            text += [*message, *next(answers)]
        yield text


# ---- random models ---------------------------------------------------------------------------------


def _random_config(config: PrefixBenchConfig, retention: str, name: str | None) -> EngineConfig:
    speculation = None
    if name is not None:
        method = RANDOM_DRAFTERS[name].method
        speculation = SpeculativeConfig(method=method, num_speculative_tokens=RANDOM_DRAFTS)
    return EngineConfig(
        device="cpu",
        max_model_len=config.longest + 2 * RANDOM_DRAFTS,
        block_size=RANDOM_BLOCK_TOKENS,
        kv_retention=retention,
        kv_cache_memory_bytes=64 << 20,
        speculative_config=speculation,
    )


def _random_drafter(name: str, target: LoadedModel, config: EngineConfig, texts: Sequence[Sequence[int]]) -> Drafter:
    device = torch.device("cpu")
    assert config.max_model_len is not None
    settings = DrafterSettings(
        target=target,
        backend=select_backend(config.backend, device=device, threads=config.num_threads),
        page_tokens=config.block_size,
        dtype=torch.float32,
        device=device,
        max_model_len=config.max_model_len,
    )
    drafter = RANDOM_DRAFTERS[name].make(settings)
    return drafter if drafter.footprint.keeps_accepted else MostlyRight(drafter, texts)


def random_rows(config: PrefixBenchConfig, progress: Callable[[str], None]) -> Iterator[Row]:
    """Measures random models without and with windows, each with a random drafter of every kind."""
    assert LARGEST_TEXT_TOKEN <= VOCABULARY
    for layout, windows in RANDOM_LAYERS.items():
        model = random_model(f"random, {layout}", windows, max_position=config.longest + 64)
        for retention in HYBRID_RETENTIONS if any(windows) else HYBRID_RETENTIONS[:1]:
            off: list[Turn] = []
            for name in (None, *RANDOM_DRAFTERS):
                progress(f"{model.name}, {retention}: {name or OFF}")
                engine_config = _random_config(config, retention, name)
                drafter = None
                if name is not None:
                    drafter = _random_drafter(name, model, engine_config, list(texts_of(off, config)))
                row = _row(name or OFF, build_engine(engine_config, model=model, drafter=drafter), off, config)
                off = off or list(row.turns)
                yield row


def _row(drafter: str, engine: Engine, off: Sequence[Turn], config: PrefixBenchConfig) -> Row:
    turns = tuple(converse(engine, config))
    row = Row(
        model=engine.model.name,
        retention=str(engine.config.kv_retention),
        drafter=drafter,
        turns=turns,
        acceptance_length=engine.speculation.mean_acceptance_length,
        against=tuple(off) or turns,
    )
    # Free the pages of this engine before the next one allocates its own.
    del engine
    gc.collect()
    return row


# ---- a real model ----------------------------------------------------------------------------------


def model_rows(
    config: PrefixBenchConfig,
    engine_config: EngineConfig,
    speculations: Sequence[SpeculativeConfig],
    progress: Callable[[str], None],
) -> Iterator[Row]:
    """Measures one real model, without a drafter and with each of the given ones."""
    device = resolve_device(engine_config.device)
    backend = select_backend(engine_config.backend, device=device, threads=engine_config.num_threads)
    dtype = resolve_dtype(engine_config.dtype, backend)
    forms = backend.weight_forms(dtype, expand=engine_config.expand_weights)
    progress(f"{engine_config.model}: {OFF}")
    model = load_model(engine_config.model, dtype=dtype, device=device, forms=forms)
    if config.longest >= model.spec.max_position:
        raise ConfigError(
            f"conversations grow to {config.longest} tokens, and {model.name} reads {model.spec.max_position}; "
            "lower --turns or the tokens of each"
        )
    off: list[Turn] = []
    for speculation in (None, *speculations):
        if speculation is not None:
            progress(f"{model.name}: {speculation.method}")
        name = OFF if speculation is None else speculation.method
        engine_config = replace(engine_config, speculative_config=speculation)
        row = _row(name, build_engine(engine_config, model=model), off, config)
        off = off or list(row.turns)
        yield row


def report_of(config: PrefixBenchConfig, rows: Sequence[Row]) -> dict[str, Any]:
    return {
        "conversations": config.conversations,
        "turns": config.turns,
        "system_tokens": config.system_tokens,
        "answer_tokens": config.answer_tokens,
        "rows": [row.as_json() for row in rows],
        "identical_hits": not any(row.different_hits for row in rows),
        "identical_answers": not any(row.different_answers for row in rows),
    }
