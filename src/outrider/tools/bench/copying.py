"""Requests whose answers copy from the prompt: quotations, edits of code, lists and JSON written again, corrections.

`copying.jsonl` has a request per line, with its category and the fraction of 4-grams of the answer that occur in the
prompt when SmolLM2-135M-Instruct answers greedily, in at most 160 tokens. Some requests have a low fraction on purpose:
looking drafts up in the prompt must not be judged by texts alone that suit it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

COPYING_NAME = "copying"
"""What the command line calls these requests where it takes a file."""
NGRAM = 4


class CopyingRequest(NamedTuple):
    category: str
    prompt: str
    copied: float
    """Fraction of the default model's answer that was copied when the requests were collected."""


def copying_path() -> Path:
    return Path(str(files("outrider.tools.bench") / "copying.jsonl"))


@cache
def copying_requests() -> tuple[CopyingRequest, ...]:
    """Returns all requests; neighbours are of different categories, so that the first few are a fair sample."""
    lines = copying_path().read_text(encoding="utf-8").splitlines()
    return tuple(CopyingRequest(**json.loads(line)) for line in lines)


def copied_ngrams(prompt: Sequence[int], answer: Sequence[int], *, length: int = NGRAM) -> tuple[int, int]:
    """Returns how many n-grams of the answer occur in the prompt, and how many it has."""
    seen = {tuple(prompt[start : start + length]) for start in range(len(prompt) - length + 1)}
    written = [tuple(answer[start : start + length]) for start in range(len(answer) - length + 1)]
    return sum(ngram in seen for ngram in written), len(written)
