"""The registry of drafters and model families: built-in names hold, and wrong packages are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.engine.tiny import tiny_model

from outrider.config import EngineConfig, SpeculativeConfig
from outrider.engine.build import build_engine
from outrider.errors import ConfigError, ExtensionError, ModelError
from outrider.models.recipes import recipe_for, recipe_for_gguf
from outrider.speculative.registry import BUILT_IN, drafting_method, guess_method, method_names


def provide(
    place: Path, package: str, group: str, name: str, value: str, *, source: str = "", module: str = ""
) -> None:
    """A package's metadata and module, as pip would lay them out."""
    metadata = place / f"{package.replace('-', '_')}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[{group}]\n{name} = {value}\n")
    if module:
        (place / f"{module}.py").write_text(source)


def test_a_package_that_cannot_be_imported_is_named_and_disturbs_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    provide(tmp_path, "broken-one", "outrider.drafters", "crash", "crashes:METHOD", module="crashes", source="1 / 0")
    provide(tmp_path, "broken-two", "outrider.models", "Crash", "absent:RECIPE")
    monkeypatch.syspath_prepend(tmp_path)
    for name in BUILT_IN:
        assert drafting_method(name).name == name
    with pytest.raises(
        ExtensionError, match=r"package broken-one .* 'crash' .* cannot be imported \(ZeroDivisionError"
    ):
        drafting_method("crash")
    with pytest.raises(ExtensionError, match=r"package broken-two .* cannot be imported"):
        recipe_for({"architectures": ["Crash"]}, "here")
    assert recipe_for_gguf("llama", "here").family == "llama"
    # What cannot be recognised may be theirs, so the answer says that they could not be asked.
    unknown = tmp_path / "checkpoint"
    unknown.mkdir()
    (unknown / "config.json").write_text('{"architectures": ["Unknown"]}')
    save_file({"fc.weight": torch.zeros(1)}, unknown / "model.safetensors")
    with pytest.raises(ModelError, match=r"name the method: ngram, .*, crash; the package broken-one"):
        guess_method(str(unknown))


def test_an_entry_point_must_give_the_right_kind_of_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    provide(tmp_path, "odd-one", "outrider.drafters", "odd", "odd_one:METHOD", module="odd_one", source="METHOD = {}")
    provide(tmp_path, "odd-two", "outrider.models", "Odd", "odd_two:R", module="odd_two", source="R = 'llama'")
    source = "from outrider.speculative.drafters.ngram import NGRAM"
    provide(tmp_path, "odd-three", "outrider.drafters", "other", "odd_three:NGRAM", module="odd_three", source=source)
    source = "from outrider.models.recipes.qwen3 import QWEN3"
    provide(tmp_path, "odd-four", "outrider.models", "Other", "odd_four:QWEN3", module="odd_four", source=source)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ExtensionError, match=r"package odd-one .* must be a DrafterMethod, not a dict"):
        drafting_method("odd")
    with pytest.raises(ExtensionError, match=r"package odd-two .* must be a Recipe, not a str"):
        recipe_for({"architectures": ["Odd"]}, "here")
    with pytest.raises(ExtensionError, match="'ngram' under the name 'other'"):
        drafting_method("other")
    with pytest.raises(ExtensionError, match="recipe for Qwen3ForCausalLM"):
        recipe_for({"architectures": ["Other"]}, "here")


def test_a_name_that_two_packages_claim_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("first-package", "second-package"):
        provide(tmp_path, package, "outrider.drafters", "twice", "anything:METHOD")
        provide(tmp_path / package, package, "outrider.models", "Twice", "anything:RECIPE")
        monkeypatch.syspath_prepend(tmp_path / package)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ExtensionError, match=r"'twice' .* by several packages: first-package, second-package"):
        drafting_method("twice")


def test_a_built_in_name_stays_with_the_built_in_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    provide(tmp_path, "greedy-package", "outrider.drafters", "ngram", "anything:METHOD")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.warns(UserWarning, match="what greedy-package registers under this name is not used"):
        assert drafting_method("ngram").title == "n-gram look-up"
    assert method_names() == list(BUILT_IN)
    provide(tmp_path / "more", "greedy-family", "outrider.models", "LlamaForCausalLM", "anything:RECIPE")
    monkeypatch.syspath_prepend(tmp_path / "more")
    with pytest.warns(UserWarning, match="what greedy-family registers"):
        assert recipe_for({"architectures": ["LlamaForCausalLM"]}, "here").family == "llama"


def test_an_unknown_method_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(ConfigError, match="unknown drafting method 'guessing'; known methods: ngram, dflash"):
        build_engine(
            EngineConfig(device="cpu", backend="reference", speculative_config=SpeculativeConfig(method="guessing")),
            model=tiny_model(),
        )


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("ngram", {"model": "anything"}),
        ("ngram", {"draft_vocab_size": 9}),
        ("ngram", {"pack_weights": True}),
        ("ngram", {"draft_confidence": 0.5}),
        ("draft_model", {"draft_vocab_size": 9}),
        ("draft_model", {"pack_weights": True}),
        ("draft_model", {"prompt_lookup_max": 7}),
        ("dflash", {"num_hidden_layers": 2}),
        ("eagle", {"draft_vocab_size": 9}),
        ("eagle3", {"draft_vocab_size": 9}),
        ("mtp", {"draft_vocab_size": 9}),
        ("mtp", {"model": "anything"}),
    ],
)
def test_options_that_a_method_does_not_take_are_refused(method: str, options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(ConfigError, match=f"{name} is .*, which method '{method}' does not take; leave {name} out"):
        drafting_method(method).check_options(SpeculativeConfig(method=method, **options))
    drafting_method(method).check_options(
        SpeculativeConfig(method=method, num_speculative_tokens=3, draft_vocab_size=0)
    )
