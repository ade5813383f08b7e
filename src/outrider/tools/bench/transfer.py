"""What it costs to move KV between workers: links, and hand-offs from a prefill to a decode worker.

`transfer_links.py` measures how fast each link moves the bytes of a prompt, `transfer_first_token.py` how soon two
workers answer, beside one. Everything that is compared is measured in turns in the same run. Without NIXL only the
link within a process is measured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

from outrider.backends import Progress
from outrider.config import KV_TRANSPORTS, EngineConfig
from outrider.engine.build import build_engine
from outrider.errors import ConfigError
from outrider.kv.checked import whole_number
from outrider.models.load import LoadedModel
from outrider.tools.bench.transfer_first_token import Workers, fitting_lengths, measure_first_tokens
from outrider.tools.bench.transfer_links import PagePair, measure_links
from outrider.transfer.links.nixl_agent import load_nixl


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferBenchConfig:
    engine: EngineConfig
    links: bool = True
    """Whether to measure the links."""
    first_tokens: bool = True
    """Whether to measure hand-offs."""
    page_tokens: tuple[int, ...] = (16, 32)
    """Block sizes; every pair of them is measured, equal and different."""
    moved_tokens: int = 1024
    """Length of the prompt whose KV the links move."""
    prompt_tokens: tuple[int, ...] = (512, 1024, 2048, 4096, 8000)
    """Lengths of the prompts that are handed over."""
    rounds: int = 5
    transport: str = "auto"
    """How hand-offs move KV: one of KV_TRANSPORTS. The links are measured over cma and tcp in any case."""

    def __post_init__(self) -> None:
        for name in ("moved_tokens", "rounds"):
            whole_number(getattr(self, name), name, at_least=1)
        for name in ("page_tokens", "prompt_tokens"):
            for value in getattr(self, name):
                whole_number(value, name, at_least=1)
        if self.transport not in KV_TRANSPORTS:
            raise ConfigError(f"unknown transport {self.transport!r}; there are: {', '.join(KV_TRANSPORTS)}")


def why_no_nixl() -> str | None:
    """Returns why links between processes cannot be measured; None if they can."""
    try:
        load_nixl()
    except ConfigError as error:
        return str(error)
    return None


def measure(
    config: TransferBenchConfig,
    *,
    model: LoadedModel | None = None,
    loading: Progress | None = None,
    progress: Callable[[str], None] = lambda what: None,
) -> dict[str, Any]:
    """Runs everything; returns plain data, ready for JSON."""
    if config.engine.device.startswith("cuda"):
        raise ConfigError(
            "KV in a GPU's memory cannot be handed over yet, so nothing can be measured; use --device cpu"
        )
    missing = why_no_nixl()
    engine = replace(config.engine, device="cpu")
    links, first_tokens, workers = None, None, None
    if config.first_tokens and missing is None:
        progress("starting two workers")
        workers = Workers(engine, model=model, transport=config.transport, progress=loading)
    try:
        plain = build_engine(engine, model=model, progress=loading) if workers is None else workers.alone
        if workers is not None:
            # A prompt that is too long is refused before the links are measured.
            fitting_lengths(config.prompt_tokens, plain.max_model_len)
        if config.links:
            links = measure_links(
                plain.runner.store.memory_map(),
                plain.config.block_size,
                page_sizes=[PagePair(*pair) for pair in product(config.page_tokens, repeat=2)],
                num_tokens=config.moved_tokens,
                rounds=config.rounds,
                transports=("cma", "tcp") if missing is None else (),
                progress=progress,
            )
        if workers is not None:
            first_tokens = measure_first_tokens(
                workers, prompt_tokens=config.prompt_tokens, rounds=config.rounds, progress=progress
            )
        return {
            "config": asdict(config),
            "model": plain.model.name,
            "drafter": plain.scheduler.kv.layout.footprint.name if plain.k else None,
            "backend": plain.runner.backend.name,
            "missing": missing,
            "links": links,
            "first_tokens": first_tokens,
        }
    finally:
        if workers is not None:
            workers.close()
