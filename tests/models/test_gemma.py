"""Gemma: every spelling of its configuration, its text part beside images, its GGUF files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.models.fakes import COMMON, configuration, save, tiny_model
from tests.models.test_directories import check_parameters

from outrider.backends.cpu.packing import CPUWeightForms
from outrider.errors import ModelError
from outrider.models.load import load_model
from outrider.models.recipes import recipe_for
from outrider.models.spec import Activation, DecoderSpec, RopeScaling

OLD: dict[str, Any] = {
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "rope_theta": 900_000.0,
    "rope_local_base_freq": 9_000.0,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    "query_pre_attn_scalar": 168,
    "num_hidden_layers": 13,
}


def spec_of(architecture: str, **fields: Any) -> DecoderSpec:
    config = {"architectures": [architecture], **fields}
    return recipe_for(config, "config.json").spec(config, "config.json")


def gemma3(**fields: Any) -> DecoderSpec:
    return spec_of("Gemma3ForCausalLM", **COMMON | fields)


def as_transformers_reads_it(**fields: Any) -> DecoderSpec:
    """By way of its own class, which writes the new spelling."""
    config = transformers.Gemma3TextConfig(**COMMON | fields).to_dict()
    return spec_of("Gemma3ForCausalLM", **config)


@pytest.mark.parametrize(
    "left_out",
    [
        (),
        ("sliding_window_pattern",),
        ("rope_theta",),
        ("rope_local_base_freq",),
        ("rope_scaling",),
        ("query_pre_attn_scalar",),
        ("sliding_window",),
        tuple(OLD),
    ],
    ids=str,
)
def test_the_old_spelling_means_what_transformers_takes_it_for(left_out: tuple[str, ...]) -> None:
    fields = {name: value for name, value in OLD.items() if name not in left_out}
    assert gemma3(**fields) == as_transformers_reads_it(**{**fields})


def test_the_old_spelling_by_the_book() -> None:
    spec = gemma3(**OLD)
    assert [layer.window for layer in spec.layers] == ([512] * 5 + [None]) * 2 + [512]
    local, everywhere = spec.layers[0].rope, spec.layers[5].rope
    assert (local.theta, local.scaling) == (9_000.0, RopeScaling.NONE)
    assert (everywhere.theta, everywhere.scaling, everywhere.factor) == (900_000.0, RopeScaling.LINEAR, 8.0)
    assert (spec.score_scale, spec.embedding_scale) == (168**-0.5, 32**0.5)
    assert (spec.activation, spec.qk_norm, spec.post_norms, spec.tied_head) == (Activation.GELU_TANH, True, True, True)


def test_parameters_of_one_kind_leave_the_other_as_it_is() -> None:
    fields = {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 5.0}}}
    spec = gemma3(**fields, layer_types=["sliding_attention", "full_attention", "sliding_attention"])
    assert [layer.rope.theta for layer in spec.layers] == [10_000.0, 5.0, 10_000.0]
    assert [layer.window for layer in spec.layers] == [4096, None, 4096]


@pytest.mark.parametrize("version", [2, 3])
def test_what_a_configuration_leaves_out_means_what_transformers_takes_it_for(version: int) -> None:
    name = f"Gemma{version}ForCausalLM"
    config = {2: transformers.Gemma2Config, 3: transformers.Gemma3TextConfig}[version]()
    assert spec_of(name) == spec_of(name, **config.to_dict())


def test_gemma_2_alternates_and_caps() -> None:
    spec = spec_of("Gemma2ForCausalLM", **COMMON, sliding_window=16)
    assert [layer.window for layer in spec.layers] == [16, None, 16]
    assert (spec.attention_softcap, spec.logit_softcap, spec.qk_norm) == (50.0, 30.0, False)
    bare = spec_of("Gemma2ForCausalLM", **COMMON, attn_logit_softcapping=None, final_logit_softcapping=None)
    assert (bare.attention_softcap, bare.logit_softcap) == (None, None)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"use_bidirectional_attention": True}, ("use_bidirectional_attention",)),
        ({"attn_logit_softcapping": 50.0}, ("attn_logit_softcapping", "Transformers")),
        ({"sliding_window": None}, ("sliding_window", "whole number")),
        ({"sliding_window_pattern": 0}, ("sliding_window_pattern", "at least 1")),
        ({"query_pre_attn_scalar": 0}, ("query_pre_attn_scalar", "above 0")),
        ({"query_pre_attn_scalar": float("nan")}, ("query_pre_attn_scalar", "finite number")),
        ({"sliding_window": 0}, ("sliding_window", "at least 1")),
        ({"final_logit_softcapping": 0}, ("final_logit_softcapping", "above 0", "null")),
        ({"hidden_activation": "relu"}, ("hidden_activation", "'relu'", "gelu_pytorch_tanh")),
        ({"rope_parameters": {"rope_theta": 5.0}}, ("rope_parameters", "full_attention and sliding_attention")),
        ({"rope_parameters": "linear"}, ("rope_parameters", "dictionary")),
        ({"rope_scaling": {"rope_type": "dynamic"}, "num_hidden_layers": 6}, ("'dynamic'",)),
        ({"layer_types": ["full_attention", "linear_attention", "full_attention"]}, ("linear_attention",)),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(fields: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ModelError) as caught:
        gemma3(**fields)
    assert all(word in str(caught.value) for word in (*words, "config.json"))


@pytest.mark.parametrize("name", ["attn_logit_softcapping", "final_logit_softcapping"])
@pytest.mark.parametrize("cap", [0, 0.0, -50.0, float("nan"), float("inf"), "50"])
def test_a_cap_that_is_none_is_refused(name: str, cap: Any) -> None:
    """PyTorch would divide by 0 and the compiled kernels would not cap; null means no cap."""
    with pytest.raises(ModelError, match=rf"config\.json: {name} must be a (finite )?number.*, got"):
        spec_of("Gemma2ForCausalLM", **COMMON, **{name: cap})


# --- beside images ----------------------------------------------------------------------------------


def beside_images(directory: Path, **fields: Any) -> tuple[Any, Any]:
    """A model that also sees, saved; and its text part."""
    text = tiny_model("gemma3")
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 16,
        "patch_size": 8,
    }
    config = transformers.Gemma3Config(
        text_config=configuration("gemma3"),
        vision_config=vision,
        mm_tokens_per_image=4,
        image_token_index=63,
        **fields,
    )
    whole = transformers.Gemma3ForConditionalGeneration(config).eval()
    whole.model.language_model.load_state_dict(text.model.state_dict())
    save(whole, directory)
    return whole, text


def renamed(directory: Path, prefix: str) -> None:
    """Move the text part's tensors under another prefix."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    found = {}
    for name, tensor in tensors.items():
        _, inside, rest = name.rpartition("language_model.")
        rest = rest.removeprefix("model.") if inside else rest
        found[prefix + rest if inside else name.removeprefix("model.")] = tensor
    save_file(found, path)


