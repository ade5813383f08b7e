"""Phi-3: Llama's shape, with queries, keys and values in one tensor, and a window over all layers or none."""

from __future__ import annotations

from outrider.models.recipes.base import Recipe, common_fields, make_layers, window_of
from outrider.models.recipes.config import ConfigReader
from outrider.models.spec import DecoderSpec


def read_phi3(config: ConfigReader) -> DecoderSpec:
    fields = common_fields(config)
    window = window_of(config) if config.has("sliding_window") else None
    layers = make_layers(config, head_dim=fields["head_dim"], window=lambda _: window)
    return DecoderSpec(family="phi3", layers=layers, **fields)


PHI3 = Recipe(family="phi3", architectures=("Phi3ForCausalLM",), model_types=("phi3",), read=read_phi3)
