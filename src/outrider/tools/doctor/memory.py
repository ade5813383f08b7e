"""How the KV memory is divided: groups, arenas, and how many requests they hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from outrider.engine.engine import Engine
from outrider.engine.memory import tokens_held, total_bytes
from outrider.kv.groups import Sliding
from outrider.kv.retention import RetentionMask
from outrider.kv.sizing import decoding_pages

OWNERS = ("target", "drafter")


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupMemory:
    name: str
    owner: str
    """One of OWNERS."""
    layers: int
    kind: str
    window: int | None
    page_tokens: int
    page_bytes: int
    unused_bytes: int
    """Bytes at the end of each page that hold no slot."""
    arena: int
    bytes_per_token: int
    pages_per_request: int
    """Most pages that a request of max_model_len tokens holds while it decodes."""
    cached_fraction: float
    """Fraction of the tokens of a long text that stay in the prefix cache once its request has ended."""

    @property
    def bytes_per_request(self) -> int:
        return self.pages_per_request * self.page_bytes

    def as_json(self) -> dict[str, Any]:
        fields = asdict(self)
        fields["cached_share"] = fields.pop("cached_fraction")
        return fields | {"bytes_per_request": self.bytes_per_request}


@dataclass(frozen=True, kw_only=True, slots=True)
class ArenaMemory:
    number: int
    page_bytes: int
    pages: int
    """Number of pages, the null page included."""
    groups: tuple[str, ...]
    pages_per_request: int

    @property
    def bytes(self) -> int:
        return self.pages * self.page_bytes

    @property
    def requests(self) -> int:
        """Number of requests of max_model_len tokens that can decode at once."""
        return (self.pages - 1) // self.pages_per_request

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"bytes": self.bytes, "requests_of_max_model_len": self.requests}


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryReport:
    model: str
    drafter: str | None
    k: int
    max_model_len: int
    retention: str
    alignment: int
    total_bytes: int
    tokens: int
    """Number of tokens of usual texts that all arenas hold together, running or cached."""
    groups: Sequence[GroupMemory]
    arenas: Sequence[ArenaMemory]

    @property
    def requests(self) -> int:
        return min(arena.requests for arena in self.arenas)

    def as_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "drafter": self.drafter,
            "num_speculative_tokens": self.k,
            "max_model_len": self.max_model_len,
            "kv_retention": self.retention,
            "alignment_tokens": self.alignment,
            "total_bytes": self.total_bytes,
            "tokens": self.tokens,
            "requests_of_max_model_len": self.requests,
            "groups": [group.as_json() for group in self.groups],
            "arenas": [arena.as_json() for arena in self.arenas],
        }


def look_at_memory(engine: Engine) -> MemoryReport:
    kv = engine.scheduler.kv
    layout, config = kv.layout, kv.config
    layers = [count for owner in engine.runner.owners for count in owner.layers_in]
    held = decoding_pages(layout, config, config.max_model_len, engine.k)
    mask, far = RetentionMask(layout, config.retention), 64 * (layout.alignment + (kv.mask.every or 0))
    groups = []
    for number, spec in enumerate(layout.groups):
        # A range far from both ends of a text, so that only the policy decides what is kept there.
        runs = mask.runs(number, far // spec.page_tokens, 2 * far // spec.page_tokens, ())
        kept = sum(stop - first for first, stop in runs) * spec.page_tokens / far
        groups.append(
            GroupMemory(
                name=spec.name,
                owner=OWNERS[number >= layout.num_target],
                layers=layers[number],
                kind=spec.kind.label.partition(":")[0],
                window=spec.kind.window if isinstance(spec.kind, Sliding) else None,
                page_tokens=spec.page_tokens,
                page_bytes=spec.page_bytes,
                unused_bytes=spec.unused_bytes,
                arena=layout.arena_of[number],
                bytes_per_token=spec.slot_bytes,
                pages_per_request=held[number],
                cached_fraction=1.0 if mask.keeps_all[number] else min(1.0, kept),
            )
        )
    arenas = [
        ArenaMemory(
            number=number,
            page_bytes=page_bytes,
            pages=config.arena_pages[number],
            groups=tuple(group.name for group in groups if group.arena == number),
            pages_per_request=sum(group.pages_per_request for group in groups if group.arena == number),
        )
        for number, page_bytes in enumerate(layout.arena_page_bytes)
    ]
    return MemoryReport(
        model=engine.model.name,
        drafter=layout.footprint.name if engine.k else None,
        k=engine.k,
        max_model_len=config.max_model_len,
        retention=config.retention.label if config.prefix_caching else "none: prefix caching is off",
        alignment=layout.alignment,
        total_bytes=total_bytes(layout, config.arena_pages),
        tokens=tokens_held(layout, config),
        groups=groups,
        arenas=arenas,
    )