@pytest.mark.parametrize("prefix", [None, "language_model.model.", "model.language_model."])
def test_the_text_part_of_a_model_that_sees(prefix: str | None, tmp_path: Path) -> None:
    _, text = beside_images(tmp_path)
    if prefix is not None:
        renamed(tmp_path, prefix)
    loaded = load_model(str(tmp_path), dtype=torch.float32)
    assert loaded.spec == load_model(str(save(text, tmp_path / "text")), dtype=torch.float32).spec
    check_parameters(loaded.parameters, text)


@pytest.mark.parametrize(
    ("above", "inside", "tied"),
    [(False, True, False), (True, False, True), (None, False, False), (None, None, True), (False, None, False)],
)
def test_whether_the_head_is_tied_is_said_for_the_whole_model(
    above: bool | None, inside: bool | None, tied: bool
) -> None:
    """Transformers ties the head of the model that also sees by the outer field; the text's own counts without it."""
    text = COMMON | ({} if inside is None else {"tie_word_embeddings": inside})
    outer = {} if above is None else {"tie_word_embeddings": above}
    assert spec_of("Gemma3ForConditionalGeneration", text_config=text, **outer).tied_head == tied


def test_a_head_of_its_own_beside_images_is_loaded(tmp_path: Path) -> None:
    whole, _ = beside_images(tmp_path / "tied", tie_word_embeddings=False)
    with torch.no_grad():
        whole.lm_head.weight += 1
    save(whole, tmp_path)
    loaded = load_model(str(tmp_path), dtype=torch.float32)
    assert torch.equal(loaded.parameters.head.weight, whole.lm_head.weight)


def test_unexpected_tensors_are_refused_beside_images_too(tmp_path: Path) -> None:
    beside_images(tmp_path)
    path = tmp_path / "model.safetensors"
    save_file(load_file(path) | {"audio_tower.weight": torch.zeros(2)}, path)
    with pytest.raises(ModelError, match=r"unexpected audio_tower\.weight"):
        load_model(str(tmp_path), dtype=torch.float32)


def test_the_embedding_stays_as_it_is_stored(tmp_path: Path) -> None:
    """A quarter of a million tokens: twice the bits would be twice the memory."""
    save(tiny_model("gemma3").bfloat16(), tmp_path)
    loaded = load_model(str(tmp_path), dtype=torch.float32, forms=CPUWeightForms(packed=True))
    assert loaded.parameters.embedding.dtype == torch.bfloat16
    assert loaded.spec.embedding_scale == pytest.approx(32**0.5, rel=1e-7)
    assert loaded.parameters.final_norm.dtype == torch.float32


def test_the_scale_of_embeddings_is_rounded_as_the_model_computes(tmp_path: Path) -> None:
    save(tiny_model("gemma3"), tmp_path)
    spec = load_model(str(tmp_path), dtype=torch.bfloat16).spec
    assert spec.embedding_scale == torch.tensor(32**0.5).bfloat16().item() != 32**0.5
