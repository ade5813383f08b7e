"""A training run from settings to an exported drafter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from outrider.errors import ConfigError
from outrider.training.checkpoint import STATE_FILE
from outrider.training.drafts import make_plan
from outrider.training.evaluate import Evaluation, as_json, describe, read_evaluation
from outrider.training.export import export_drafter
from outrider.training.pooling import StreamSource
from outrider.training.settings import TrainSettings
from outrider.training.target import Target, load_target
from outrider.training.trainer import Trainer

Report = Callable[[str], None]


def pick_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device {name!r} is not known; write auto, cpu, cuda or cuda:N") from None


def target_dtype(device: torch.device, name: str = "auto") -> torch.dtype:
    """float16 keeps a target's choices closer to float32's than bfloat16 does."""
    if name == "auto":
        return torch.float16 if device.type == "cuda" else torch.float32
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ConfigError(f"dtype {name!r} is not known; write auto, float32, float16 or bfloat16")
    return found


def train(
    settings: TrainSettings,
    *,
    model: str,
    report: Report,
    device: str = "auto",
    dtype: str = "auto",
    fresh: bool = False,
) -> dict[str, Any] | None:
    """Train by name of the target. Returns the last evaluation, as it is exported."""
    where = pick_device(device)
    if where.type == "cuda":
        torch.set_float32_matmul_precision("high")
    target = load_target(model, dtype=target_dtype(where, dtype), device=where)
    return train_for(settings, target, report=report, fresh=fresh)


def train_for(settings: TrainSettings, target: Target, *, report: Report, fresh: bool = False) -> dict[str, Any] | None:
    settings.output.mkdir(parents=True, exist_ok=True)
    if fresh:
        (settings.output / STATE_FILE).unlink(missing_ok=True)
    source = StreamSource(
        settings.data,
        vocab_size=target.spec.vocab_size,
        holdout=settings.holdout if settings.evaluation is None else 0,
        seed=settings.seed,
        watch=settings.watch,
    )
    length = source.streams.tokens.shape[1]
    if settings.evaluation is None:
        held_out, categories = source.held_out, ["held out"] * len(source.held_out)
    else:
        held_out, categories = read_evaluation(settings.evaluation, vocab_size=target.spec.vocab_size, length=length)
    plan = make_plan(settings, target, source.streams)
    trainer = Trainer(settings, target, plan, source)
    parameters = sum(parameter.numel() for parameter in plan.network.parameters())
    report(
        f"{settings.method}: {parameters / 1e6:.1f}M parameters, taps {list(plan.taps)}, {len(source.streams):,} "
        f"streams of {length} tokens, mask token {plan.mask_token_id}, on {device_name(target.device)}"
    )
    if trainer.resume():
        report(f"goes on from step {trainer.step}")
    evaluation: Evaluation | None = None
    latest: dict[str, Any] | None = None

    def evaluate() -> str:
        nonlocal evaluation, latest
        if not len(held_out):
            return "nothing held out to evaluate"
        if evaluation is None:
            pool = trainer.pool_of(held_out)
            evaluation = Evaluation(
                pool,
                categories,
                plan,
                trainer.rows,
                batch_streams=settings.batch_streams,
                anchors=settings.anchors,
                k=plan.network.k,
            )
        totals = evaluation.run()
        latest = as_json(totals, plan.network.k)
        return describe(totals)

    def export() -> None:
        assert trainer.scale is not None
        trained = {
            "steps": trainer.step,
            "seconds": trainer.elapsed_s,
            "streams": len(source.streams),
            "length": length,
            "device": device_name(target.device),
        }
        export_drafter(settings, target, plan, trainer.scale, trained=trained, evaluation=latest)
        report(f"exported to {settings.output}")

    trainer.run(report, evaluate, export)
    return latest


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU"
