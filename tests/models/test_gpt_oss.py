"""gpt-oss: its configuration, and checkpoints quantised as MXFP4 against Transformers' own reading of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.models.fakes import COMMON, GPT_OSS, edit_json, save, tiny_model
from tests.models.test_directories import check_parameters
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from outrider.backends.cpu.packing import CPUWeightForms
from outrider.errors import ModelError
from outrider.models.load import load_model
from outrider.models.parameters import ExpertsMLP
from outrider.models.recipes import recipe_for
from outrider.models.spec import Activation, DecoderSpec, RopeScaling
from outrider.models.weights.mxfp4 import dequantise

SIZES = {"hidden_size": 64, "intermediate_size": 32}
QUANTISED = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}


def spec_of(**fields: Any) -> DecoderSpec:
    config = {"architectures": ["GptOssForCausalLM"], **COMMON, **GPT_OSS, **fields}
    return recipe_for(config, "config.json").spec(config, "config.json")


def test_the_configuration() -> None:
    spec = spec_of()
    assert [layer.window for layer in spec.layers] == [8, None, 8, None]
    assert (spec.sinks, spec.qkv_bias, spec.out_bias, spec.norm_eps) == (True, True, True, 1e-5)
    assert spec.activation is Activation.CLAMPED_SWIGLU
    experts = spec.layers[0].experts
    assert experts is not None
    assert (experts.count, experts.per_token, experts.intermediate_size) == (4, 2, 48)
    assert not experts.softmax_first


@pytest.mark.parametrize("fields", [{}, {"rope_theta": 99.0}, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}])
def test_what_a_configuration_leaves_out_means_what_transformers_takes_it_for(fields: dict[str, Any]) -> None:
    config = transformers.GptOssConfig(**COMMON | GPT_OSS | fields).to_dict()
    assert spec_of(**fields) == spec_of(**config)


def test_the_window_where_nothing_is_said() -> None:
    fields = {name: value for name, value in (COMMON | GPT_OSS).items() if name != "sliding_window"}
    config = fields | {"architectures": ["GptOssForCausalLM"]}
    spec = recipe_for(config, "config.json").spec(config, "config.json")
    meant = transformers.GptOssConfig(**fields)
    assert [layer.window for layer in spec.layers] == [meant.sliding_window, None] * 2 == [128, None] * 2


def test_yarn_is_meant_where_nothing_is_said() -> None:
    rope = spec_of().layers[0].rope
    assert (rope.scaling, rope.theta, rope.factor, rope.truncate) == (RopeScaling.YARN, 150_000.0, 32.0, False)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"swiglu_limit": 5.0}, ("swiglu_limit", "5.0", "7.0")),
        ({"swiglu_alpha": 1.0}, ("swiglu_alpha", "1.0", "1.702")),
        ({"num_local_experts": 0}, ("num_local_experts", "between 1 and")),
        ({"num_experts_per_tok": 5}, ("5 experts per token", "only 4")),
        ({"sliding_window": None}, ("sliding_window",)),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(fields: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ModelError) as caught:
        spec_of(**fields)
    assert all(word in str(caught.value) for word in (*words, "config.json"))


# --- MXFP4 ------------------------------------------------------------------------------------------


def random_blocks(experts: int, rows: int, columns: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(118, 126, (experts, rows, columns // 32), generator=generator, dtype=torch.uint8)
    return blocks, scales


def test_numbers_are_those_of_transformers() -> None:
    blocks, scales = random_blocks(3, 5, 64)
    # Every exponent that leaves a number finite and not too small for the format itself.
    scales.view(-1)[:] = torch.arange(30, dtype=torch.uint8) * 8 + 4
    expected = convert_moe_packed_tensors(blocks, scales)
    for expert in range(3):
        found = dequantise(blocks[expert], scales[expert])
        assert torch.equal(found, expected[expert].T.float())
        assert torch.equal(found, found.bfloat16().float())


def test_numbers_by_the_book() -> None:
    blocks = torch.zeros(1, 1, 16, dtype=torch.uint8)
    blocks[0, 0, :4] = torch.tensor([0x21, 0x43, 0x65, 0xF7])
    found = dequantise(blocks, torch.tensor([[128]], dtype=torch.uint8))
    assert found[0, :8].tolist() == [1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, -12.0]


def save_quantised(directory: Path) -> Any:
    """As the model's makers store it; and the model that Transformers makes of it."""
    model = tiny_model("gpt_oss", **SIZES).bfloat16()
    save(model, directory)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    for number in range(model.config.num_hidden_layers):
        mlp = f"model.layers.{number}.mlp.experts"
        for name, rows, columns in (("gate_up_proj", 64, 64), ("down_proj", 64, 32)):
            del tensors[f"{mlp}.{name}"]
            blocks, scales = random_blocks(4, rows, columns, seed=number)
            tensors |= {f"{mlp}.{name}_blocks": blocks, f"{mlp}.{name}_scales": scales}
    save_file(tensors, path, metadata={"format": "pt"})
    edit_json(directory / "config.json", quantization_config=QUANTISED)
    return transformers.GptOssForCausalLM.from_pretrained(
        directory, quantization_config=transformers.Mxfp4Config(dequantize=True), dtype=torch.bfloat16
    )


