"""Drafters on disk: the public layouts by name and shape, and back through the engine's loaders."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.engine.tiny import tiny_engine
from tests.tools.training.tiny import lanes_of, plan_of, settings_for, tiny_loaded, tiny_target, write_corpus

from outrider.api.llm import LLM
from outrider.config import SpeculativeConfig
from outrider.models.recipes.config import ConfigReader
from outrider.models.recipes.rope import rope_of
from outrider.models.spec import LayerSpec, RopeScaling, RopeSpec
from outrider.models.weights.safetensors import TensorFiles
from outrider.sampling import SamplingParams
from outrider.speculative.checkpoints.frequent import FREQUENT_TOKENS
from outrider.tools.training.export import body_config, draft_tensors, write_tensors
from outrider.tools.training.run import train_for

H, INNER, QUERY, KV, HEAD = 32, 48, 32, 16, 8


def trained(directory: Path, method: str, **changes: Any) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    write_corpus(directory / "corpus", 8)
    settings = settings_for(directory, method, steps=2, **changes)
    train_for(settings, tiny_target(), report=lambda line: None)
    config = json.loads((settings.output / "config.json").read_text())
    return config, load_file(settings.output / "model.safetensors")


def layer_shapes(name: str, width: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{name}.input_layernorm.weight": (H,),
        f"{name}.post_attention_layernorm.weight": (H,),
        f"{name}.self_attn.q_proj.weight": (QUERY, width),
        f"{name}.self_attn.k_proj.weight": (KV, width),
        f"{name}.self_attn.v_proj.weight": (KV, width),
        f"{name}.self_attn.o_proj.weight": (H, QUERY),
        f"{name}.mlp.gate_proj.weight": (INNER, H),
        f"{name}.mlp.up_proj.weight": (INNER, H),
        f"{name}.mlp.down_proj.weight": (H, INNER),
    }


def test_dflash_is_written_in_z_lab_s_layout(tmp_path: Path) -> None:
    config, tensors = trained(tmp_path, "dflash", causal=True, taps=(0, 2))
    expected: dict[str, tuple[int, ...]] = {"fc.weight": (H, 2 * H), "hidden_norm.weight": (H,), "norm.weight": (H,)}
    for layer in ("layers.0", "layers.1"):
        expected |= layer_shapes(layer, H)
        expected |= {f"{layer}.self_attn.q_norm.weight": (HEAD,), f"{layer}.self_attn.k_norm.weight": (HEAD,)}
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == expected
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert config["architectures"] == ["DFlashDraftModel"]
    assert (config["num_target_layers"], config["block_size"], config["num_hidden_layers"]) == (3, 4, 2)
    assert config["dflash_config"]["target_layer_ids"] == [0, 2]
    assert config["dflash_config"]["causal"] is True
    used = set(lanes_of(settings_for(tmp_path))[0].source.streams.tokens.ravel().tolist())
    assert config["dflash_config"]["mask_token_id"] == min(set(range(256)) - used)


def test_the_most_frequent_tokens_lie_beside_a_dflash_drafter(tmp_path: Path) -> None:
    trained(tmp_path, "dflash")
    tokens = json.loads((tmp_path / "drafter" / FREQUENT_TOKENS).read_text())
    streams = lanes_of(settings_for(tmp_path))[0].source.streams
    counts = np.bincount(streams.tokens[streams.roles], minlength=256)
    # A small corpus has seen few tokens, and nobody would draft from those alone: others stand behind them.
    written = np.count_nonzero(counts)
    assert len(set(tokens)) == len(tokens) == 2 * 256 // 3 > written
    assert [counts[token] for token in tokens] == sorted(counts, reverse=True)[: len(tokens)]
    assert tokens[written:] == sorted(set(range(256)) - set(np.flatnonzero(counts)))[: len(tokens) - written]
    trained(tmp_path / "other", "eagle3")
    assert not (tmp_path / "other" / "drafter" / FREQUENT_TOKENS).exists()


def test_eagle3_is_written_in_speculators_layout(tmp_path: Path) -> None:
    config, tensors = trained(tmp_path, "eagle3", draft_vocab_size=40)
    expected: dict[str, tuple[int, ...]] = {
        "fc.weight": (H, 3 * H),
        "norm.weight": (H,),
        "lm_head.weight": (40, H),
        "d2t": (40,),
        "t2d": (256,),
        "layers.0.hidden_norm.weight": (H,),
        **layer_shapes("layers.0", 2 * H),
    }
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == expected
    assert config["speculators_model_type"] == "eagle3"
    assert config["draft_vocab_size"] == 40
    # What enters a layer is counted here: one more than what leaves the layer before.
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    assert config["transformer_layer_config"]["num_hidden_layers"] == 1


def test_d2t_and_t2d_name_the_most_frequent_tokens(tmp_path: Path) -> None:
    _, tensors = trained(tmp_path, "eagle3", draft_vocab_size=40)
    streams = lanes_of(settings_for(tmp_path))[0].source.streams
    counts = [0] * 256
    for token in streams.tokens[streams.roles].tolist():
        counts[token] += 1
    kept = sorted(sorted(range(256), key=lambda token: (-counts[token], token))[:40])
    assert [i + step for i, step in enumerate(tensors["d2t"].tolist())] == kept
    assert tensors["t2d"].dtype == torch.bool
    assert tensors["t2d"].nonzero().flatten().tolist() == kept
    head = tiny_target().head[kept].to(torch.bfloat16)
    assert torch.equal(tensors["lm_head.weight"], head)


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("dflash", {}),
        ("dflash", {"causal": True, "layers": 1, "taps": (1,)}),
        ("eagle3", {}),
        ("eagle3", {"draft_vocab_size": 40, "taps": (0, 2)}),
    ],
)
def test_a_drafter_loads_and_runs_in_the_engine(method: str, changes: dict[str, Any], tmp_path: Path) -> None:
    trained(tmp_path, method, **changes)
    config = SpeculativeConfig(method=method, model=str(tmp_path / "drafter"), num_speculative_tokens=3)
    params = SamplingParams(temperature=0, max_tokens=12)
    engine = tiny_engine(tiny_loaded(), speculative_config=config)
    found = LLM.over(engine).generate([[1, 2, 3]], params)
    plain = LLM.over(tiny_engine(tiny_loaded())).generate([[1, 2, 3]], params)
    assert found[0].outputs[0].token_ids == plain[0].outputs[0].token_ids
    assert engine.speculation.draft_tokens > 0


def test_the_taps_scale_goes_into_the_first_projection(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus", 4)
    settings = settings_for(tmp_path)
    plan = plan_of(settings, lanes_of(settings))
    scale = torch.rand(3 * H, generator=torch.Generator().manual_seed(0)) + 0.5
    weight = dict(plan.network.named_parameters())["fc.weight"]
    expected = (weight * scale).to(torch.bfloat16)
    assert torch.equal(draft_tensors(plan, scale)["fc.weight"], expected)


@pytest.mark.parametrize(
    "rope",
    [
        RopeSpec(rotary_dim=8, theta=5e5),
        RopeSpec(rotary_dim=4),
        RopeSpec(rotary_dim=8, scaling=RopeScaling.LINEAR, factor=4.0),
        RopeSpec(rotary_dim=8, scaling=RopeScaling.LLAMA3, factor=8.0, original_max_position=64, low_freq_factor=1.5),
        RopeSpec(
            rotary_dim=8,
            scaling=RopeScaling.YARN,
            factor=4.0,
            original_max_position=64,
            beta_fast=20.0,
            attention_factor=1.2,
            truncate=False,
        ),
    ],
    ids=lambda rope: f"{rope.scaling.value} {rope.rotary_dim}",
)
def test_positions_are_read_back_as_the_target_has_them(rope: RopeSpec) -> None:
    spec = replace(tiny_target().spec, layers=(LayerSpec(window=None, rope=rope),))
    fields = json.loads(json.dumps(body_config(spec, 1)))
    assert rope_of(ConfigReader(fields, "config"), layer_kind="full_attention", head_dim=spec.head_dim) == rope


def test_weights_may_be_cut_into_shards_and_joined_again(tmp_path: Path) -> None:
    tensors = {name: torch.full((200_000,), float(number)) for number, name in enumerate("abcd")}
    write_tensors(tmp_path, tensors, shard_mib=1)
    assert len(list(tmp_path.glob("model-*-of-00004.safetensors"))) == 4
    assert set(TensorFiles(tmp_path).tensors) == set("abcd")
    write_tensors(tmp_path, tensors, shard_mib=2)
    assert len(list(tmp_path.glob("*.safetensors"))) == 2
    write_tensors(tmp_path, tensors, shard_mib=None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.safetensors"]
    assert torch.equal(load_file(tmp_path / "model.safetensors")["d"], tensors["d"])


def test_everybody_may_read_what_was_exported(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus", 8)
    settings = settings_for(tmp_path, steps=1)
    before = os.umask(0o022)
    try:
        train_for(settings, tiny_target(), report=lambda _line: None)
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in settings.output.glob("model*.safetensors")} == {0o644}
