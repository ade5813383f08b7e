"""Findings about the model, kernels, KV memory and drafter of an engine."""

from __future__ import annotations

from collections import Counter
from math import prod

from outrider.engine.engine import Engine
from outrider.engine.memory import tokens_held
from outrider.kv.footprint import KVFootprint
from outrider.models.parameters import DecoderParameters, DenseMLP, Matrix
from outrider.models.resolve import resolve_model
from outrider.models.spec import DecoderSpec
from outrider.tools.doctor.findings import Finding, Status, bytes_text
from outrider.tools.wording import counted


def look_at_model(engine: Engine, name: str) -> list[Finding]:
    model = engine.model
    path = resolve_model(name).path
    count, size = parameter_count(model.parameters)
    dtype = str(model.dtype).removeprefix("torch.")
    stored = size < count * model.dtype.itemsize
    kept = ", weights as the file has them" if stored else ""
    template = model.chat_template
    return [
        Finding("model", f"{model.name}, from {path}"),
        Finding("decoder", spec_text(model.spec)),
        Finding("parameters", f"{count:,}, {dtype} on {engine.runner.device}, {bytes_text(size)}{kept}"),
        Finding("chat template", "yes")
        if template is not None
        else Finding("chat template", "none", Status.NOTE, "`outrider chat` needs one; use `outrider generate`"),
        look_at_kv(engine),
        look_at_kernels(engine),
    ]


def look_at_kv(engine: Engine) -> Finding:
    kv = engine.scheduler.kv
    layout, drafter = kv.layout, kv.layout.footprint
    slot_bytes = sum(group.slot_bytes for group in layout.groups[: layout.num_target])
    per_token = f"{bytes_text(slot_bytes)} per token"
    if drafter.groups:
        per_token += f", and {bytes_text(sum(group.slot_bytes for group in drafter.groups))} for {drafter.name}"
    else:
        per_token += f", none for {drafter.name}" if engine.k else " without a drafter"
    tokens = tokens_held(layout, kv.config)
    return Finding("KV", f"{per_token}; {tokens:,} tokens fit, {engine.max_model_len:,} in one text")


def look_at_kernels(engine: Engine) -> Finding:
    backend = engine.runner.backend
    exact = (
        "a row is the same to the last bit in any batch"
        if backend.row_exact
        else "the last bits of a row may depend on its batch, so that exact ties can fall either way"
    )
    return Finding("backend", f"{backend.name}: {exact}")


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
    """Returns the number of parameters and their bytes; a tensor that is used twice counts once."""
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


def look_at_drafter(engine: Engine, *, usual: bool = False) -> Finding:
    """Describes the drafter; `usual` if it was not named but is the one that `outrider serve` uses."""
    text = footprint_text(engine.scheduler.kv.layout.footprint, engine.k)
    return Finding("drafter", f"{text}. `outrider serve` uses it for this model by default" if usual else text)


def footprint_text(footprint: KVFootprint, k: int) -> str:
    """Describes a footprint in one sentence of plain words."""
    start = f"{footprint.name} drafts up to {counted(k, 'token')} per step"
    if not footprint.groups:
        source = "from the output of the model's layer" if footprint.taps else "by looking them up in the text"
        layers = f" {', '.join(map(str, footprint.taps))}" if footprint.taps else ""
        return f"{start} {source}{layers}; it keeps no KV of its own"
    passes, rows = footprint.passes(k), footprint.query_len(k)
    parts = [f"{start} in {counted(passes, 'pass', 'passes')} of {counted(rows, 'row')}" + (" each" * (passes > 1))]
    kept = ", ".join(f"{group.name}: {bytes_text(group.slot_bytes)} per token" for group in footprint.groups)
    parts.append(
        f"it keeps KV of its own ({kept}) and needs room for {counted(footprint.scratch_ahead(k), 'token')} more"
    )
    if footprint.taps:
        parts.append(f"it reads the output of the model's layers {', '.join(map(str, footprint.taps))}")
    else:
        parts.append("it reads nothing but the tokens")
    return "; ".join(parts)