def test_a_quantised_checkpoint_is_the_model_that_transformers_makes_of_it(tmp_path: Path) -> None:
    reference = save_quantised(tmp_path)
    check_parameters(load_model(str(tmp_path), dtype=torch.bfloat16).parameters, reference)
    check_parameters(load_model(str(tmp_path), dtype=torch.float32).parameters, reference.float())


def test_experts_of_16_bits_stay_so(tmp_path: Path) -> None:
    """What MXFP4 stands for fits into 16 bits: float32 would take twice the memory for nothing."""
    save_quantised(tmp_path)
    for layer in load_model(str(tmp_path), dtype=torch.float32, forms=CPUWeightForms(packed=True)).parameters.layers:
        assert isinstance(layer.mlp, ExpertsMLP)
        assert layer.mlp.gate_up.dtype == layer.mlp.down.dtype == torch.bfloat16


def broken(directory: Path, name: str, tensor: Tensor | None) -> str:
    save_quantised(directory)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    found = next(key for key in tensors if key.endswith(name))
    if tensor is None:
        del tensors[found]
    else:
        tensors[found] = tensor
    save_file(tensors, path)
    with pytest.raises(ModelError) as caught:
        load_model(str(directory), dtype=torch.float32)
    return str(caught.value)


def test_scales_that_do_not_belong_to_their_blocks_are_refused(tmp_path: Path) -> None:
    message = broken(tmp_path, "layers.1.mlp.experts.down_proj_scales", torch.zeros(4, 64, 2, dtype=torch.uint8))
    assert "down_proj_scales [4, 64, 2]" in message
    assert "down_proj_blocks [4, 64, 1, 16]" in message


def test_blocks_without_scales_are_named(tmp_path: Path) -> None:
    message = broken(tmp_path, "layers.1.mlp.experts.down_proj_scales", None)
    assert "missing model.layers.1.mlp.experts.down_proj" in message
    assert "unexpected model.layers.1.mlp.experts.down_proj_blocks" in message


def test_another_quantisation_is_refused_by_name(tmp_path: Path) -> None:
    save_quantised(tmp_path)
    edit_json(tmp_path / "config.json", quantization_config={"quant_method": "awq"})
    with pytest.raises(ModelError, match="'awq'"):
        load_model(str(tmp_path), dtype=torch.float32)


def test_a_family_without_it_refuses_mxfp4(tmp_path: Path) -> None:
    save(tiny_model("llama"), tmp_path)
    edit_json(tmp_path / "config.json", quantization_config=QUANTISED)
    with pytest.raises(ModelError, match="'mxfp4'"):
        load_model(str(tmp_path), dtype=torch.float32)
