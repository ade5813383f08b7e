"""Hugging Face directories: every family, whole and in shards, tensor by tensor; what does not fit is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models.fakes import FAMILIES, edit_json, save, tiny_model, tiny_tokenizer

from outrider.backends.reference.backend import ReferenceBackend
from outrider.errors import ModelError
from outrider.models.load import load_model
from outrider.models.parameters import DecoderParameters, ExpertsMLP, LayerParameters, Linear
from outrider.models.weights import load_parameters, open_checkpoint


def check_linear(found: Linear, state: dict[str, torch.Tensor], *names: str) -> None:
    assert torch.equal(found.weight, torch.cat([state.pop(f"{name}.weight") for name in names]))
    biases = [state.pop(f"{name}.bias") for name in names if f"{name}.bias" in state]
    assert (found.bias is None) == (not biases)
    if found.bias is not None:
        assert torch.equal(found.bias, torch.cat(biases))


def state_of(model: Any) -> dict[str, torch.Tensor]:
    """A model's tensors, with norms as they are used."""
    state = {name: value.clone() for name, value in model.state_dict().items()}
    if model.config.model_type.startswith("gemma"):
        return {name: 1.0 + value.float() if name.endswith("norm.weight") else value for name, value in state.items()}
    return state


def check_norms(layer: LayerParameters, state: dict[str, torch.Tensor], there: str) -> None:
    names = {"input_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    if layer.mlp_post_norm is not None:
        names = {
            "input_norm": "input_layernorm",
            "attention_post_norm": "post_attention_layernorm",
            "mlp_norm": "pre_feedforward_layernorm",
            "mlp_post_norm": "post_feedforward_layernorm",
        }
    if layer.q_norm is not None:
        names |= {"q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"}
    for ours, theirs in names.items():
        assert torch.equal(getattr(layer, ours), state.pop(f"{there}.{theirs}.weight"))


def check_interleaved_experts(mlp: ExpertsMLP, state: dict[str, torch.Tensor], there: str) -> None:
    """Columns for rows, gate and up in turns."""
    check_linear(mlp.router, state, f"{there}.router")
    weight, bias = state.pop(f"{there}.experts.gate_up_proj"), state.pop(f"{there}.experts.gate_up_proj_bias")
    for ours, theirs in zip(mlp.gate_up.chunk(2, dim=1), (weight[..., ::2], weight[..., 1::2]), strict=True):
        assert torch.equal(ours, theirs.mT)
    assert mlp.gate_up_bias is not None
    assert mlp.down_bias is not None
    for ours, theirs in zip(mlp.gate_up_bias.chunk(2, dim=1), (bias[:, ::2], bias[:, 1::2]), strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(mlp.down, state.pop(f"{there}.experts.down_proj").mT)
    assert torch.equal(mlp.down_bias, state.pop(f"{there}.experts.down_proj_bias"))


def check_parameters(found: DecoderParameters, model: Any) -> None:
    """Every tensor of the model is in its place, and none is left over."""
    state = state_of(model)
    tied = model.config.tie_word_embeddings
    assert torch.equal(found.embedding, state["model.embed_tokens.weight"])
    assert (found.head.weight is found.embedding) == tied
    check_linear(found.head, state, "lm_head")
    del state["model.embed_tokens.weight"]
    assert torch.equal(found.final_norm, state.pop("model.norm.weight"))
    assert len(found.layers) == model.config.num_hidden_layers
    for number, layer in enumerate(found.layers):
        there = f"model.layers.{number}"
        check_norms(layer, state, there)
        check_linear(layer.qkv, state, *(f"{there}.self_attn.{name}_proj" for name in "qkv"))
        check_linear(layer.out, state, f"{there}.self_attn.o_proj")
        if layer.sinks is not None:
            assert torch.equal(layer.sinks, state.pop(f"{there}.self_attn.sinks"))
        if isinstance(layer.mlp, ExpertsMLP) and layer.mlp.gate_up_bias is not None:
            check_interleaved_experts(layer.mlp, state, f"{there}.mlp")
        elif isinstance(layer.mlp, ExpertsMLP):
            check_linear(layer.mlp.router, state, f"{there}.mlp.gate")
            assert torch.equal(layer.mlp.gate_up, state.pop(f"{there}.mlp.experts.gate_up_proj"))
            assert torch.equal(layer.mlp.down, state.pop(f"{there}.mlp.experts.down_proj"))
        else:
            check_linear(layer.mlp.gate_up, state, f"{there}.mlp.gate_proj", f"{there}.mlp.up_proj")
            check_linear(layer.mlp.down, state, f"{there}.mlp.down_proj")
    assert not state


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_is_in_its_place(family: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    loaded = load_model(str(save(model, tmp_path / "tiny")), dtype=torch.float32)
    assert loaded.name == "tiny"
    assert loaded.spec.family == family.split(",")[0].replace("ministral", "mistral")
    check_parameters(loaded.parameters, model)


@pytest.mark.parametrize("family", ["llama", "llama, tied", "qwen3_moe"])
def test_shards_make_the_same_model(family: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    directory = save(model, tmp_path, max_shard_size="20KB")
    assert len(list(directory.glob("*.safetensors"))) > 2
    check_parameters(load_model(str(directory), dtype=torch.float32).parameters, model)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_weights_are_converted_to_the_dtype_asked_for(dtype: torch.dtype, family: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    loaded = load_model(str(save(model, tmp_path)), dtype=dtype)
    check_parameters(loaded.parameters, model.to(dtype))


@pytest.mark.parametrize("family", ["gemma3", "gpt_oss"])
def test_norms_that_are_rounded_after_multiplying_stay_wide(family: str, tmp_path: Path) -> None:
    model = tiny_model(family).bfloat16()
    loaded = load_model(str(save(model, tmp_path)), dtype=torch.bfloat16).parameters
    assert loaded.layers[0].qkv.weight.dtype == torch.bfloat16
    norms = [loaded.final_norm, *(layer.mlp_norm for layer in loaded.layers)]
    assert {norm.dtype for norm in norms} == {torch.float32}
    x = torch.randn(3, 32).bfloat16()
    ours = ReferenceBackend().norm(x, loaded.final_norm, model.config.rms_norm_eps)
    assert ours.dtype == torch.bfloat16
    assert torch.equal(ours, model.model.norm(x))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_stored_dtypes_are_read(dtype: torch.dtype, tmp_path: Path) -> None:
    model = tiny_model("llama").to(dtype)
    loaded = load_model(str(save(model, tmp_path)), dtype=dtype)
    check_parameters(loaded.parameters, model)


def rewrite(directory: Path, change: Any) -> Path:
    """Load the tensors of a saved model, change the dictionary, and save it again."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    return directory


def test_tensors_that_are_fused_already_are_taken_as_they_are(tmp_path: Path) -> None:
    model = tiny_model("llama, biases")

    def fuse(tensors: dict[str, torch.Tensor]) -> None:
        for number in range(3):
            for kind in ("weight", "bias"):
                attention, mlp = f"model.layers.{number}.self_attn", f"model.layers.{number}.mlp"
                qkv = [tensors.pop(f"{attention}.{name}_proj.{kind}") for name in "qkv"]
                tensors[f"{attention}.qkv_proj.{kind}"] = torch.cat(qkv)
                gate_up = [tensors.pop(f"{mlp}.{name}_proj.{kind}") for name in ("gate", "up")]
                tensors[f"{mlp}.gate_up_proj.{kind}"] = torch.cat(gate_up)

    directory = rewrite(save(model, tmp_path), fuse)
    check_parameters(load_model(str(directory), dtype=torch.float32).parameters, model)


@pytest.mark.parametrize("fused", [True, False])
def test_experts_come_one_by_one_or_all_in_one(fused: bool, tmp_path: Path) -> None:
    model = tiny_model("qwen3_moe")

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if ".mlp.experts." in name]:
            del tensors[name]
        for number in range(3):
            experts = model.model.layers[number].mlp.experts
            there = f"model.layers.{number}.mlp.experts"
            if fused:
                tensors |= {f"{there}.gate_up_proj": experts.gate_up_proj, f"{there}.down_proj": experts.down_proj}
                continue
            for e in range(4):
                gate, up = experts.gate_up_proj[e].chunk(2)
                down = experts.down_proj[e]
                for name, value in (("gate", gate), ("up", up), ("down", down)):
                    tensors[f"{there}.{e}.{name}_proj.weight"] = value.clone()

    directory = rewrite(save(model, tmp_path), change)
    check_parameters(load_model(str(directory), dtype=torch.float32).parameters, model)


def test_harmless_tensors_are_ignored(tmp_path: Path) -> None:
    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    model = tiny_model("llama, tied")
    directory = rewrite(save(model, tmp_path), add)
    check_parameters(load_model(str(directory), dtype=torch.float32).parameters, model)


def test_progress_counts_every_stored_byte_once(tmp_path: Path) -> None:
    directory = save(tiny_model("llama"), tmp_path)
    calls: list[tuple[int, int]] = []
    load_model(str(directory), dtype=torch.bfloat16, progress=lambda done, total: calls.append((done, total)))
    stored = sum(tensor.numel() * 4 for tensor in load_file(directory / "model.safetensors").values())
    assert [total for _, total in calls] == [stored] * len(calls)
    done = [done for done, _ in calls]
    assert done == sorted(done)
    assert done[-1] == stored


# --- refusals ---------------------------------------------------------------------------------------


def drop_k(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.layers.1.self_attn.k_proj.weight"]


def add_foreign(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.1.self_attn.sinks"] = torch.ones(4)


def misshape(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"] = torch.ones(31)


def store_integers(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"] = torch.ones(32, dtype=torch.int8)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (drop_k, ("missing model.layers.1.self_attn.k_proj.weight",)),
        (add_foreign, ("unexpected model.layers.1.self_attn.sinks",)),
        (misshape, ("misshapen model.norm.weight", "found [31]", "expected [32]")),
        (store_integers, ("model.norm.weight", "I8", "BF16, F16, F32, F64")),
    ],
)
def test_tensors_that_do_not_fit_are_named(change: Any, words: tuple[str, ...], tmp_path: Path) -> None:
    directory = rewrite(save(tiny_model("llama"), tmp_path), change)
    with pytest.raises(ModelError) as caught:
        load_model(str(directory), dtype=torch.float32)
    assert all(word in str(caught.value) for word in (*words, str(tmp_path)))


def test_a_long_list_of_missing_tensors_is_cut_short(tmp_path: Path) -> None:
    directory = save(tiny_model("llama"), tmp_path)
    edit_json(directory / "config.json", num_hidden_layers=30)
    with pytest.raises(ModelError, match=r"missing model\.layers\.3\.\S+.* and \d+ more$"):
        load_model(str(directory), dtype=torch.float32)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, ("GPT2LMHeadModel", "LlamaForCausalLM", "Qwen3MoeForCausalLM")),
        ({"architectures": ["LlamaForSequenceClassification"]}, ("LlamaForSequenceClassification", "supported")),
        ({"architectures": None, "model_type": "gpt2"}, ("'gpt2'", "LlamaForCausalLM")),
        ({"architectures": None, "model_type": None}, ("neither architectures nor model_type",)),
        ({"quantization_config": {"quant_method": "gptq"}}, ("'gptq'", "GGUF")),
        ({"hidden_size": None}, ("'hidden_size'",)),
        ({"hidden_size": "many"}, ("hidden_size", "whole number", "many")),
        ({"num_key_value_heads": 3}, ("4 query heads", "3 key/value heads")),
        ({"hidden_act": "relu"}, ("hidden_act", "relu", "silu")),
        ({"num_attention_heads": 5, "head_dim": None}, ("32 hidden elements", "5 heads")),
    ],
)
def test_configurations_that_cannot_be_run_are_refused(
    changes: dict[str, Any], words: tuple[str, ...], tmp_path: Path
) -> None:
    directory = save(tiny_model("llama"), tmp_path)
    edit_json(directory / "config.json", **changes)
    with pytest.raises(ModelError) as caught:
        load_model(str(directory), dtype=torch.float32)
    assert all(word in str(caught.value) for word in (*words, "config.json"))


def test_model_type_serves_where_architectures_are_missing(tmp_path: Path) -> None:
    directory = save(tiny_model("qwen3"), tmp_path)
    edit_json(directory / "config.json", architectures=None)
    assert load_model(str(directory), dtype=torch.float32).spec.family == "qwen3"


@pytest.mark.parametrize("content", ["{", "[1]", None])
def test_a_broken_configuration_is_named(content: str | None, tmp_path: Path) -> None:
    directory = save(tiny_model("llama"), tmp_path)
    path = directory / "config.json"
    if content is None:
        path.unlink()
    else:
        path.write_text(content)
    with pytest.raises(ModelError, match=r"config\.json"):
        load_model(str(directory), dtype=torch.float32)


@pytest.mark.parametrize("keep", [0, 4, 100, -1000])
def test_a_truncated_file_is_named(keep: int, tmp_path: Path) -> None:
    path = save(tiny_model("llama"), tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"model\.safetensors is not a complete safetensors file"):
        load_model(str(tmp_path), dtype=torch.float32)


def test_missing_weights_are_refused_with_a_hint_about_other_formats(tmp_path: Path) -> None:
    (save(tiny_model("llama"), tmp_path) / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"neither model\.safetensors nor .*pytorch_model\.bin is not read"):
        load_model(str(tmp_path), dtype=torch.float32)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    directory = save(tiny_model("llama"), tmp_path, max_shard_size="20KB")
    shard = sorted(directory.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ModelError, match=shard.name):
        load_model(str(directory), dtype=torch.float32)


def test_an_index_cannot_reach_outside_its_directory(tmp_path: Path) -> None:
    directory = save(tiny_model("llama"), tmp_path)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "../other.safetensors"}}))
    with pytest.raises(ModelError, match="outside its own directory"):
        load_model(str(directory), dtype=torch.float32)


def test_a_tokenizer_with_more_ids_than_the_model_embeds_is_refused(tmp_path: Path) -> None:
    directory = save(tiny_model("llama", vocab_size=40), tmp_path)
    with pytest.raises(ModelError, match=r"up to 59, but the model embeds only 40"):
        load_model(str(directory), dtype=torch.float32)


def test_added_tokens_that_the_model_does_not_embed_are_no_obstacle(tmp_path: Path) -> None:
    directory = save(tiny_model("llama", vocab_size=60), tmp_path)
    backend = tiny_tokenizer()
    backend.add_special_tokens(["<pad>"])
    backend.save(str(directory / "tokenizer.json"))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 60]}))
    model = load_model(str(directory), dtype=torch.float32)
    assert (model.spec.vocab_size, model.tokenizer.vocab_size, model.eos_ids) == (60, 61, (3,))


def test_a_tensor_can_be_read_by_itself(tmp_path: Path) -> None:
    model = tiny_model("llama")
    checkpoint = open_checkpoint(save(model, tmp_path))
    assert torch.equal(checkpoint.tensor("model.norm.weight"), model.model.norm.weight)
    half = load_parameters(checkpoint, checkpoint.spec(), dtype=torch.float16)
    assert half.final_norm.dtype == torch.float16
