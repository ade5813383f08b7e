"""Configurations to descriptions, with transformers' reading of them as the reference."""

from __future__ import annotations

import math
from typing import Any

import pytest
import transformers
from tests.models.fakes import COMMON, FAMILIES, MOE, configuration
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from outrider.errors import ModelError
from outrider.models.recipes import recipe_for, recipe_for_gguf
from outrider.models.spec import Activation, DecoderSpec, RopeScaling

NAN = float("nan")
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def spec_of(architecture: str, **fields: Any) -> DecoderSpec:
    config = COMMON | {"architectures": [f"{architecture}ForCausalLM"]} | fields
    return recipe_for(config, "config.json").spec(config, "config.json")


def windows(spec: DecoderSpec) -> list[int | None]:
    return [layer.window for layer in spec.layers]


@pytest.mark.parametrize("family", FAMILIES)
def test_windows_are_those_of_transformers(family: str) -> None:
    name, fields = FAMILIES[family]
    config = configuration(family)
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    expected = [window if kind == "sliding_attention" else None for kind in types]
    if name == "Llama":
        expected = [None] * 3
    assert windows(spec_of(name, **fields)) == expected


def test_sizes_and_switches() -> None:
    spec = spec_of("Llama", head_dim=16, rms_norm_eps=1e-5, tie_word_embeddings=True, hidden_act="gelu_pytorch_tanh")
    assert (spec.vocab_size, spec.hidden_size, spec.intermediate_size) == (64, 32, 48)
    assert (spec.heads, spec.kv_heads, spec.head_dim, spec.max_position) == (4, 2, 16, 128)
    assert (spec.norm_eps, spec.tied_head, spec.activation) == (1e-5, True, Activation.GELU_TANH)


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Qwen2", "Qwen3", "Qwen3Moe"])
def test_what_a_configuration_leaves_out_means_what_transformers_takes_it_for(name: str) -> None:
    fields: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 256,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 64,
        "max_position_embeddings": 128,
    }
    if name == "Qwen3Moe":
        fields["num_experts"] = 128
    config = getattr(transformers, f"{name}Config")(**fields)
    all_fields = fields | {"architectures": [f"{name}ForCausalLM"]}
    spec = recipe_for(all_fields, "here").spec(all_fields, "here")
    assert spec.kv_heads == config.num_key_value_heads
    assert spec.head_dim == (getattr(config, "head_dim", None) or 4)
    assert spec.norm_eps == config.rms_norm_eps
    assert spec.tied_head == config.tie_word_embeddings
    assert spec.layers[0].rope.theta == config.rope_parameters["rope_theta"]
    assert spec.layers[0].window == getattr(config, "sliding_window", None)
    if name == "Qwen3Moe":
        experts = spec.layers[0].experts
        assert experts is not None
        assert experts.per_token == config.num_experts_per_tok
        assert experts.intermediate_size == config.moe_intermediate_size
        assert experts.normalise_chosen == config.norm_topk_prob


# --- windows ----------------------------------------------------------------------------------------


def test_a_window_of_qwen_counts_only_if_it_is_in_use() -> None:
    assert windows(spec_of("Qwen2", sliding_window=16, use_sliding_window=False)) == [None] * 3
    assert windows(spec_of("Mistral", sliding_window=None)) == [None] * 3
    assert windows(spec_of("Qwen3", sliding_window=16, use_sliding_window=True, max_window_layers=2)) == [None] * 2 + [
        16
    ]


# --- experts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "sparse"),
    [
        ({}, [True, True, True]),
        ({"decoder_sparse_step": 2}, [False, True, False]),
        ({"mlp_only_layers": [0, 2]}, [False, True, False]),
        ({"num_experts": 0}, [False, False, False]),
    ],
)
def test_experts_are_in_the_layers_that_have_them(fields: dict[str, Any], sparse: list[bool]) -> None:
    spec = spec_of("Qwen3Moe", **MOE | fields)
    assert [layer.experts is not None for layer in spec.layers] == sparse


def test_the_new_name_of_the_expert_count_is_known() -> None:
    fields = {name: value for name, value in MOE.items() if name != "num_experts"} | {"num_local_experts": 5}
    experts = spec_of("Qwen3Moe", **fields).layers[0].experts
    assert experts is not None
    assert experts.count == 5


# --- rotary positions -------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["rope_type", "type"])
@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
def test_both_spellings_of_llama3_scaling(spelling: str, key: str) -> None:
    rope = spec_of("Llama", rope_theta=500.0, **{spelling: {key: "llama3", **LLAMA3}}).layers[0].rope
    assert (rope.scaling, rope.theta, rope.rotary_dim) == (RopeScaling.LLAMA3, 500.0, 8)
    assert (rope.factor, rope.low_freq_factor, rope.high_freq_factor, rope.original_max_position) == (8.0, 1.0, 4.0, 64)


def test_theta_inside_the_parameters_wins_over_the_one_beside_them() -> None:
    parameters = {"rope_type": "default", "rope_theta": 7.0}
    rope = spec_of("Llama", rope_theta=500.0, rope_parameters=parameters).layers[0].rope
    assert (rope.scaling, rope.theta) == (RopeScaling.NONE, 7.0)
    rope = spec_of("Llama", rope_scaling={"type": "linear", "factor": 2}).layers[0].rope
    assert (rope.scaling, rope.factor) == (RopeScaling.LINEAR, 2.0)


