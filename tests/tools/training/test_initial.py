"""Runs that begin with the weights of an exported drafter."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from tests.tools.training.tiny import overfit_settings, settings_for, tiny_target, write_corpus

from outrider.errors import ConfigError
from outrider.tools.training.run import train_for


def quiet(_line: str) -> None:
    pass


def length_of(result: dict[str, Any] | None) -> float:
    assert result is not None
    return float(result["categories"]["all"]["mean_acceptance_length"])


def trained(directory: Path, method: str, **changes: Any) -> Path:
    """Where a drafter lies that was trained for a step."""
    write_corpus(directory / "corpus")
    output = directory / "first"
    train_for(settings_for(directory, method, output=output, steps=1, **changes), tiny_target(), report=quiet)
    return output


@pytest.mark.parametrize("method", ["dflash", "eagle3"])
def test_what_was_learnt_is_there_from_the_beginning(method: str, tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus", 4)
    first = overfit_settings(tmp_path, method, output=tmp_path / "first")
    learnt = length_of(train_for(first, tiny_target(), report=quiet))
    # Another order of the data, so that the taps' scale comes from other streams.
    write_corpus(tmp_path / "other", 4, seed=7)
    settings = overfit_settings(
        tmp_path,
        method,
        steps=1,
        lr=1e-9,
        init=first.output,
        data=(tmp_path / "other", tmp_path / "corpus"),
    )
    lines: list[str] = []
    begun = length_of(train_for(settings, tiny_target(), report=lines.append))
    assert learnt > 3.0
    assert begun == pytest.approx(learnt, abs=0.1)
    assert any("starting with the weights of" in line for line in lines)
    assert "begun with the weights of an earlier drafter" in (settings.output / "README.md").read_text("utf-8")


def test_tokens_are_those_of_the_drafter_and_not_chosen_again(tmp_path: Path) -> None:
    block = trained(tmp_path, "dflash", mask_token_id=77)
    settings = settings_for(tmp_path, steps=1, init=block, output=tmp_path / "next")
    train_for(settings, tiny_target(), report=quiet)
    config = json.loads((settings.output / "config.json").read_text("utf-8"))
    assert config["dflash_config"]["mask_token_id"] == 77

    chain = tmp_path / "chain"
    first = trained(chain, "eagle3", draft_vocab_size=40)
    write_corpus(chain / "others", 8, seed=3)
    settings = settings_for(chain, "eagle3", steps=1, init=first, data=(chain / "others",))
    train_for(settings, tiny_target(), report=quiet)
    before, after = load_file(first / "model.safetensors"), load_file(settings.output / "model.safetensors")
    assert len(before["d2t"]) == 40
    assert after["d2t"].equal(before["d2t"])


def test_a_run_that_goes_on_does_not_begin_again(tmp_path: Path) -> None:
    first = trained(tmp_path, "dflash")
    settings = settings_for(tmp_path, steps=2, init=first)
    train_for(settings, tiny_target(), report=quiet)
    lines: list[str] = []
    train_for(settings_for(tmp_path, steps=3, init=first), tiny_target(), report=lines.append)
    assert any("resuming from step 2" in line for line in lines)
    assert not any("starting with" in line for line in lines)


@pytest.mark.parametrize(
    ("method", "changes", "text"),
    [
        ("dflash", {"layers": 3}, "layers is 2, wanted 3"),
        ("dflash", {"taps": (0, 2)}, r"taps is \[0, 1, 2\], wanted \[0, 2\]"),
        ("dflash", {"causal": True}, "causal is False, wanted True"),
        ("dflash", {"mask_token_id": 5}, r"mask_token_id is \d+, wanted 5"),
        ("eagle3", {"draft_vocab_size": 30}, "draft_vocab_size is 40, wanted 30"),
        ("eagle3", {"taps": (1,)}, r"taps is \[0, 1, 2\], wanted \[1\]"),
    ],
)
def test_another_shape_is_refused_and_said(method: str, changes: dict[str, Any], text: str, tmp_path: Path) -> None:
    first = trained(tmp_path, method, **({"draft_vocab_size": 40} if method == "eagle3" else {}))
    with pytest.raises(ConfigError, match=text):
        train_for(settings_for(tmp_path, method, steps=1, init=first, **changes), tiny_target(), report=quiet)


def test_an_installed_drafter_may_be_named(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus", 4)
    # It is found, and does not fit the tiny target.
    with pytest.raises(ConfigError, match="another shape"):
        train_for(settings_for(tmp_path, init=Path("smollm2-135m-instruct-dflash")), tiny_target(), report=quiet)


def test_drafters_of_another_kind_and_damaged_ones_are_refused(tmp_path: Path) -> None:
    block, chain = trained(tmp_path / "a", "dflash"), trained(tmp_path / "b", "eagle3")
    with pytest.raises(ConfigError, match="not a DFlash drafter"):
        train_for(settings_for(tmp_path / "a", init=chain), tiny_target(), report=quiet)
    with pytest.raises(ConfigError, match="not an EAGLE-3 drafter"):
        train_for(settings_for(tmp_path / "b", "eagle3", init=block), tiny_target(), report=quiet)
    with pytest.raises(ConfigError, match="neither a directory"):
        train_for(settings_for(tmp_path / "a", init=tmp_path / "nowhere"), tiny_target(), report=quiet)

    def damaged(source: Path, name: str, **change: Any) -> Path:
        copy = shutil.copytree(source, tmp_path / name)
        tensors = load_file(copy / "model.safetensors")
        for tensor, factor in change.items():
            key = tensor.replace("__", ".")
            if factor is None:
                del tensors[key]
            else:
                tensors[key] = tensors[key] * factor
        save_file(tensors, copy / "model.safetensors")
        return copy

    lacking = damaged(block, "lacking", hidden_norm__weight=None)
    with pytest.raises(ConfigError, match=r"hidden_norm\.weight is missing"):
        train_for(settings_for(tmp_path / "a", init=lacking), tiny_target(), report=quiet)
    other_head = damaged(chain, "other-head", lm_head__weight=2)
    with pytest.raises(ConfigError, match="a head that is not the target's"):
        train_for(settings_for(tmp_path / "b", "eagle3", init=other_head), tiny_target(), report=quiet)
