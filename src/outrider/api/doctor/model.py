"""The model, its kernels, its KV and its drafter, as one engine has them."""

from __future__ import annotations

from collections import Counter
from math import prod

from outrider.api.doctor.findings import Finding, Status, bytes_text
from outrider.engine.engine import Engine
from outrider.engine.memory import tokens_held
from outrider.kv.footprint import KVFootprint
from outrider.models.parameters import DecoderParameters, DenseMLP, Matrix
from outrider.models.resolve import resolve_model
from outrider.models.spec import DecoderSpec


def look_at_model(engine: Engine, name: str) -> list[Finding]:
    model, kv = engine.model, engine.scheduler.kv
    path = resolve_model(name).path
    count, size = parameter_count(model.parameters)
    dtype = str(model.dtype).removeprefix("torch.")
    stored = size < count * model.dtype.itemsize
    kept = ", weights as the file has them" if stored else ""
    slot_bytes = sum(group.slot_bytes for group in kv.layout.groups[: kv.layout.num_target])
    tokens = tokens_held(kv.layout, kv.config)
    template = model.chat_template
    return [
        Finding("model", f"{model.name}, from {path}"),
        Finding("decoder", spec_text(model.spec)),
        Finding("parameters", f"{count:,}, {dtype} on {engine.runner.device}, {bytes_text(size)}{kept}"),
        Finding("chat template", "yes")
        if template is not None
        else Finding("chat template", "none", Status.NOTE, "`outrider chat` needs one; use `outrider generate`"),
        Finding(
            "KV", f"{bytes_text(slot_bytes)} per token; {tokens:,} tokens fit, {engine.max_model_len:,} in one text"
        ),
        look_at_kernels(engine),
    ]


def look_at_kernels(engine: Engine) -> Finding:
    ops = engine.runner.ops
    exact = (
        "a row is the same to the last bit in any batch"
        if ops.row_exact
        else "the last bits of a row may depend on its batch, so that exact ties can fall either way"
    )
    return Finding("kernels", f"{type(ops).__name__}: {exact}")


def spec_text(spec: DecoderSpec) -> str:
    windows = Counter(layer.window for layer in spec.layers)
    kinds = ", ".join(
        f"{number} {'full' if window is None else f'window {window}'}" for window, number in windows.items()
    )
    experts = next((layer.experts for layer in spec.layers if layer.experts is not None), None)
    mixture = f", {experts.per_token} of {experts.count} experts" if experts is not None else ""
    return (
        f"{spec.family}: {len(spec.layers)} layers ({kinds}), hidden {spec.hidden_size}, {spec.heads} heads over "
        f"{spec.kv_heads} of KV{mixture}, vocabulary {spec.vocab_size:,}, context {spec.max_position:,}"
    )


def parameter_count(parameters: DecoderParameters) -> tuple[int, int]:
    """Numbers and bytes; a tensor that serves twice counts once."""
    tensors: dict[int, Matrix] = {id(parameters.embedding): parameters.embedding}
    for tensor in (parameters.final_norm, parameters.head.weight):
        tensors[id(tensor)] = tensor
    for layer in parameters.layers:
        linears = [layer.qkv, layer.out]
        others: list[Matrix | None] = [layer.input_norm, layer.mlp_norm, layer.q_norm, layer.k_norm, layer.sinks]
        others += [layer.attention_post_norm, layer.mlp_post_norm]
        if isinstance(layer.mlp, DenseMLP):
            linears += [layer.mlp.gate_up, layer.mlp.down]
        else:
            linears.append(layer.mlp.router)
            others += [layer.mlp.gate_up, layer.mlp.down, layer.mlp.gate_up_bias, layer.mlp.down_bias]
        for linear in linears:
            others += [linear.weight, linear.bias]
        tensors |= {id(tensor): tensor for tensor in others if tensor is not None}
    count = sum(prod(tensor.shape) for tensor in tensors.values())
    return count, sum(tensor.nbytes for tensor in tensors.values())


def look_at_drafter(engine: Engine) -> Finding:
    return Finding("drafter", footprint_text(engine.scheduler.kv.layout.footprint, engine.k))


def footprint_text(footprint: KVFootprint, k: int) -> str:
    """The contract in one line."""
    parts = [f"{footprint.name}, up to {k} drafts a step by {footprint.proposing.value}"]
    if not footprint.groups:
        return f"{parts[0]}; no KV of its own"
    parts.append(
        "KV " + ", ".join(f"{group.name} ({bytes_text(group.slot_bytes)} per token)" for group in footprint.groups)
    )
    parts.append(f"{footprint.passes(k)} passes of {footprint.query_len(k)} row(s)")
    parts.append(f"reserves {footprint.scratch_ahead(k)} slots ahead")
    parts.append(f"durable to v + {footprint.durable_lead}" if footprint.durable_lead else "durable to v")
    parts.append(f"reach {footprint.token_reach}")
    parts.append(f"taps {', '.join(map(str, footprint.taps))}" if footprint.taps else "no taps")
    if footprint.keeps_accepted:
        parts.append("keeps what was accepted")
    if footprint.rebuild:
        parts.append("can be rebuilt from tokens")
    return "; ".join(parts)
