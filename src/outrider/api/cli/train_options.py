"""Options that both kinds of training share. Names and meanings are those of `TrainSettings`, which checks them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from outrider.errors import ConfigError
from outrider.models.resolve import DEFAULT_MODEL
from outrider.training.settings import ATTENTIONS, LONG_SHARE, OPTIMISERS, WEIGHTINGS

RUN = "Run"
DATA = "Data"
OPTIMISATION = "Optimisation"
SPEED = "Speed"
CARD = "Model card"

Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True)
class TargetOptions:
    model: Annotated[
        str, typer.Option("--model", "-m", help="The target: a built-in name, a directory, a .gguf file or a hub id.")
    ] = DEFAULT_MODEL
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto"
    dtype: Annotated[str, typer.Option(help="Of the target: auto, float32, float16 or bfloat16.")] = "auto"


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    minutes: Annotated[
        float | None, typer.Option(help="Train for so long; the learning rate falls until then.", rich_help_panel=RUN)
    ] = None
    steps: Annotated[int | None, typer.Option(help="Train for so many steps instead.", rich_help_panel=RUN)] = None
    init: Annotated[
        Path | None,
        typer.Option(help="Begin with the weights of this exported drafter of the same shape.", rich_help_panel=RUN),
    ] = None
    seed: Annotated[int, typer.Option(rich_help_panel=RUN, help="Seed of weights, order and anchors.")] = 0
    log_every: Annotated[int, typer.Option(rich_help_panel=RUN, help="Steps between two lines of progress.")] = 100
    evaluate_every_s: Annotated[float, typer.Option(rich_help_panel=RUN, help="Seconds between evaluations.")] = 60.0
    save_every_s: Annotated[
        float, typer.Option(rich_help_panel=RUN, help="Seconds between saving the state and exporting the drafter.")
    ] = 120.0
    shard_mib: Annotated[
        int | None, typer.Option(rich_help_panel=RUN, help="Cut the exported weights into files of at most this size.")
    ] = None

    evaluation: Annotated[
        Path | None,
        typer.Option(help="Greedy answers from held-out. Default: part of the data is held out.", rich_help_panel=DATA),
    ] = None
    long_data: Annotated[
        list[Path] | None,
        typer.Option(
            help="Corpus of longer streams, for a share of the steps. May be given several times.", rich_help_panel=DATA
        ),
    ] = None
    long_share: Annotated[
        float | None,
        typer.Option(help=f"Share of the steps on --long-data. Default: {LONG_SHARE:g}.", rich_help_panel=DATA),
    ] = None
    long_pack: Annotated[
        int | None,
        typer.Option(
            help="Streams of --long-data laid end to end, so that farther positions occur. Default: 1.",
            rich_help_panel=DATA,
        ),
    ] = None
    watch: Annotated[bool, typer.Option(help="Look for streams that are added meanwhile.", rich_help_panel=DATA)] = (
        False
    )
    holdout: Annotated[int, typer.Option(help="Streams held out without --evaluation.", rich_help_panel=DATA)] = 64
    batch_streams: Annotated[int, typer.Option(help="Streams per step.", rich_help_panel=DATA)] = 64
    pool_streams: Annotated[
        int, typer.Option(help="Streams whose target states are kept at a time.", rich_help_panel=DATA)
    ] = 4096
    reuse: Annotated[int, typer.Option(help="Times a stream is drawn before it is replaced.", rich_help_panel=DATA)] = 4

    sure_weight: Annotated[
        float,
        typer.Option(
            help="How readily drafts begin behind a token that the target was sure of, against one that surprised it: "
            "up to 1, where all are alike.",
            rich_help_panel=DATA,
        ),
    ] = 1.0

    optimiser: Annotated[
        str, typer.Option(help=f"For matrices: {', '.join(OPTIMISERS)}.", rich_help_panel=OPTIMISATION)
    ] = "muon"
    lr: Annotated[float, typer.Option(help="Highest learning rate.", rich_help_panel=OPTIMISATION)] = 1.5e-3
    warmup_steps: Annotated[
        int, typer.Option(help="Steps until the learning rate is reached.", rich_help_panel=OPTIMISATION)
    ] = 200
    weight_decay: Annotated[float, typer.Option(help="Weight decay of matrices.", rich_help_panel=OPTIMISATION)] = 0.01
    clip: Annotated[float, typer.Option(help="Largest norm of a gradient.", rich_help_panel=OPTIMISATION)] = 1.0
    weighting: Annotated[
        str,
        typer.Option(help=f"How the drafts of a block count: {', '.join(WEIGHTINGS)}.", rich_help_panel=OPTIMISATION),
    ] = "decay"
    gamma: Annotated[
        float, typer.Option(help="With decay, draft j counts exp(-(j-1)/gamma).", rich_help_panel=OPTIMISATION)
    ] = 4.0
    distil: Annotated[
        float,
        typer.Option(
            help="How much of the aim is the target's whole distribution, 0 to 1.", rich_help_panel=OPTIMISATION
        ),
    ] = 0.0

    loss_vocab_size: Annotated[
        int | None,
        typer.Option(
            help="Compute the loss over so many tokens only: frequent ones, a step's labels, others by chance.",
            rich_help_panel=SPEED,
        ),
    ] = None
    compiled: Annotated[
        bool, typer.Option("--compile/--no-compile", help="Compile the network; on a GPU only.", rich_help_panel=SPEED)
    ] = True
    attention: Annotated[str, typer.Option(help=f"Kernel: {', '.join(ATTENTIONS)}.", rich_help_panel=SPEED)] = "auto"
    chunk_rows: Annotated[int, typer.Option(help="Rows of logits that exist at a time.", rich_help_panel=SPEED)] = 4096

    data_source: Annotated[
        str | None,
        typer.Option(help="Where the data comes from. Default: what corpus.json beside it says.", rich_help_panel=CARD),
    ] = None
    data_licence: Annotated[
        str | None, typer.Option(help="Licence of the data. Default: likewise.", rich_help_panel=CARD)
    ] = None
    licence: Annotated[str | None, typer.Option(help="Licence of the drafter.", rich_help_panel=CARD)] = None

    def settings(self) -> dict[str, Any]:
        """As TrainSettings takes them."""
        values = vars(self) | {"long_data": tuple(self.long_data or ())}
        parts = {name: values.pop(name) for name in ("long_share", "long_pack")}
        return values | parts_of("long_data", self.long_data, **parts)


def parts_of(whole: str, given: object, **parts: object) -> dict[str, Any]:
    """Those that were given; without the option that they say something of they would do nothing, unnoticed."""
    told = {name: value for name, value in parts.items() if value is not None}
    if told and not given:
        name = next(iter(told))
        raise ConfigError(f"{_option(name)} is a setting of {_option(whole)}, which is missing; give both or neither")
    return told


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def tap_ids(text: str | None) -> tuple[int, ...] | None:
    """1,8,14: layer numbers from 0."""
    return None if text is None else _listed(text, int, "layer numbers", "1,8,14")


def share_list(text: str | None) -> tuple[float, ...] | None:
    return None if text is None else _listed(text, float, "shares", "0.7,0.3")


def temperature_shares(text: str) -> tuple[tuple[float, float], ...]:
    """0:0.8,0.6:0.2: temperature and share."""

    def pair(part: str) -> tuple[float, float]:
        heat, share = part.split(":")
        return float(heat), float(share)

    return _listed(text, pair, "temperatures with shares", "0:0.8,0.6:0.2")


def _listed(text: str, read: Callable[[str], Item], what: str, example: str) -> tuple[Item, ...]:
    try:
        return tuple(read(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no list of {what}; write {example}") from None
