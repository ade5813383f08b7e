"""Which checkpoint tensors make up a decoder's tensors, as data. Torch-free.

A destination is named by its path in `DecoderParameters`: "layers.3.qkv.weight". It is filled by parts, each a
checkpoint tensor and the place it goes to:

    layers.3.qkv.weight [query + 2 kv, hidden]
      ├── rows [0, query)                model.layers.3.self_attn.q_proj.weight
      ├── rows [query, query + kv)       model.layers.3.self_attn.k_proj.weight
      └── rows [query + kv, …)           model.layers.3.self_attn.v_proj.weight
"""

from __future__ import annotations

from dataclasses import dataclass

from outrider.models.spec import DecoderSpec, ExpertsSpec, LayerSpec

Shape = tuple[int, ...]
Index = tuple[int | slice, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """One checkpoint tensor and where it goes."""

    name: str
    shape: Shape
    where: Index = ()
    """An index into the destination; () is all of it."""
    transposed: bool = False
    """Its last two dimensions have changed places."""
    take: Index = ()
    """An index into the tensor, once its dimensions are in order; () is all of it."""


@dataclass(frozen=True, slots=True)
class Assembly:
    """A destination and the ways to fill it; a checkpoint uses one of them."""

    shape: Shape
    choices: tuple[tuple[Part, ...], ...]
    plus: float = 0.0
    """What the family adds to it wherever it is used."""
    wide: bool = False
    """Stays in float32 whatever the rest is in: the family rounds after it has multiplied by it, not before."""


Layout = dict[str, Assembly]


# Where there are norms after attention too, the name that others give to the norm before feed-forward is theirs.
POST_NORMS = {
    "attention_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}


def whole(name: str, shape: Shape) -> Assembly:
    """The checkpoint has it as it is."""
    return Assembly(shape, ((Part(name, shape),),))


def stacked(parts: dict[str, int], rest: Shape, *, fused: str) -> Assembly:
    """Rows of several tensors, one under the other; or one tensor that has been stacked already."""
    rows = sum(parts.values())
    separate, start = [], 0
    for name, count in parts.items():
        separate.append(Part(name, (count, *rest), (slice(start, start + count),)))
        start += count
    return Assembly((rows, *rest), (tuple(separate), (Part(fused, (rows, *rest)),)))


def decoder_layout(spec: DecoderSpec) -> Layout:
    """The names that Hugging Face gives to the tensors of Llama and of the families after it."""
    layout = {
        "embedding": whole("model.embed_tokens.weight", (spec.vocab_size, spec.hidden_size)),
        "final_norm": whole("model.norm.weight", (spec.hidden_size,)),
    }
    if not spec.tied_head:
        layout["head.weight"] = whole("lm_head.weight", (spec.vocab_size, spec.hidden_size))
    for number, layer in enumerate(spec.layers):
        layout |= layer_layout(spec, layer, f"layers.{number}", f"model.layers.{number}")
    return layout


def layer_layout(spec: DecoderSpec, layer: LayerSpec, here: str, there: str, *, input_size: int = 0) -> Layout:
    """One layer. `input_size`: what queries, keys and values are made from; 0 is the hidden size."""
    layout = _attention(spec, here, there, input_size or spec.hidden_size)
    names = POST_NORMS if spec.post_norms else {"mlp_norm": "post_attention_layernorm"}
    layout |= {f"{here}.{ours}": whole(f"{there}.{name}.weight", (spec.hidden_size,)) for ours, name in names.items()}
    if layer.experts is None:
        return layout | _dense(spec, f"{here}.mlp", f"{there}.mlp")
    return layout | _experts(spec, layer.experts, f"{here}.mlp", f"{there}.mlp")


def _attention(spec: DecoderSpec, here: str, there: str, input_size: int) -> Layout:
    hidden, heads = spec.hidden_size, {"q": spec.query_size, "k": spec.kv_size, "v": spec.kv_size}
    layout = {f"{here}.input_norm": whole(f"{there}.input_layernorm.weight", (hidden,))}
    for kind, rest in (("weight", (input_size,)), ("bias", ())) if spec.qkv_bias else (("weight", (input_size,)),):
        rows = {f"{there}.self_attn.{name}_proj.{kind}": count for name, count in heads.items()}
        layout[f"{here}.qkv.{kind}"] = stacked(rows, rest, fused=f"{there}.self_attn.qkv_proj.{kind}")
    layout[f"{here}.out.weight"] = whole(f"{there}.self_attn.o_proj.weight", (hidden, spec.query_size))
    if spec.out_bias:
        layout[f"{here}.out.bias"] = whole(f"{there}.self_attn.o_proj.bias", (hidden,))
    if spec.qk_norm:
        layout[f"{here}.q_norm"] = whole(f"{there}.self_attn.q_norm.weight", (spec.head_dim,))
        layout[f"{here}.k_norm"] = whole(f"{there}.self_attn.k_norm.weight", (spec.head_dim,))
    if spec.sinks:
        layout[f"{here}.sinks"] = whole(f"{there}.self_attn.sinks", (spec.heads,))
    return layout


def _dense(spec: DecoderSpec, here: str, there: str) -> Layout:
    hidden, inner = spec.hidden_size, spec.intermediate_size
    layout = {}
    for kind, rest in (("weight", (hidden,)), ("bias", ())) if spec.mlp_bias else (("weight", (hidden,)),):
        rows = {f"{there}.gate_proj.{kind}": inner, f"{there}.up_proj.{kind}": inner}
        layout[f"{here}.gate_up.{kind}"] = stacked(rows, rest, fused=f"{there}.gate_up_proj.{kind}")
    layout[f"{here}.down.weight"] = whole(f"{there}.down_proj.weight", (hidden, inner))
    if spec.mlp_bias:
        layout[f"{here}.down.bias"] = whole(f"{there}.down_proj.bias", (hidden,))
    return layout


def _experts(spec: DecoderSpec, experts: ExpertsSpec, here: str, there: str) -> Layout:
    """Three ways: a tensor per expert; all experts in one, gate and up apart (GGUF); gate and up together as well."""
    hidden, inner, count = spec.hidden_size, experts.intermediate_size, experts.count
    gate_rows, up_rows = slice(0, inner), slice(inner, 2 * inner)
    one_by_one, down_one_by_one = [], []
    for e in range(count):
        one_by_one.append(Part(f"{there}.experts.{e}.gate_proj.weight", (inner, hidden), (e, gate_rows)))
        one_by_one.append(Part(f"{there}.experts.{e}.up_proj.weight", (inner, hidden), (e, up_rows)))
        down_one_by_one.append(Part(f"{there}.experts.{e}.down_proj.weight", (hidden, inner), (e,)))
    every = slice(None)
    apart = (
        Part(f"{there}.experts.gate_proj", (count, inner, hidden), (every, gate_rows)),
        Part(f"{there}.experts.up_proj", (count, inner, hidden), (every, up_rows)),
    )
    gate_up_shape, down_shape = (count, 2 * inner, hidden), (count, hidden, inner)
    together = (Part(f"{there}.experts.gate_up_proj", gate_up_shape),)
    down = (Part(f"{there}.experts.down_proj", down_shape),)
    return {
        f"{here}.router.weight": whole(f"{there}.gate.weight", (count, hidden)),
        f"{here}.gate_up": Assembly(gate_up_shape, (tuple(one_by_one), apart, together)),
        f"{here}.down": Assembly(down_shape, (tuple(down_one_by_one), down)),
    }
