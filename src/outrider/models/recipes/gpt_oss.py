"""gpt-oss: mixtures of experts with biases, attention sinks, a window on every second layer, YaRN.

All experts of a layer are in one transposed tensor, with the columns of gate and up interleaved.
"""

from __future__ import annotations

from dataclasses import replace

from outrider.errors import ModelError
from outrider.models.recipes.base import (
    EXPERTS_MAX,
    Recipe,
    common_fields,
    make_layers,
    optional_window,
    periodic_windows,
)
from outrider.models.recipes.config import ConfigReader
from outrider.models.recipes.layout import Assembly, Layout, Part, decoder_layout, whole
from outrider.models.spec import Activation, DecoderSpec, ExpertsSpec

THETA = 150_000.0
# Defaults for a configuration without rotary parameters.
YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
# Constants of Activation.CLAMPED_SWIGLU.
SWIGLU = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}


def _gpt_oss(config: ConfigReader) -> DecoderSpec:
    for name, only in SWIGLU.items():
        if config.number(name, only) != only:
            raise ModelError(f"{config.source}: {name} {config.number(name)} is not supported; supported: {only}")
    if not config.has("rope_parameters") and not config.has("rope_scaling"):
        config = config.with_defaults({"rope_parameters": YARN})
    config = config.with_defaults({"rms_norm_eps": 1e-5})
    fields = common_fields(config, kv_heads=8, head_dim=64)
    bias = config.flag("attention_bias", True)
    experts = _experts(config)
    window = periodic_windows(config, window=optional_window(config, 128), period=2)
    layers = make_layers(config, head_dim=fields["head_dim"], window=window, experts=lambda _: experts, theta=THETA)
    fields["activation"] = Activation.CLAMPED_SWIGLU
    return DecoderSpec(family="gpt_oss", layers=layers, qkv_bias=bias, out_bias=bias, sinks=True, **fields)


def _experts(config: ConfigReader) -> ExpertsSpec:
    name = "num_experts" if config.has("num_experts") else "num_local_experts"
    count = config.integer(name, 128)
    if not 1 <= count <= EXPERTS_MAX:
        raise config.wrong(name, f"between 1 and {EXPERTS_MAX}")
    return ExpertsSpec(
        count=count,
        per_token=config.integer("num_experts_per_tok", 4),
        intermediate_size=config.integer("intermediate_size"),
        softmax_first=False,
    )


def gpt_oss_layout(spec: DecoderSpec) -> Layout:
    layout = decoder_layout(spec)
    for number, layer in enumerate(spec.layers):
        assert layer.experts is not None
        layout |= _experts_layout(spec, layer.experts, f"layers.{number}.mlp", f"model.layers.{number}.mlp")
    return {path: replace(part, wide=True) if path.endswith("norm") else part for path, part in layout.items()}


def _experts_layout(spec: DecoderSpec, experts: ExpertsSpec, here: str, there: str) -> Layout:
    count, inner, hidden = experts.count, experts.intermediate_size, spec.hidden_size
    every = slice(None)
    # Stored row by row: gate, up, gate, up, …
    halves = (
        ((every, slice(0, inner)), (every, slice(0, None, 2))),
        ((every, slice(inner, None)), (every, slice(1, None, 2))),
    )
    gate_up = tuple(
        Part(f"{there}.experts.gate_up_proj", (count, hidden, 2 * inner), where, transposed=True, take=take)
        for where, take in halves
    )
    biases = tuple(
        Part(f"{there}.experts.gate_up_proj_bias", (count, 2 * inner), where, take=take) for where, take in halves
    )
    down = (Part(f"{there}.experts.down_proj", (count, inner, hidden), transposed=True),)
    return {
        f"{here}.router.weight": whole(f"{there}.router.weight", (count, hidden)),
        f"{here}.router.bias": whole(f"{there}.router.bias", (count,)),
        f"{here}.gate_up": Assembly((count, 2 * inner, hidden), (gate_up,)),
        f"{here}.gate_up_bias": Assembly((count, 2 * inner), (biases,)),
        f"{here}.down": Assembly((count, hidden, inner), (down,)),
        f"{here}.down_bias": whole(f"{there}.experts.down_proj_bias", (count, hidden)),
    }


GPT_OSS = Recipe(
    family="gpt_oss",
    architectures=("GptOssForCausalLM",),
    model_types=("gpt_oss",),
    mxfp4=True,
    read=_gpt_oss,
    layout=gpt_oss_layout,
)
