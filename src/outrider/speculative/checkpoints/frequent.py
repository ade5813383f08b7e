"""A drafter's list of the target's tokens, the most frequent first.

Most of what a model writes is made of a part of its vocabulary. A drafter that scores only that part reads a third of
the head's rows, and misses what the target rarely says. The list lies beside the weights, in a file of its own, so
that engines which do not know it find what they expect.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

from outrider.errors import ConfigError, ModelError
from outrider.models.packed import PackedMatrix
from outrider.models.packing import Packer
from outrider.models.parameters import Linear
from outrider.speculative.settings import DrafterSettings
from outrider.speculative.vocabulary import DraftVocabulary

FREQUENT_TOKENS = "frequent_tokens.json"
USUAL_SIZE = 16_384
"""Of the tokens that the shipped drafters' target writes, 98.3% are among as many."""


def read_frequent(directory: Path, settings: DrafterSettings) -> Tensor | None:
    """int64, rising: the tokens to draft; None: all of them."""
    path, size = directory / FREQUENT_TOKENS, settings.draft_vocab_size
    if size == 0 or (size is None and not settings.packed):
        # Whoever has the bandwidth drafts from everything.
        return None
    vocab_size = settings.target.spec.vocab_size
    if not path.is_file():
        if size is None or size >= vocab_size:
            return None
        raise ConfigError(
            f"speculative_config: draft_vocab_size is {size}, but {directory} has no {FREQUENT_TOKENS} that says which "
            "tokens are the most frequent; leave draft_vocab_size out"
        )
    try:
        tokens = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as problem:
        raise ModelError(f"{path} is no readable JSON ({problem}); remove it or replace it") from None
    if not isinstance(tokens, list) or not tokens or not all(type(token) is int for token in tokens):
        raise ModelError(f"{path} must be a list of token ids, the most frequent first; remove it or replace it")
    if len(set(tokens)) != len(tokens) or min(tokens) < 0 or max(tokens) >= vocab_size:
        raise ModelError(
            f"{path} must name tokens of the target {settings.target.name}, 0 to {vocab_size - 1}, each once; "
            "remove it or replace it"
        )
    wanted = min(USUAL_SIZE, len(tokens)) if size is None else size
    if wanted >= vocab_size:
        return None
    if wanted > len(tokens):
        raise ConfigError(
            f"speculative_config: draft_vocab_size is {wanted}, but {path} has only {len(tokens)} tokens; "
            "choose fewer, or leave it out"
        )
    return torch.tensor(sorted(tokens[:wanted]), device=settings.device)


def limit_to(tokens: Tensor, head: Linear, settings: DrafterSettings) -> tuple[Linear, DraftVocabulary]:
    """The head's rows for these tokens."""
    rows = head.rows(tokens)
    if isinstance(rows.weight, PackedMatrix):
        rows = Linear(weight=Packer().keep(rows.weight), bias=rows.bias)
    return rows, DraftVocabulary(size=settings.target.spec.vocab_size, target_ids=tokens)
