"""The mean of drafters: what is written, that it runs, and what has no mean."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.cli.cli import Done, run_main
from tests.engine.lossless import tokens_of
from tests.engine.tiny import tiny_engine
from tests.tools.training.tiny import PROMPT, settings_for, tiny_loaded, tiny_target, write_corpus

from outrider.api.llm import LLM
from outrider.config import SpeculativeConfig
from outrider.errors import ConfigError
from outrider.sampling import SamplingParams
from outrider.speculative.checkpoints.frequent import FREQUENT_TOKENS
from outrider.tools.training.average import average_drafters
from outrider.tools.training.export import WEIGHTS
from outrider.tools.training.run import train_for


@pytest.fixture
def average(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    return lambda *arguments: run_main(monkeypatch, capsys, ("train", "average", *arguments), "")


def quiet(_line: str) -> None:
    pass


def weights(directory: Path) -> dict[str, torch.Tensor]:
    parts = sorted(directory.glob("model*.safetensors"))
    return {name: tensor for part in parts for name, tensor in load_file(part).items()}


def two_drafters(directory: Path, method: str, **changes: Any) -> list[str]:
    """The second goes on from the first."""
    write_corpus(directory / "corpus")
    first = settings_for(directory, method, output=directory / "first", steps=2, **changes)
    train_for(first, tiny_target(), report=quiet)
    second = settings_for(directory, method, output=directory / "second", steps=2, init=first.output, seed=5, **changes)
    train_for(second, tiny_target(), report=quiet)
    return [str(first.output), str(second.output)]


@pytest.mark.parametrize("method", ["dflash", "eagle3"])
def test_every_weight_is_the_mean_and_the_drafter_runs(method: str, tmp_path: Path) -> None:
    names = two_drafters(tmp_path, method, **({"draft_vocab_size": 40} if method == "eagle3" else {}))
    average_drafters(names, tmp_path / "mean", weights=(3.0, 1.0), report=quiet)
    first, second, mean = (weights(Path(name)) for name in (*names, tmp_path / "mean"))
    assert first.keys() == second.keys() == mean.keys()
    for name, tensor in mean.items():
        assert tensor.dtype == first[name].dtype
        if tensor.is_floating_point():
            expected = 0.75 * first[name].double() + 0.25 * second[name].double()
            torch.testing.assert_close(tensor.double(), expected, rtol=2**-8, atol=0.0)
        else:
            assert torch.equal(tensor, first[name])
    assert any(not torch.equal(mean[name], first[name]) for name in mean)
    assert (tmp_path / "mean" / "config.json").read_bytes() == (tmp_path / "first" / "config.json").read_bytes()
    assert not (tmp_path / "mean" / "evaluation.json").exists()
    card = (tmp_path / "mean" / "README.md").read_text("utf-8")
    assert '- 75.0% "first"\n- 25.0% "second"\n' in card
    assert str(tmp_path) not in card
    speculation = SpeculativeConfig(method=method, model=str(tmp_path / "mean"), num_speculative_tokens=3)
    engines = tiny_engine(tiny_loaded(), speculative_config=speculation), tiny_engine(tiny_loaded())
    prompts, params = [list(range(1, PROMPT + 1))], SamplingParams(temperature=0, max_tokens=12)
    drafted, plain = (tokens_of(LLM.over(engine).generate(prompts, params)) for engine in engines)
    assert drafted == plain
    assert engines[0].speculation.draft_tokens > 0


def test_files_may_be_cut_and_all_count_the_same_by_default(average: Callable[..., Done], tmp_path: Path) -> None:
    names = two_drafters(tmp_path, "dflash")
    done = average(*names, "--output", tmp_path / "mean", "--shard-mib", 1)
    assert done.status == 0, done.err
    assert "the mean of 2 drafters is in" in done.out
    first, second, mean = (weights(Path(name)) for name in (*names, tmp_path / "mean"))
    for name, tensor in mean.items():
        torch.testing.assert_close(
            tensor.double(), (first[name].double() + second[name].double()) / 2, rtol=2**-8, atol=0
        )


def test_names_frequent_tokens_and_files_are_those_asked_for(tmp_path: Path) -> None:
    names = two_drafters(tmp_path, "dflash")
    foreign = another(tmp_path, names[0])
    tensors = weights(foreign)
    # As others call them, and with one that takes a file of its own.
    extra = torch.zeros(1 << 19, dtype=torch.bfloat16)
    save_file({f"model.{name}": tensor for name, tensor in tensors.items()} | {"x": extra}, foreign / WEIGHTS)
    save_file(tensors | {"x": extra + 1}, Path(names[1]) / WEIGHTS)
    (foreign / FREQUENT_TOKENS).write_text("[5,3,1]", "utf-8")
    average_drafters([str(foreign), names[1]], tmp_path / "mean", shard_mib=1, report=quiet)
    found = weights(tmp_path / "mean")
    assert found.keys() == {"x", *(f"model.{name}" for name in tensors)}
    assert torch.equal(found["x"], extra + 0.5)
    assert (tmp_path / "mean" / FREQUENT_TOKENS).read_text("utf-8") == "[5,3,1]"
    assert len(list((tmp_path / "mean").glob("model-*.safetensors"))) == 2
    assert not (tmp_path / "mean" / WEIGHTS).exists()


def another(tmp_path: Path, source: str) -> Path:
    copied = tmp_path / "another"
    shutil.copytree(source, copied)
    return copied


def test_what_has_no_mean_is_refused(tmp_path: Path) -> None:
    names = two_drafters(tmp_path, "eagle3", draft_vocab_size=40)

    def refusal(*drafters: str, **options: Any) -> str:
        with pytest.raises(ConfigError) as caught:
            average_drafters(drafters, options.pop("output", tmp_path / "mean"), report=quiet, **options)
        assert not (tmp_path / "mean").exists()
        return str(caught.value)

    assert "at least two" in refusal(names[0])
    assert "2 drafters and 3 shares" in refusal(*names, weights=(1, 1, 1))
    for share in (0.0, -1.0, float("nan"), float("inf")):
        assert "more than 0" in refusal(*names, weights=(1.0, share))
    assert "their sum a finite number" in refusal(*names, weights=(1e308, 1e308))
    assert "name a new one" in refusal(*names, output=Path(names[1]))
    assert "name a new one" in refusal(*names, output=Path(names[1]) / "config.json")

    assert "cannot be created" in refusal(*names, output=Path(names[1]) / "config.json" / "mean")

    copied = another(tmp_path, names[0])
    config = json.loads((copied / "config.json").read_text("utf-8"))
    (copied / "config.json").write_text(json.dumps(config | {"draft_vocab_size": 39}), "utf-8")
    assert "differ in draft_vocab_size" in refusal(names[0], str(copied))
    assert "differ in draft_vocab_size" in refusal(*names, str(copied))
    (copied / "config.json").write_text(json.dumps(config), "utf-8")

    tensors = load_file(copied / "model.safetensors")
    save_file(tensors | {"d2t": tensors["d2t"] + 1}, copied / "model.safetensors")
    assert "differ in d2t" in refusal(names[0], str(copied))
    save_file(tensors | {"d2t": tensors["d2t"].float() + 1}, copied / "model.safetensors")
    assert "differ in d2t" in refusal(str(copied), names[0])
    save_file(tensors | {"norm.weight": tensors["norm.weight"][:-1]}, copied / "model.safetensors")
    assert "differ in norm.weight" in refusal(names[0], str(copied))
    del tensors["norm.weight"]
    save_file(tensors, copied / "model.safetensors")
    assert "differ in norm.weight" in refusal(names[0], str(copied))


def test_shares_that_are_no_numbers_are_refused(average: Callable[..., Done], tmp_path: Path) -> None:
    done = average("a", "b", "--output", tmp_path / "mean", "--shares", "half,half")
    assert done.status == 2
    assert "write 0.7,0.3" in done.err


def test_the_card_repeats_what_all_cards_say(tmp_path: Path) -> None:
    names = two_drafters(tmp_path, "dflash", licence="Apache-2.0")
    second = Path(names[1]) / "README.md"

    def card(output: str) -> list[str]:
        average_drafters(names, tmp_path / output, report=quiet)
        return (tmp_path / output / "README.md").read_text("utf-8").split("\n---")[0].splitlines()

    tags, model = "tags: [speculative-decoding, draft-model]", f'base_model: "{tiny_target().name}"'
    second.write_text(second.read_text("utf-8").replace('license: "Apache-2.0"', 'license: "apache-2.0"'))
    assert card("alike") == ["---", 'license: "Apache-2.0"', model, tags]
    second.write_text(second.read_text("utf-8").replace('license: "apache-2.0"', 'license: "MIT"'))
    assert card("other") == ["---", model, tags]
    second.write_text("# No front matter\n\nlicense: MIT\n")
    assert card("plain") == ["---", tags]
    second.unlink()
    assert card("none") == ["---", tags]
