"""Checkpoints in every layout load through the engine's settings; what does not belong to the target is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.engine.lossless import tokens_of
from tests.engine.tiny import tiny_model, tiny_spec
from tests.models import fakes
from tests.speculative.ahead_cases import ModuleCase, ThirdCase
from tests.speculative.cases import CASES, GREEDY, assert_as_reference, engine_with, prompts, three_layers
from tests.speculative.tiny import settings_for

from outrider.api.llm import LLM
from outrider.config import EngineConfig, SpeculativeConfig
from outrider.engine.build import build_engine
from outrider.errors import ConfigError, ModelError
from outrider.models.load import LoadedModel, load_model
from outrider.speculative.registry import guess_method, load_drafter


@pytest.fixture(scope="module")
def target() -> LoadedModel:
    return three_layers()


def load(directory: Path, target: LoadedModel, method: str) -> Any:
    return load_drafter(SpeculativeConfig(method=method, model=str(directory)), settings_for(target))


# ---- what is accepted ----------------------------------------------------------------------------------


def test_shards_and_other_types_of_numbers_load(target: LoadedModel, tmp_path: Path) -> None:
    case = CASES["full"]
    path = case.save(tmp_path, target)
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(path / "model.safetensors").items()}
    (path / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {name: f"model-{number % 2}.safetensors" for number, name in enumerate(names)}
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name in names if weight_map[name] == file}, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert load(path, target, "dflash").footprint.taps == (0, 2)


def test_the_usual_layer_ids_are_taken_where_a_file_names_none(tmp_path: Path) -> None:
    deep = tiny_model(tiny_spec(windows=(None,) * 8))
    case = ThirdCase(layout="original", taps=(1, 3, 4), says_ids=False)
    engine, recorder = engine_with(case, deep, tmp_path)
    assert recorder.footprint.taps == (1, 3, 4)
    LLM.over(engine).generate(prompts()[3:], GREEDY)
    assert_as_reference(case, deep, recorder)


def test_a_layer_may_be_tapped_twice(tmp_path: Path) -> None:
    """As the usual ids do in a target of six layers."""
    deep = tiny_model(tiny_spec(windows=(None,) * 6))
    case = ThirdCase(layout="speculators", taps=(1, 2, 2))
    engine, recorder = engine_with(case, deep, tmp_path)
    LLM.over(engine).generate(prompts()[3:], GREEDY)
    assert_as_reference(case, deep, recorder)


@pytest.mark.parametrize("layout", ["deepseek", "qwen"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_module_in_the_target_s_directory_drafts(family: str, layout: str, tmp_path: Path) -> None:
    path = fakes.save(fakes.tiny_model(family), tmp_path / "model")
    bare = load_model(str(path), dtype=torch.float32)
    case = ModuleCase(layout=layout)
    tensors = load_file(path / "model.safetensors") | case.tensors(bare)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")
    fakes.edit_json(path / "config.json", num_nextn_predict_layers=1)
    settings = EngineConfig(
        model=str(path),
        backend="reference",
        max_model_len=100,
        kv_cache_memory_bytes=1 << 22,
        sanitizer="raise",
        sanitizer_level="bytes",
        speculative_config=SpeculativeConfig(method="mtp", num_speculative_tokens=3),
    )
    engine = build_engine(settings)
    plain = build_engine(replace(settings, speculative_config=None))
    found = tokens_of(LLM.over(engine).generate([[1, 2, 3]], GREEDY))
    assert found == tokens_of(LLM.over(plain).generate([[1, 2, 3]], GREEDY))
    assert engine.speculation.draft_tokens > 0


# ---- what is refused -----------------------------------------------------------------------------------

Damage = Callable[[dict[str, Any], dict[str, torch.Tensor]], None]


def at_top(**changes: Any) -> Damage:
    return lambda config, tensors: config.update(changes)


def inside(part: str, **changes: Any) -> Damage:
    return lambda config, tensors: config[part].update(changes)


def without(name: str) -> Damage:
    return lambda config, tensors: tensors.__delitem__(name)


def cut(name: str) -> Damage:
    def damage(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = tensors[name][:-1].contiguous()

    return damage


def extra(name: str) -> Damage:
    def damage(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = torch.zeros(3)

    return damage


def d2t_twice(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """Maps two draft tokens to one token of the target."""
    tensors["d2t"][-1] = tensors["d2t"][-2] - 1


def d2t(value: int) -> Damage:
    def damage(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        tensors["d2t"][-1] = value

    return damage


def drop(part: str, field: str) -> Damage:
    return lambda config, tensors: config[part].__delitem__(field)


REFUSED: dict[str, tuple[str, Damage, tuple[str, ...]]] = {
    "another hidden size": ("full", at_top(hidden_size=64), ("hidden_size is 64", "tiny-0", "has 32", "trained for")),
    "a small vocabulary": ("full", at_top(vocab_size=100), ("vocab_size is 100", "256 tokens")),
    "a large vocabulary": ("full", at_top(vocab_size=151_936), ("vocab_size is 151936", "256")),
    "another target": ("full", at_top(num_target_layers=36), ("num_target_layers is 36", "3 layers")),
    "layer ids out of range": ("full", inside("dflash_config", target_layer_ids=[0, 3]), ("[0, 3]", "0 to 2")),
    "too few layer ids": (
        "full",
        inside("dflash_config", target_layer_ids=[1]),
        ("fc.weight is [32, 64]", "32 columns"),
    ),
    "no layer ids": ("full", drop("dflash_config", "target_layer_ids"), ("target_layer_ids", "0 to 2")),
    "a mask out of range": ("full", inside("dflash_config", mask_token_id=256), ("mask_token_id is 256", "256 tokens")),
    "no mask": ("full", drop("dflash_config", "mask_token_id"), ("no 'mask_token_id'",)),
    "a block of one": ("full", at_top(block_size=1), ("block_size must be at least 2", "got 1")),
    "a smaller block as large as the block": (
        "full",
        at_top(smaller_block_sizes=[3, 5]),
        ("smaller_block_sizes must be", "below block_size (5)"),
    ),
    "neighbours rotated": ("full", at_top(rope_interleave=True), ("rope_interleave", "halves")),
    "unknown scaling": ("full", at_top(rope_scaling={"rope_type": "longrope"}), ("longrope", "supported")),
    "a tensor missing": ("full", without("layers.1.mlp.up_proj.weight"), ("missing layers.1.mlp.up_proj.weight",)),
    "a tensor too many": ("full", extra("layers.2.mlp.up_proj.weight"), ("unexpected layers.2.mlp.up_proj.weight",)),
    "a tensor cut": ("full", cut("layers.0.self_attn.q_proj.weight"), ("misshapen", "[63, 32]", "[64, 32]")),
    "no fc": ("full", without("fc.weight"), ("no tensor fc.weight",)),
    "another network": ("full", at_top(architectures=["DFlash2DraftModel"]), ("DFlash2DraftModel", "DFlashDraftModel")),
    "sinks": ("full", inside("dflash_config", use_swa=True), ("use_swa is not supported",)),
    "a window without a width": ("sliding", at_top(sliding_window=None), ("sliding_window",)),
    "a window of nothing": ("sliding", at_top(sliding_window=0), ("sliding_window must be at least 1", "got 0")),
    "a cap below 0": (
        "full",
        inside("dflash_config", final_logit_softcapping=-1.0),
        ("final_logit_softcapping must be a number above 0", "got -1.0"),
    ),
    "norms that subtract": ("full", at_top(rms_norm_eps=-1e-6), ("rms_norm_eps must be a number above 0",)),
    "strange layers": ("full", at_top(layer_types=["linear", "linear"]), ("linear", "full_attention")),
    "speculators, embeddings as layer 0": (
        "speculators",
        at_top(aux_hidden_state_layer_ids=[0, 2]),
        ("[0, 2]", "1 to 3"),
    ),
    "speculators, another method": ("speculators", at_top(speculators_model_type="eagle3"), ("'eagle3'", "method")),
    "speculators, strange layers": (
        "speculators",
        inside("transformer_layer_config", model_type="gpt_oss"),
        ("gpt_oss", "qwen3"),
    ),
    "speculators, anchors": ("speculators", at_top(sample_from_anchor=True), ("sample_from_anchor",)),
    "speculators, no d2t": ("speculators, own everything", without("d2t"), ("draft_vocab_size is 100", "d2t")),
    "speculators, d2t out of range": ("speculators, own everything", d2t(500), ("d2t", "599", "256 tokens")),
    "speculators, d2t below 0": ("speculators, own everything", d2t(-200), ("d2t", "-101")),
    "speculators, d2t twice": ("speculators, own everything", d2t_twice, ("several draft tokens", "damaged")),
    "speculators, layers of no name": (
        "speculators",
        inside("transformer_layer_config", model_type=[1]),
        ("model_type [1]", "qwen3"),
    ),
    "another target's hidden size": ("full", at_top(target_hidden_size=48), ("target_hidden_size is 48", "has 32")),
    "a block of a thousand million": ("full", at_top(block_size=10**9), ("block_size", "1024")),
    "speculators, d2t and t2d differ": ("speculators, own everything", d2t(-99), ("d2t", "damaged")),
    "eagle3, another hidden size": ("eagle3", at_top(hidden_size=48, head_dim=12), ("hidden_size is 48", "has 32")),
    "eagle3, ids of another target": (
        "eagle3",
        inside("eagle_config", eagle_aux_hidden_state_layer_ids=[2, 16, 29]),
        ("[2, 16, 29]", "1 to 3"),
    ),
    "eagle3, no ids": ("eagle3", at_top(eagle_config={}), ("eagle_aux_hidden_state_layer_ids", "3 layers")),
    "eagle3, two layers": ("eagle3", at_top(num_hidden_layers=2), ("num_hidden_layers is 2", "one layer")),
    "eagle3, no head": ("eagle3", without("lm_head.weight"), ("d2t but no lm_head.weight",)),
    "eagle3, no norm": ("eagle3", without("norm.weight"), ("missing norm.weight",)),
    "eagle, a norm too many": ("eagle", extra("norm.weight"), ("unexpected norm.weight",)),
}


@pytest.mark.parametrize(("name", "damage", "parts"), REFUSED.values(), ids=REFUSED)
def test_broken_checkpoints_are_refused(
    name: str, damage: Damage, parts: tuple[str, ...], target: LoadedModel, tmp_path: Path
) -> None:
    case = CASES[name]
    path = case.save(tmp_path, target)
    config = json.loads((path / "config.json").read_text())
    tensors = load_file(path / "model.safetensors")
    damage(config, tensors)
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ModelError) as refusal:
        load(path, target, case.method)
    for part in (*parts, str(path)):
        assert part in str(refusal.value)


@pytest.mark.parametrize(("name", "method"), [("eagle", "eagle3"), ("eagle3", "eagle")])
def test_the_other_version_is_refused(name: str, method: str, target: LoadedModel, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=f"use method '{name}'"):
        load(CASES[name].save(tmp_path, target), target, method)


def test_embeddings_stored_in_pickles_are_refused(target: LoadedModel, tmp_path: Path) -> None:
    path = CASES["full"].save(tmp_path, target)
    (path / "mask_embedding.pt").write_bytes(b"")
    with pytest.raises(ModelError, match="can run code"):
        load(path, target, "dflash")


@pytest.mark.parametrize("method", ["dflash", "eagle", "eagle3"])
def test_a_method_with_a_checkpoint_needs_one(method: str, target: LoadedModel) -> None:
    with pytest.raises(ConfigError, match="needs 'model'"):
        load_drafter(SpeculativeConfig(method=method), settings_for(target))


def module_target(tmp_path: Path, target: LoadedModel, damage: Damage, layout: str = "deepseek") -> LoadedModel:
    case = ModuleCase(layout=layout)
    config, tensors = case.config(target), case.tensors(target)
    damage(config, tensors)
    tmp_path.mkdir(exist_ok=True)
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    return replace(target, path=tmp_path)


@pytest.mark.parametrize(
    ("layout", "damage", "part"),
    [
        ("deepseek", at_top(num_nextn_predict_layers=3), "num_nextn_predict_layers is 3"),
        ("deepseek", extra("model.layers.3.self_attn.kv_a_proj_with_mqa.weight"), "latent"),
        ("deepseek", without("model.layers.3.eh_proj.weight"), "no MTP module"),
        ("deepseek", without("model.layers.3.enorm.weight"), "missing model.layers.3.enorm.weight"),
        ("qwen", at_top(mtp_num_hidden_layers=2), "mtp_num_hidden_layers is 2"),
        ("qwen", extra("mtp.layers.1.input_layernorm.weight"), "several layers"),
        ("qwen", cut("mtp.fc.weight"), "misshapen mtp.fc.weight"),
    ],
)
def test_broken_modules_are_refused(
    layout: str, damage: Damage, part: str, target: LoadedModel, tmp_path: Path
) -> None:
    broken = module_target(tmp_path / "model", target, damage, layout)
    with pytest.raises(ModelError) as refusal:
        load_drafter(SpeculativeConfig(method="mtp"), settings_for(broken))
    assert part in str(refusal.value)


def test_a_target_without_files_has_no_module(target: LoadedModel) -> None:
    with pytest.raises(ModelError, match="not a directory of safetensors"):
        load_drafter(SpeculativeConfig(method="mtp"), settings_for(target))


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not isinstance(case, ModuleCase)])
def test_the_method_is_guessed_from_the_checkpoint(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    assert guess_method(str(case.save(tmp_path, three_layers()))) == case.method


@pytest.mark.parametrize("name", ["full", "eagle"])
def test_a_drafter_with_a_shorter_context_than_the_target_stops_there(name: str, tmp_path: Path) -> None:
    case, target = CASES[name], three_layers()
    directory = case.save(tmp_path / "saved", target)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 50}))
    speculation = SpeculativeConfig(method=case.method, model=str(directory))
    for longest in (40, 256):
        drafter = load_drafter(speculation, settings_for(target, max_model_len=longest))
        assert drafter.footprint.max_len == min(50, longest)
