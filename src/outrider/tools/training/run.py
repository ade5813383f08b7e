"""A training run from settings to an exported drafter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from outrider.errors import ConfigError
from outrider.models.resolve import is_installed
from outrider.tools.training.card import RunFacts, StreamFacts
from outrider.tools.training.checkpoint import STATE_FILE, load_state, refuse_other_run
from outrider.tools.training.corpus import read_note, shared_prompts
from outrider.tools.training.drafts import TokenChoices, choose_tokens, make_plan, most_frequent
from outrider.tools.training.evaluate import Evaluation, as_json, describe, read_evaluation
from outrider.tools.training.export import export_drafter, make_directory
from outrider.tools.training.initial import open_initial
from outrider.tools.training.lanes import open_lanes
from outrider.tools.training.settings import TrainSettings
from outrider.tools.training.target import Target, device_name, load_target
from outrider.tools.training.trainer import Measured, Trainer, identity

Report = Callable[[str], None]
CPU_ROWS = 4096
"""Rows of a step above which a CPU run warns that steps take minutes."""


def pick_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device {name!r} is not known; write auto, cpu, cuda or cuda:N") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device {name!r} does not exist: PyTorch sees {torch.cuda.device_count()} GPUs")
    return device


def target_dtype(device: torch.device, name: str = "auto") -> torch.dtype:
    """Returns the dtype of the target; on a GPU float16, whose choices are closer to float32's than bfloat16's."""
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
    """Trains a drafter for the target called `model`; returns the last evaluation as it is exported."""
    refuse_missing(settings)
    where = pick_device(device)
    if where.type == "cuda":
        torch.set_float32_matmul_precision("high")
    report(f"loading {model}")
    target = load_target(model, dtype=target_dtype(where, dtype), device=where)
    try:
        return train_for(settings, target, report=report, fresh=fresh)
    except torch.OutOfMemoryError as problem:
        reason = str(problem).partition(". ")[0]
        raise ConfigError(
            f"{reason}: lower --pool-streams first, then --chunk-rows, --anchors or --batch-streams"
        ) from None


def refuse_missing(settings: TrainSettings) -> None:
    """Refuses missing files before the target is loaded."""
    for path in (*settings.data, *settings.long_data):
        if not path.exists() and not settings.watch:
            raise ConfigError(f"{path} does not exist; make a corpus first: outrider train corpus --output {path}")
    if settings.init is not None and not settings.init.is_dir() and not is_installed(str(settings.init)):
        raise ConfigError(
            f"{settings.init} is neither a directory nor an installed drafter; --init takes an exported drafter"
        )
    answers = settings.evaluation
    if answers is not None and not answers.exists():
        raise ConfigError(f"{answers} does not exist; make it first: outrider train held-out --output {answers}")
    if settings.output.exists() and not settings.output.is_dir():
        raise ConfigError(f"{settings.output} is a file; --output must be a directory")


def train_for(settings: TrainSettings, target: Target, *, report: Report, fresh: bool = False) -> dict[str, Any] | None:
    refuse_missing(settings)
    vocab_size = target.spec.vocab_size
    lanes = open_lanes(settings, vocab_size=vocab_size)
    source = lanes[0].source
    notes = tuple(read_note(path) for path in (*settings.data, *settings.long_data))
    given = None
    contexts = [lane.context_tokens for lane in lanes]
    if settings.evaluation is not None:
        given = read_evaluation(settings.evaluation, vocab_size=vocab_size)
        contexts.append(given[0].tokens.shape[1])
    state = None if fresh else load_state(settings.output)
    initial = open_initial(settings, target) if state is None and settings.init is not None else None
    if initial is not None:
        choices = initial.choices
    elif state is None:
        choices = choose_tokens(settings, [lane.source.streams for lane in lanes], vocab_size)
    else:
        choices = TokenChoices.from_state(state["choices"])
        refuse_other_run(state["identity"], identity(settings, target, choices), settings.output)
    plan = make_plan(settings, target, max(contexts), choices)
    trainer = Trainer(settings, target, plan, lanes)
    parameters = sum(parameter.numel() for parameter in plan.network.parameters())
    report(
        f"{settings.method}: {parameters / 1e6:.1f}M parameters, taps {list(plan.taps)}, "
        + " and ".join(f"{len(lane.source.streams):,} streams of {lane.length} tokens" for lane in lanes)
        + _held_out_text(settings, len(source.held_out))
        + f", on {device_name(target.device)}"
    )
    make_directory(settings.output)
    if state is not None:
        trainer.resume(state)
        report(f"resuming from step {trainer.step:,}")
    elif initial is not None:
        trainer.start_from(initial.weights_for(plan))
        report(f"starting with the weights of {settings.init}")
    if fresh:
        (settings.output / STATE_FILE).unlink(missing_ok=True)
    held_out, categories = given or (source.held_out, ["held out"] * len(source.held_out))
    evaluations: list[Evaluation] = []
    latest: dict[str, Any] | None = None

    def evaluate() -> Measured:
        nonlocal latest
        if not len(held_out):
            return Measured("acceptance cannot be measured: nothing is held out", None)
        if not evaluations:
            pool = trainer.pool_of(held_out, settings.batch_streams)
            for k in settings.draft_counts:
                anchors = settings.anchors_for(k, settings.anchors)
                shape = {"batch_streams": settings.batch_streams, "anchors": anchors, "k": k}
                evaluations.append(Evaluation(pool, categories, plan, trainer.rows, **shape))
        totals = [one.run() for one in evaluations]
        whole = totals[0]["all"]
        if not whole.steps:
            latest = None
            return Measured(describe(totals[0]), None)
        latest = as_json(totals[0], settings.k)
        text = describe(totals[0])
        for k, smaller in zip(settings.draft_counts[1:], totals[1:], strict=True):
            latest["smaller_block"] = {"block_size": k + 1, **as_json(smaller, k)}
            text += f"; {k} drafts from blocks of {k + 1} rows {smaller['all'].mean_length:.2f}"
        return Measured(text, whole.mean_length)

    def export() -> None:
        assert trainer.scale is not None
        trained = source.trained
        facts = RunFacts(
            steps=trainer.step,
            seconds=trainer.elapsed_s,
            device=device_name(target.device),
            streams=tuple(StreamFacts.of(lane.source.trained) for lane in lanes),
            notes=notes,
            shared_prompts=shared_prompts(held_out, trained),
            evaluation=latest,
            frequent_tokens=most_frequent(trained, vocab_size),
        )
        export_drafter(settings, target, plan, trainer.scale, facts)
        report(f"exported to {settings.output}")

    rows = settings.batch_streams * settings.anchors * settings.block_size
    if target.device.type == "cpu" and rows > CPU_ROWS:
        report(
            f"a step has {rows:,} rows, which takes a CPU minutes: lower --batch-streams and --anchors to try it out"
        )
    report("computing the target's states for the first steps …")
    trainer.run(report, evaluate, export)
    return latest


def _held_out_text(settings: TrainSettings, count: int) -> str:
    if settings.evaluation is not None:
        return ""
    few = (
        f" (a quarter of the data instead of {settings.holdout}, so that enough is left to train on)"
        if count < settings.holdout
        else ""
    )
    return f", {count} of them held out{few}"
