"""A drafter that was trained with several sizes of blocks drafts in the smallest that will do."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.engine.tiny import tiny_engine
from tests.speculative.block_cases import BLOCK_SIZE
from tests.speculative.cases import CASES, GREEDY, prompts, three_layers
from tests.speculative.tiny import settings_for

from outrider.api.llm import LLM
from outrider.backends.batch import Batch
from outrider.errors import ModelError
from outrider.models.decoder import DecoderOutput
from outrider.speculative.drafter import ProposeRow
from outrider.speculative.drafters.dflash import load_dflash

CASE = CASES["full"]


def trained_with(directory: Path, sizes: object) -> Path:
    path = CASE.save(directory, three_layers())
    config = json.loads((path / "config.json").read_text())
    config["smaller_block_sizes"] = sizes
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize(
    ("most_drafts", "sizes"),
    [
        (1, (3,)),
        (2, (3,)),
        (3, (3, 4)),
        *((most, (3, 4, BLOCK_SIZE)) for most in (4, BLOCK_SIZE - 1, BLOCK_SIZE + 1, None)),
    ],
)
def test_no_block_is_larger_than_the_smallest_that_will_do(
    most_drafts: int | None, sizes: tuple[int, ...], tmp_path: Path
) -> None:
    path = trained_with(tmp_path, [4, 3])
    assert json.loads((path / "config.json").read_text())["block_size"] == BLOCK_SIZE
    drafter = load_dflash(str(path), settings_for(three_layers(), page_tokens=8, most_drafts=most_drafts))
    assert drafter.footprint.block_sizes == sizes
    # Each number of drafts takes the smallest block that holds it.
    for k in range(1, sizes[-1]):
        assert drafter.footprint.query_len(k) == min(rows for rows in sizes if rows > k)


@pytest.mark.parametrize("sizes", [[1], [0, 4], [99], "4", [4.5]])
def test_impossible_sizes_are_refused(sizes: object, tmp_path: Path) -> None:
    path = trained_with(tmp_path, sizes)
    with pytest.raises(ModelError, match="smaller_block_sizes"):
        load_dflash(str(path), settings_for(three_layers(), page_tokens=8))


def test_the_text_stays(tmp_path: Path) -> None:
    target, path = three_layers(), trained_with(tmp_path, [3])
    drafter = load_dflash(str(path), settings_for(target, page_tokens=8, most_drafts=2))
    engine = tiny_engine(target, drafter=drafter, method=CASE.method, block_size=8, k=2)
    plain = LLM.over(tiny_engine(target)).generate(prompts(), GREEDY)
    found = LLM.over(engine).generate(prompts(), GREEDY)
    assert [each.outputs[0].token_ids for each in found] == [each.outputs[0].token_ids for each in plain]
    assert engine.speculation.draft_tokens > 0


def test_each_proposal_has_the_smallest_block_that_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few drafts are asked for near the end of a text. Blocks of several sizes share a pass."""
    target, path = three_layers(), trained_with(tmp_path, [3])
    drafter = load_dflash(str(path), settings_for(target, page_tokens=8))
    asked: list[list[int]] = []
    rows: list[int] = []
    engine = tiny_engine(target, drafter=drafter, method=CASE.method, block_size=8, k=3, sanitizer="raise")
    propose, forward = drafter.propose, drafter._paged.forward  # type: ignore[union-attr]

    def noting_propose(wanted: Sequence[ProposeRow]) -> list[list[int]]:
        asked.append([row.k for row in wanted])
        return propose(wanted)

    def noting_forward(batch: Batch, **options: Any) -> DecoderOutput:
        rows.append(len(batch.token_ids))
        return forward(batch, **options)

    monkeypatch.setattr(drafter, "propose", noting_propose)
    monkeypatch.setattr(drafter._paged, "forward", noting_forward)
    plain = LLM.over(tiny_engine(target)).generate(prompts(), GREEDY)
    found = LLM.over(engine).generate(prompts(), GREEDY)
    assert [each.outputs[0].token_ids for each in found] == [each.outputs[0].token_ids for each in plain]
    whole = drafter.spec.block_size
    assert rows == [sum(3 if k <= 2 else whole for k in ks) for ks in asked]
    assert any(min(ks) <= 2 < max(ks) for ks in asked)
