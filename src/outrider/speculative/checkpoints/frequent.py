"""A drafter's list of the target's tokens, the most frequent first.

Most of a model's text is made of a part of its vocabulary. A drafter that scores only that part reads a third of the
head's rows and never proposes the rare tokens. The list is a file of its own beside the weights, so that other engines
can read the checkpoint without knowing about it.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

from outrider.errors import ConfigError, ModelError
from outrider.models.parameters import Linear, Matrix
from outrider.speculative.settings import DrafterSettings
from outrider.speculative.vocabulary import DraftVocabulary

FREQUENT_TOKENS = "frequent_tokens.json"
USUAL_SIZE = 16_384
"""Default number of tokens: 98.3% of what the default model writes are among as many of its most frequent tokens."""


def read_frequent(directory: Path, settings: DrafterSettings) -> Tensor | None:
    """Returns the tokens to draft from, int64 and ascending; None for all tokens."""
    path, size = directory / FREQUENT_TOKENS, settings.draft_vocab_size
    if size == 0 or (size is None and not settings.packed):
        # Unpacked weights mean that memory bandwidth is not the limit here.
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
        raise ModelError(f"{path} cannot be read as JSON ({problem}); remove it or replace it") from None
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
            "choose a smaller number, or leave it out"
        )
    return torch.tensor(sorted(tokens[:wanted]), device=settings.device)


def limit_to(tokens: Tensor, head: Linear, settings: DrafterSettings) -> tuple[Linear, DraftVocabulary]:
    """Returns the head's rows for these tokens, and the vocabulary that they make up."""
    rows = head.rows(tokens).mapped(lambda matrix: _kept(matrix, settings))
    return rows, DraftVocabulary(size=settings.target.spec.vocab_size, target_ids=tokens)


def _kept(rows: Matrix, settings: DrafterSettings) -> Matrix:
    """Returns a copy of a head's rows in the form that the drafter scores tokens with."""
    if settings.packed:
        written_out = rows if isinstance(rows, Tensor) else rows.expand()
        coarse = settings.backend.coarsen(written_out)
        if coarse is not written_out:
            return coarse
    return settings.backend.keep(rows)
