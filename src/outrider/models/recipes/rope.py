"""Rotary position embeddings, from either spelling of the configuration.

Old: `rope_theta` and `rope_scaling` side by side, the kind under `type` or `rope_type`.
New: everything in `rope_parameters`, possibly one dictionary per kind of layer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from outrider.errors import ModelError
from outrider.models.recipes.config import ConfigReader
from outrider.models.spec import RopeScaling, RopeSpec

# "default" is Hugging Face's word for no scaling at all.
KINDS = {
    "default": RopeScaling.NONE,
    "linear": RopeScaling.LINEAR,
    "llama3": RopeScaling.LLAMA3,
    "yarn": RopeScaling.YARN,
}
FULL, SLIDING = LAYER_KINDS = ("full_attention", "sliding_attention")


def rope_of(config: ConfigReader, *, layer_kind: str, head_dim: int, theta: float = 10_000.0) -> RopeSpec:
    """Returns the rotary embedding of layers of this kind; `theta` is the family's default."""
    fields = _fields(config, layer_kind)
    # Values next to the dictionary are defaults for those inside it.
    for name in ("rope_theta", "partial_rotary_factor"):
        if fields.get(name) is None and config.has(name):
            fields[name] = config.fields[name]
    return rope_from(config, fields, head_dim=head_dim, theta=theta)


def rope_from(config: ConfigReader, fields: Mapping[str, Any], *, head_dim: int, theta: float) -> RopeSpec:
    """Returns the rotary embedding that the parameters of one kind of layer describe."""
    reader = config.inner("rope parameters", fields)
    kind = fields.get("rope_type") or fields.get("type") or "default"
    if not isinstance(kind, str) or kind not in KINDS:
        raise ModelError(
            f"{config.source}: rotary scaling {kind!r} is not supported; supported: {', '.join(sorted(KINDS))}"
        )
    fraction = reader.positive("partial_rotary_factor", 1.0)
    if fraction > 1:
        raise reader.wrong("partial_rotary_factor", "at most 1, which is the whole head")
    rotary_dim = int(head_dim * fraction)
    base = reader.number("rope_theta", theta)
    if base <= 1:
        raise reader.wrong("rope_theta", "a number above 1")
    values: dict[str, Any] = {"theta": base, "rotary_dim": rotary_dim}
    scaling = KINDS[kind]
    if scaling is not RopeScaling.NONE:
        values |= _scaled(scaling, reader, config)
    return RopeSpec(**values)


def _fields(config: ConfigReader, layer_kind: str) -> dict[str, Any]:
    # If a file has both spellings, Hugging Face prefers the old one.
    fields = config.fields.get("rope_scaling") or config.fields.get("rope_parameters") or {}
    if isinstance(fields, Mapping) and any(kind in fields for kind in LAYER_KINDS):
        fields = fields.get(layer_kind)
        if fields is None:
            raise ModelError(f"{config.source}: rope_parameters say nothing about {layer_kind} layers")
    if not isinstance(fields, Mapping):
        raise ModelError(f"{config.source}: rotary parameters must be a dictionary, got {fields!r}")
    return dict(fields)


def _scaled(scaling: RopeScaling, reader: ConfigReader, config: ConfigReader) -> dict[str, Any]:
    values: dict[str, Any] = {"scaling": scaling}
    if scaling is RopeScaling.LINEAR:
        return values | {"factor": reader.positive("factor")}
    original = _original_max_position(reader, config)
    values["original_max_position"] = original
    if scaling is RopeScaling.LLAMA3:
        low, high = reader.positive("low_freq_factor"), reader.positive("high_freq_factor")
        if high <= low:
            # Frequencies are interpolated between the two, so the range must not be empty.
            raise reader.wrong("high_freq_factor", f"above low_freq_factor ({low:g})")
        return values | {"factor": reader.positive("factor"), "low_freq_factor": low, "high_freq_factor": high}
    factor = reader.positive("factor", config.integer("max_position_embeddings") / original)
    return values | {
        "factor": factor,
        "beta_fast": _beta(reader, "beta_fast", 32.0),
        "beta_slow": _beta(reader, "beta_slow", 1.0),
        "attention_factor": _attention_factor(reader, factor),
        "truncate": reader.flag("truncate", True),
    }


def _beta(reader: ConfigReader, name: str, usual: float) -> float:
    # 0 means the usual value, as in Hugging Face.
    return usual if reader.number(name, usual) == 0 else reader.positive(name, usual)


def _original_max_position(reader: ConfigReader, config: ConfigReader) -> int:
    name = "original_max_position_embeddings"
    where = config if config.has(name) else reader
    # Without the field the context was never extended: its limit is the original one.
    original = where.integer(name, config.integer("max_position_embeddings"))
    if original < 1:
        raise where.wrong(name, "at least 1")
    return original


def _attention_factor(reader: ConfigReader, factor: float) -> float:
    if reader.has("attention_factor"):
        return reader.positive("attention_factor")

    def recommended(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    mscale, mscale_all_dim = reader.number("mscale", 0.0), reader.number("mscale_all_dim", 0.0)
    if mscale and mscale_all_dim:
        return recommended(mscale) / recommended(mscale_all_dim)
    return recommended(1.0)