YARN: dict[str, dict[str, Any]] = {
    "usual": {"factor": 4.0, "original_max_position_embeddings": 32},
    "no original length": {"factor": 4.0},
    "factor not above 1": {"factor": 1.0, "original_max_position_embeddings": 32},
    "own attention factor": {"factor": 4.0, "attention_factor": 0.7},
    "two scales": {"factor": 4.0, "mscale": 0.5, "mscale_all_dim": 2.0},
    "one scale": {"factor": 4.0, "mscale": 0.5},
    "own betas": {"factor": 4.0, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
    "betas of 0": {"factor": 4.0, "beta_fast": 0, "beta_slow": 0},
}


@pytest.mark.parametrize("case", YARN)
def test_yarn_scales_attention_as_transformers_does(case: str) -> None:
    parameters = {"rope_type": "yarn", "rope_theta": 10_000.0, **YARN[case]}
    config = transformers.LlamaConfig(**COMMON, rope_parameters=dict(parameters))
    _, attention_factor = ROPE_INIT_FUNCTIONS["yarn"](config)
    rope = spec_of("Llama", rope_parameters=parameters).layers[0].rope
    assert rope.scaling is RopeScaling.YARN
    assert rope.attention_factor == pytest.approx(attention_factor)
    assert rope.original_max_position == config.rope_parameters["original_max_position_embeddings"]
    assert rope.factor == parameters["factor"]
    assert (rope.beta_fast, rope.beta_slow) == (parameters.get("beta_fast") or 32, parameters.get("beta_slow") or 1)
    assert rope.truncate == parameters.get("truncate", True)


def test_yarn_without_a_factor_stretches_from_the_original_length() -> None:
    parameters = {"rope_type": "yarn", "original_max_position_embeddings": 32}
    assert spec_of("Llama", rope_parameters=parameters).layers[0].rope.factor == 4.0


def test_part_of_a_head_can_be_rotated() -> None:
    assert spec_of("Llama", partial_rotary_factor=0.5).layers[0].rope.rotary_dim == 4
    parameters = {"rope_type": "default", "partial_rotary_factor": 0.25}
    assert spec_of("Llama", rope_parameters=parameters).layers[0].rope.rotary_dim == 2


def test_kinds_of_layer_can_rotate_differently() -> None:
    parameters = {"full_attention": {"rope_theta": 5.0}, "sliding_attention": {"rope_theta": 6.0}}
    types = ["full_attention", "sliding_attention", "full_attention"]
    spec = spec_of("Mistral", sliding_window=16, layer_types=types, rope_parameters=parameters)
    assert [layer.rope.theta for layer in spec.layers] == [5.0, 6.0, 5.0]


# --- refusals ---------------------------------------------------------------------------------------


def rope(**fields: Any) -> dict[str, Any]:
    return {"rope_parameters": fields}


def llama3(**fields: Any) -> dict[str, Any]:
    return {"rope_scaling": {"type": "llama3", **LLAMA3, **fields}}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"layer_types": ["full_attention"]}, "1 layer_types for 3 layers"),
        ({"layer_types": ["full_attention", "chunked_attention", "full_attention"]}, "chunked_attention"),
        ({"layer_types": ["sliding_attention"] * 3, "sliding_window": None}, "no sliding_window is in use"),
        ({"layer_types": "full_attention"}, "layer_types must be a list of strings"),
        ({"sliding_window": 0}, "sliding_window must be at least 1, or null.*got 0"),
        (rope(rope_type=["yarn"]), "rotary scaling"),
        (rope(rope_type="yarn", original_max_position_embeddings=0), "at least 1"),
        ({"rope_theta": 1.0}, "rope_theta must be a number above 1"),
        ({"rope_theta": NAN}, "rope_theta"),
        ({"rope_theta": 10**400}, "rope_theta"),
        (rope(rope_type="linear", factor=0), "factor must be a number above 0, got 0"),
        (rope(rope_type="yarn", factor=0.0), "factor must be a number above 0"),
        (rope(rope_type="yarn", factor=NAN), "factor must be a finite number, got nan"),
        (rope(rope_type="yarn", beta_fast=-1.0), "beta_fast must be a number above 0"),
        (rope(rope_type="yarn", beta_slow=NAN), "beta_slow must be a finite number"),
        (rope(rope_type="yarn", attention_factor=0), "attention_factor must be a number above"),
        (llama3(factor=0), "factor must be a number above 0"),
        (llama3(low_freq_factor=0), "low_freq_factor must be a number above"),
        (llama3(low_freq_factor=4.0), r"high_freq_factor must be above low_freq_factor \(4\), got 4\.0"),
        (llama3(low_freq_factor=None), "'low_freq_factor'"),
        ({"partial_rotary_factor": NAN}, "partial_rotary_factor must be a finite number"),
        ({"partial_rotary_factor": -0.5}, "partial_rotary_factor must be a number above 0"),
        ({"partial_rotary_factor": 2}, "partial_rotary_factor must be at most 1"),
        ({"partial_rotary_factor": 0.4}, "rotary_dim must be even"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'.*llama3, yarn"),
        (rope(rope_type="longrope"), "'longrope'.*linear"),
        ({"rope_scaling": {"type": "linear"}}, "'factor'"),
        ({"rope_scaling": "linear"}, "dictionary, got 'linear'"),
        (rope(sliding_attention={}), "say nothing about full_attention"),
        *(({"rms_norm_eps": wrong}, "rms_norm_eps must be a (finite )?number") for wrong in (0, -1e-6, NAN, math.inf)),
        *(({"rms_norm_eps": wrong}, "rms_norm_eps must be a finite number") for wrong in ("small", True)),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelError, match=rf"config\.json.*{reason}"):
        spec_of("Mistral", **({"sliding_window": None} | fields))


def test_gguf_architectures_are_named() -> None:
    assert recipe_for_gguf("qwen3moe", "a.gguf").family == "qwen3_moe"
    with pytest.raises(ModelError, match=r"a\.gguf.*'bert'.*llama, qwen2, qwen3, qwen3moe"):
        recipe_for_gguf("bert", "a.gguf")
