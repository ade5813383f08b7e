"""Naming one drafter on the command line: method, checkpoint, number of drafts, and further settings as JSON."""

from __future__ import annotations

from typing import Any

from outrider.config import SpeculativeConfig
from outrider.errors import ConfigError

METHODS = ("ngram", "dflash", "eagle3", "eagle", "mtp", "draft_model")
USUAL_DRAFTS = {"dflash": 7, "eagle3": 5, "eagle": 5}
"""What public drafters of these methods were trained to draft."""
OTHERWISE_DRAFTS = 4


def usual_drafts(method: str) -> int:
    return USUAL_DRAFTS.get(method, OTHERWISE_DRAFTS)


def speculation_of(
    given: dict[str, Any] | None, *, method: str | None, drafter: str | None, k: int | None
) -> SpeculativeConfig:
    """From --method, --drafter and --k, and from --speculative-config for everything else."""
    fields = dict(given or {})
    for option, name, value in (
        ("--method", "method", method),
        ("--drafter", "model", drafter),
        ("--k", "num_speculative_tokens", k),
    ):
        if value is None:
            continue
        if fields.get(name, value) != value:
            raise ConfigError(
                f"{option} says {value!r}, but --speculative-config says {name} {fields[name]!r}; give one of them"
            )
        fields[name] = value
    if "method" not in fields:
        raise ConfigError(f"no drafting method is given; choose one with --method: {', '.join(METHODS)}")
    if fields["method"] not in METHODS:
        raise ConfigError(f"unknown drafting method {fields['method']!r}; known methods: {', '.join(METHODS)}")
    fields.setdefault("num_speculative_tokens", usual_drafts(fields["method"]))
    # What is asked for is what the drafter can do, not what is fastest here.
    fields.setdefault("draft_vocab_size", 0)
    return SpeculativeConfig(**fields)
