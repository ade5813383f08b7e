"""How a decoder's tensors are assembled from checkpoint tensors, as data. Torch-free.

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
    """A checkpoint tensor and its place in the destination."""

    name: str
    shape: Shape
    where: Index = ()
    """Index into the destination; () for all of it."""
    transposed: bool = False
    """Whether the checkpoint stores the last two dimensions swapped."""
    take: Index = ()
    """Index into the tensor, after transposing; () for all of it."""


@dataclass(frozen=True, slots=True)
class Assembly:
    """A destination and the ways to fill it; a checkpoint uses one of them."""

    shape: Shape
    choices: tuple[tuple[Part, ...], ...]
    plus: float = 0.0
    """Number that the family adds to the tensor wherever it is used."""
    wide: bool = False
    """Whether the tensor stays in float32: the family rounds after multiplying by it, not before."""


Layout = dict[str, Assembly]


# In models with norms after attention, post_attention_layernorm names one of those; in others it is mlp_norm.
POST_NORMS = {
    "attention_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}


def whole(name: str, shape: Shape) -> Assembly:
    """Returns a tensor that the checkpoint stores as it is."""
    return Assembly(shape, ((Part(name, shape),),))


def stacked(parts: dict[str, int], rest: Shape, *, fused: str) -> Assembly:
    """Returns a tensor stacked from the rows of several tensors, or stored as one `fused` tensor."""
    rows = sum(parts.values())
    separate, start = [], 0
    for name, count in parts.items():
        separate.append(Part(name, (count, *rest), (slice(start, start + count),)))
        start += count
    return Assembly((rows, *rest), (tuple(separate), (Part(fused, (rows, *rest)),)))


def decoder_layout(spec: DecoderSpec) -> Layout:
    """Returns the layout with Hugging Face's names for Llama, which most families share."""
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
    """Returns the layout of one layer; `input_size` is that of queries, keys and values, 0 for the hidden size."""
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
    """Experts are stored one by one, or all in one tensor, with gate and up separate (GGUF) or fused."""
    hidden, inner, count = spec.hidden_size, experts.intermediate_size, experts.count
    gate_rows, up_rows = slice(0, inner), slice(inner, 2 * inner)
    one_by_one, down_one_by_one = [], []
    for e in range(count):
        one_by_one.append(Part(f"{there}.experts.{e}.gate_proj.weight", (inner, hidden), (e, gate_rows)))
        one_by_one.append(Part(f"{there}.experts.{e}.up_proj.weight", (inner, hidden), (e, up_rows)))
        down_one_by_one.append(Part(f"{there}.experts.{e}.down_proj.weight", (hidden, inner), (e,)))
    every = slice(None)
    separate = (
        Part(f"{there}.experts.gate_proj", (count, inner, hidden), (every, gate_rows)),
        Part(f"{there}.experts.up_proj", (count, inner, hidden), (every, up_rows)),
    )
    gate_up_shape, down_shape = (count, 2 * inner, hidden), (count, hidden, inner)
    fused = (Part(f"{there}.experts.gate_up_proj", gate_up_shape),)
    down = (Part(f"{there}.experts.down_proj", down_shape),)
    return {
        f"{here}.router.weight": whole(f"{there}.gate.weight", (count, hidden)),
        f"{here}.gate_up": Assembly(gate_up_shape, (tuple(one_by_one), separate, fused)),
        f"{here}.down": Assembly(down_shape, (tuple(down_one_by_one), down)),
    }
