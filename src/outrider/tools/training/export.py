"""Drafters on disk, in the layouts that other engines read: z-lab's for DFlash, speculators' for EAGLE-3."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from outrider.errors import ConfigError
from outrider.models.spec import DecoderSpec, RopeScaling, RopeSpec
from outrider.speculative.checkpoints.frequent import FREQUENT_TOKENS
from outrider.tools.training.card import RunFacts, model_card
from outrider.tools.training.drafts import DraftPlan
from outrider.tools.training.settings import TrainSettings
from outrider.tools.training.target import Target, first_rope

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
CARD = "README.md"
EVALUATION = "evaluation.json"


def export_drafter(
    settings: TrainSettings,
    target: Target,
    plan: DraftPlan,
    scale: Tensor,
    facts: RunFacts,
) -> None:
    """Exports a drafter. Every file is written under another name first, so that none is ever seen in part."""
    tensors = draft_tensors(plan, scale)
    config = dflash_config(settings, target, plan) if settings.in_blocks else eagle3_config(settings, target, plan)
    directory = settings.output
    directory.mkdir(parents=True, exist_ok=True)
    write_tensors(directory, tensors, shard_mib=settings.shard_mib)
    _write_json(directory / CONFIG, config)
    if plan.network.block_size is not None:
        # A drafter with a head of its own has its own vocabulary.
        write_file(directory / FREQUENT_TOKENS, json.dumps(facts.frequent_tokens, separators=(",", ":")).encode())
    if facts.evaluation is not None:
        _write_json(directory / EVALUATION, facts.evaluation)
    write_file(directory / CARD, model_card(settings, target, plan, facts).encode())


def draft_tensors(plan: DraftPlan, scale: Tensor) -> dict[str, Tensor]:
    """Returns the tensors in bfloat16 by the names of checkpoints, the scale of the taps folded into `fc`."""
    tensors = {name: tensor.detach().float().cpu() for name, tensor in plan.network.state_dict().items()}
    tensors["fc.weight"] = tensors["fc.weight"] * scale.float().cpu()
    stored = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in tensors.items()}
    if plan.network.block_size is None:
        stored["lm_head.weight"] = plan.head.detach().to("cpu", torch.bfloat16).contiguous()
        if plan.choices.kept is not None and plan.draft_ids is not None:
            kept = torch.tensor(plan.choices.kept)
            # Offset from the draft id to the target's id.
            stored["d2t"] = kept - torch.arange(len(kept))
            stored["t2d"] = plan.draft_ids.cpu() >= 0
    return stored


def body_config(spec: DecoderSpec, layers: int) -> dict[str, Any]:
    rope = first_rope(spec)
    config: dict[str, Any] = {
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": spec.norm_eps,
        "rope_theta": rope.theta,
        "rope_scaling": _rope_scaling(rope),
        "max_position_embeddings": spec.max_position,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "vocab_size": spec.vocab_size,
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
    }
    if rope.rotary_dim != spec.head_dim:
        config["partial_rotary_factor"] = rope.rotary_dim / spec.head_dim
    return config


def _rope_scaling(rope: RopeSpec) -> dict[str, Any] | None:
    if rope.scaling is RopeScaling.NONE:
        return None
    fields: dict[str, Any] = {"rope_type": rope.scaling.value, "factor": rope.factor}
    if rope.scaling is RopeScaling.LINEAR:
        return fields
    fields["original_max_position_embeddings"] = rope.original_max_position
    if rope.scaling is RopeScaling.LLAMA3:
        return fields | {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    return fields | {
        "beta_fast": rope.beta_fast,
        "beta_slow": rope.beta_slow,
        "attention_factor": rope.attention_factor,
        "truncate": rope.truncate,
    }


def dflash_config(settings: TrainSettings, target: Target, plan: DraftPlan) -> dict[str, Any]:
    scale = target.spec.embedding_scale
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        **body_config(target.spec, settings.layers),
        "layer_types": ["full_attention"] * settings.layers,
        "num_target_layers": len(target.spec.layers),
        "block_size": settings.block_size,
        **({} if settings.smaller_block is None else {"smaller_block_sizes": [settings.smaller_block]}),
        "dflash_config": {
            "mask_token_id": plan.choices.mask_token_id,
            "target_layer_ids": list(plan.taps),
            "causal": settings.causal,
            **({} if scale == 1.0 else {"input_embedding_scale": scale}),
        },
    }


def eagle3_config(settings: TrainSettings, target: Target, plan: DraftPlan) -> dict[str, Any]:
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.3.0",
        "dtype": "bfloat16",
        "draft_vocab_size": len(plan.head),
        "target_hidden_size": target.spec.hidden_size,
        "norm_before_residual": False,
        "tie_word_embeddings": False,
        # These ids name the input of a layer; our taps name its output.
        "eagle_aux_hidden_state_layer_ids": [tap + 1 for tap in plan.taps],
        "transformer_layer_config": {
            "model_type": "llama",
            **body_config(target.spec, settings.layers),
            "mlp_bias": False,
        },
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": settings.k, "verifier_accept_k": 1}],
            "verifier": {"name_or_path": target.name, "architectures": []},
        },
    }


def write_tensors(directory: Path, tensors: dict[str, Tensor], *, shard_mib: int | None) -> None:
    """Writes one file, or several of at most `shard_mib` with an index."""
    shards = _shards(tensors, None if shard_mib is None else shard_mib << 20)
    if len(shards) == 1:
        _save(directory / WEIGHTS, shards[0])
        (directory / INDEX).unlink(missing_ok=True)
        _remove_shards(directory, keep=())
        return
    names = [f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors" for number in range(len(shards))]
    for name, shard in zip(names, shards, strict=True):
        _save(directory / name, shard)
    weight_map = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
    total = sum(tensor.nbytes for tensor in tensors.values())
    _write_json(directory / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    (directory / WEIGHTS).unlink(missing_ok=True)
    _remove_shards(directory, keep=names)


def _remove_shards(directory: Path, *, keep: Sequence[str]) -> None:
    """Removes shards of an earlier export with another number of them."""
    for path in directory.glob("model-*-of-*.safetensors"):
        if path.name not in keep:
            path.unlink()


def _shards(tensors: dict[str, Tensor], limit_bytes: int | None) -> list[dict[str, Tensor]]:
    shards: list[dict[str, Tensor]] = [{}]
    filled = 0
    for name, tensor in tensors.items():
        if limit_bytes is not None and shards[-1] and filled + tensor.nbytes > limit_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor
        filled += tensor.nbytes
    return shards


def _save(path: Path, tensors: dict[str, Tensor]) -> None:
    partial = path.with_name(f".{path.name}.partial")
    save_file(tensors, partial, metadata={"format": "pt"})
    # The library makes the file readable by its owner alone; a server may run as another user.
    partial.chmod(0o666 & ~_umask())
    partial.replace(path)


def _umask() -> int:
    """Returns the umask, which can only be read by setting it."""
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def _write_json(path: Path, value: Any) -> None:
    write_file(path, (json.dumps(value, indent=2) + "\n").encode())


def write_file(path: Path, content: bytes) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.write_bytes(content)
    partial.replace(path)


def make_directory(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise ConfigError(f"{path} is a file; --output must be a directory") from None
    except OSError as problem:
        raise ConfigError(f"{path} cannot be created: {problem.strerror}") from None
