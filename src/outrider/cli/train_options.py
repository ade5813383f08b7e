"""Options of both kinds of training. Names and meanings are those of `TrainSettings`, which checks them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from outrider.cli.grouped import panel
from outrider.errors import ConfigError
from outrider.models.resolve import DEFAULT_MODEL
from outrider.tools.training.settings import ATTENTIONS, LONG_SHARE, OPTIMISERS, WEIGHTINGS

run_option = panel("Run")
data_option = panel("Data")
optimisation_option = panel("Optimisation")
speed_option = panel("Speed")
card_option = panel("Model card")

Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True)
class TargetOptions:
    model: Annotated[
        str, typer.Option("--model", "-m", help="The target: a built-in name, a directory, a .gguf file or a hub id.")
    ] = DEFAULT_MODEL
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto"
    dtype: Annotated[str, typer.Option(help="Type of the target's weights: auto, float32, float16 or bfloat16.")] = (
        "auto"
    )


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    minutes: Annotated[
        float | None, run_option(help="Train for this many minutes; the learning rate falls until then.")
    ] = None
    steps: Annotated[int | None, run_option(help="Train for this many steps instead.")] = None
    init: Annotated[
        Path | None, run_option(help="Begin with the weights of this exported drafter of the same shape.")
    ] = None
    seed: Annotated[int, run_option(help="Seed of weights, order and anchors.")] = 0
    log_every: Annotated[int, run_option(help="Steps between lines of progress.")] = 100
    evaluate_every_s: Annotated[float, run_option(help="Seconds between evaluations.")] = 60.0
    save_every_s: Annotated[float, run_option(help="Seconds between saving the state and exporting the drafter.")] = (
        120.0
    )
    shard_mib: Annotated[int | None, run_option(help="Split the exported weights into files of at most this size.")] = (
        None
    )

    evaluation: Annotated[
        Path | None, data_option(help="Greedy answers from held-out. Default: part of the data is held out.")
    ] = None
    long_data: Annotated[
        list[Path] | None, data_option(help="Corpus of longer streams, for a fraction of the steps; may be repeated.")
    ] = None
    long_share: Annotated[
        float | None, data_option(help=f"Fraction of the steps on --long-data. Default: {LONG_SHARE:g}.")
    ] = None
    long_pack: Annotated[
        int | None, data_option(help="Streams of --long-data joined end to end, for longer positions. Default: 1.")
    ] = None
    watch: Annotated[bool, data_option(help="Look for streams that are added to the data during the run.")] = False
    holdout: Annotated[int, data_option(help="Streams held out without --evaluation.")] = 64
    batch_streams: Annotated[int, data_option(help="Streams per step.")] = 64
    pool_streams: Annotated[int, data_option(help="Streams whose target hidden states are kept at a time.")] = 4096
    reuse: Annotated[int, data_option(help="Times a stream is drawn before it is replaced.")] = 4

    sure_weight: Annotated[
        float,
        data_option(
            help="How often drafts start after a token that the target was sure of, relative to one that surprised it; "
            "1 treats all alike."
        ),
    ] = 1.0

    optimiser: Annotated[str, optimisation_option(help=f"For matrices: {', '.join(OPTIMISERS)}.")] = "muon"
    lr: Annotated[float, optimisation_option(help="Highest learning rate.")] = 1.5e-3
    warmup_steps: Annotated[int, optimisation_option(help="Steps until the learning rate is reached.")] = 200
    weight_decay: Annotated[float, optimisation_option(help="Weight decay of matrices.")] = 0.01
    clip: Annotated[float, optimisation_option(help="Largest norm of a gradient.")] = 1.0
    weighting: Annotated[
        str, optimisation_option(help=f"How the drafts of a block are weighted: {', '.join(WEIGHTINGS)}.")
    ] = "decay"
    gamma: Annotated[float, optimisation_option(help="With decay, draft j has the weight exp(-(j-1)/gamma).")] = 4.0
    distil: Annotated[
        float, optimisation_option(help="Weight of the target's whole distribution in the loss, 0 to 1.")
    ] = 0.0

    loss_vocab_size: Annotated[
        int | None,
        speed_option(help="Compute the loss over this many tokens: frequent ones, the step's labels, and random ones."),
    ] = None
    compiled: Annotated[bool, speed_option("--compile/--no-compile", help="Compile the network; on a GPU only.")] = True
    attention: Annotated[str, speed_option(help=f"Attention kernel: {', '.join(ATTENTIONS)}.")] = "auto"
    chunk_rows: Annotated[int, speed_option(help="Rows of logits that exist at a time.")] = 4096

    data_source: Annotated[
        str | None, card_option(help="Where the data comes from. Default: what corpus.json next to it says.")
    ] = None
    data_licence: Annotated[
        str | None, card_option(help="Licence of the data. Default: what corpus.json next to it says.")
    ] = None
    licence: Annotated[str | None, card_option(help="Licence of the drafter.")] = None

    def settings(self) -> dict[str, Any]:
        """Returns the options as keyword arguments of TrainSettings."""
        values = vars(self) | {"long_data": tuple(self.long_data or ())}
        parts = {name: values.pop(name) for name in ("long_share", "long_pack")}
        return values | parts_of("long_data", self.long_data, **parts)


def parts_of(whole: str, given: object, **parts: object) -> dict[str, Any]:
    """Returns the parts that were given; refuses them without the option they refine, where they would do nothing."""
    present = {name: value for name, value in parts.items() if value is not None}
    if present and not given:
        name = next(iter(present))
        raise ConfigError(f"{_option(name)} refines {_option(whole)}, which is missing; give both or neither")
    return present


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def tap_ids(text: str | None) -> tuple[int, ...] | None:
    """Returns the layer numbers in a text such as 1,8,14; they count from 0."""
    return None if text is None else _listed(text, int, "layer numbers", "1,8,14")


def weight_list(text: str | None) -> tuple[float, ...] | None:
    return None if text is None else _listed(text, float, "weights", "0.7,0.3")


def temperature_fractions(text: str) -> tuple[tuple[float, float], ...]:
    """Returns pairs of a temperature and its fraction from a text such as 0:0.8,0.6:0.2."""

    def pair(part: str) -> tuple[float, float]:
        temperature, fraction = part.split(":")
        return float(temperature), float(fraction)

    return _listed(text, pair, "temperatures with fractions", "0:0.8,0.6:0.2")


def _listed(text: str, read: Callable[[str], Item], what: str, example: str) -> tuple[Item, ...]:
    try:
        return tuple(read(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a list of {what}; write {example}") from None
