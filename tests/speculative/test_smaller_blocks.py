"""A drafter that was trained with several sizes of blocks drafts in the smallest that will do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.engine.tiny import tiny_engine
from tests.speculative.cases import CASES, GREEDY, prompts, three_layers
from tests.speculative.tiny import settings_for

from outrider.api.llm import LLM
from outrider.errors import ModelError
from outrider.speculative.drafters.dflash import load_dflash

CASE = CASES["full"]


def trained_with(directory: Path, sizes: object) -> Path:
    path = CASE.save(directory, three_layers())
    config = json.loads((path / "config.json").read_text())
    config["smaller_block_sizes"] = sizes
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize(("most_drafts", "rows"), [(1, 3), (2, 3), (3, 4), (4, 8), (7, 8), (9, 8), (None, 8)])
def test_the_smallest_block_that_will_do(most_drafts: int | None, rows: int, tmp_path: Path) -> None:
    path = trained_with(tmp_path, [4, 3])
    block_size = json.loads((path / "config.json").read_text())["block_size"]
    drafter = load_dflash(str(path), settings_for(three_layers(), page_tokens=8, most_drafts=most_drafts))
    assert drafter.footprint.block_rows == (block_size if rows == 8 else rows)


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
