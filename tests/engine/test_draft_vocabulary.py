"""Drafters whose vocabulary is not as long as the target's: only tokens that both have are drafted."""

from __future__ import annotations

import pytest
import torch
from tests.engine.tiny import VOCABULARY, tiny_engine

from outrider.sampling import SamplingParams
from outrider.speculative.drafter import DrawRow
from outrider.speculative.vocabulary import DraftVocabulary


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("width", [VOCABULARY - 56, VOCABULARY, VOCABULARY + 40])
def test_drafts_are_tokens_that_both_have(width: int, temperature: float) -> None:
    engine = tiny_engine(speculate=True)
    engine.add_request("a", [1, 2, 3], SamplingParams(temperature=temperature, seed=1))
    shared = min(width, VOCABULARY)
    # All below zero, so that what is filled up with anything but nothing would be preferred.
    logits = torch.full((8, width), -30.0)
    logits[:, shared:] = 50.0
    logits[torch.arange(8), torch.arange(8) * 3] = -5.0
    (request,) = engine.runner.requests.values()
    rows = [DrawRow(request, 3 + number, ()) for number in range(8)]
    vocabulary = DraftVocabulary(size=VOCABULARY)
    assert engine.runner.drafting._draw(logits, rows, vocabulary) == [3 * number for number in range(8)]
