"""`outrider train`: make drafters for a target, from corpus to checkpoint."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.api.cli.grouped import grouped
from outrider.api.cli.train_options import (
    TargetOptions,
    TrainOptions,
    parts_of,
    share_list,
    tap_ids,
    temperature_shares,
)
from outrider.errors import ConfigError
from outrider.training.settings import SMALLER_SHARE, TrainSettings

if TYPE_CHECKING:
    from outrider.training.make_corpus import CorpusSettings
    from outrider.training.prompts import ChatText, PromptLine
    from outrider.training.target import Target

TRAIN_HELP = (
    "Train a drafter for a target.\n\n"
    "1. [bold]corpus[/bold]: the target writes conversations to learn from.\n\n"
    "2. [bold]held-out[/bold]: it answers other prompts greedily, to measure with.\n\n"
    "3. [bold]dflash[/bold] or [bold]eagle3[/bold]: a drafter learns to foresee the target.\n\n"
    "4. [bold]average[/bold], perhaps: the mean of one drafter and of another that went on from it."
)
CORPUS_HELP = (
    "Let the target write conversations to train on.\n\n"
    "Every prompt begins a conversation of one length in tokens. The target answers, invents the next question where "
    "the line gives none, and so on until the stream is full. What an earlier call wrote into the directory stays; new "
    "streams are added."
)
HELD_OUT_HELP = (
    "Let the target answer prompts greedily, to measure acceptance with [bold]--evaluation[/bold].\n\n"
    "Use prompts that the corpus does not contain."
)
CONTINUE_HELP = (
    "\n\nThe output holds the drafter as it was last exported, ready for use, and the state of the run: the same "
    "command again goes on from there. Ctrl-C or SIGTERM saves, exports and ends; SIGUSR1 saves and exports."
)
DFLASH_HELP = f"Train a DFlash drafter: one pass drafts a whole block.{CONTINUE_HELP}"
AVERAGE_HELP = (
    "Make the mean of several drafters of one network.\n\n"
    "A drafter and others that went on from it, each with data of its own, often accept more together than any of "
    "them alone. [bold]outrider bench acceptance[/bold] tells."
)
EAGLE3_HELP = f"Train an EAGLE-3 drafter: one layer drafts token by token.{CONTINUE_HELP}"

train_app = typer.Typer(help=TRAIN_HELP, no_args_is_help=True)

Data = Annotated[
    list[Path], typer.Option(help="Corpus to learn from: a directory or one toks_N.npy. May be given several times.")
]
Output = Annotated[Path, typer.Option(help="Directory of the drafter; a run that is there already is continued.")]
Fresh = Annotated[bool, typer.Option("--fresh", help="Begin anew even if the output holds a run.")]
Taps = Annotated[
    str | None,
    typer.Option(help="Target layers whose output is read, counted from 0, as in 1,8,14. Default: spread evenly."),
]
Prompts = Annotated[Path, typer.Option(help='JSON lines, each with "prompt" or "turns"; also gzipped, as .gz.')]
Length = Annotated[int, typer.Option(help="Tokens per stream.")]


def _report(line: str) -> None:
    typer.echo(f"{time.strftime('%H:%M:%S')} {line}")


def _train(settings: TrainSettings, target: TargetOptions, *, fresh: bool) -> None:
    from outrider.training.run import train

    train(settings, model=target.model, report=_report, device=target.device, dtype=target.dtype, fresh=fresh)


@train_app.command("corpus", help=CORPUS_HELP)
@grouped
def corpus(
    *,
    prompts: Prompts,
    output: Annotated[Path, typer.Option(help="Directory of the corpus; new streams are added.")],
    length: Length = 768,
    streams: Annotated[int, typer.Option(help="Conversations written at once.")] = 2048,
    count: Annotated[int | None, typer.Option(help="Conversations in all. Default: one per prompt.")] = None,
    minutes: Annotated[float | None, typer.Option(help="Begin no further batch after so long.")] = None,
    temperatures: Annotated[
        str, typer.Option(help="Temperatures of answers, each with its share of the conversations.")
    ] = "0:0.8,0.6:0.2",
    question_temperature: Annotated[float, typer.Option(help="Temperature of invented questions.")] = 0.8,
    invented: Annotated[
        float, typer.Option(help="Share of the conversations that begin with a question of the target's own.")
    ] = 0.0,
    begun: Annotated[
        float,
        typer.Option(help="Share that begins with a prompt's first words; the target finishes the question."),
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of the prompts' order and of sampling.")] = 0,
    source: Annotated[
        str | None, typer.Option(help="Where the prompts come from, for the model card of what is trained on them.")
    ] = None,
    licence: Annotated[str | None, typer.Option(help="Licence of the prompts, for the same.")] = None,
    target: TargetOptions,
) -> None:
    from outrider.training.make_corpus import CorpusSettings, write_conversations

    settings = CorpusSettings(
        output=output,
        length=length,
        streams=streams,
        count=count,
        minutes=minutes,
        temperatures=temperature_shares(temperatures),
        question_temperature=question_temperature,
        invented=invented,
        begun=begun,
        seed=seed,
        source=source,
        licence=licence,
    )
    lines, text, model = _writer(prompts, output, target)
    write_conversations(settings, model, text, lines, _report)


@train_app.command("held-out", help=HELD_OUT_HELP)
@grouped
def held_out(
    *,
    prompts: Prompts,
    output: Annotated[Path, typer.Option(help="Directory for the answers; new or empty.")],
    length: Length = 768,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of the longest answer.")] = 256,
    target: TargetOptions,
) -> None:
    from outrider.training.make_corpus import CorpusSettings, write_greedy_answers

    if output.is_dir() and any(output.iterdir()):
        raise ConfigError(f"{output} is not empty; categories of several runs would be mixed up")
    settings: CorpusSettings = CorpusSettings(output=output, length=length)
    lines, text, model = _writer(prompts, output, target)
    write_greedy_answers(settings, model, text, lines, _report, tokens=max_tokens)


@train_app.command("dflash", help=DFLASH_HELP)
@grouped
def dflash(
    *,
    data: Data,
    output: Output,
    layers: Annotated[int, typer.Option(help="Layers of the drafter.")] = 4,
    block_size: Annotated[int, typer.Option(min=2, help="Rows of a block: the last token, then one per draft.")] = 8,
    smaller_block: Annotated[
        int | None,
        typer.Option(help="Rows of a smaller block that is learnt as well: few drafts then take less work."),
    ] = None,
    smaller_share: Annotated[
        float | None, typer.Option(help=f"Share of the steps on smaller blocks. Default: {SMALLER_SHARE:g}.")
    ] = None,
    causal: Annotated[bool, typer.Option("--causal", help="A draft sees only earlier ones of its block.")] = False,
    mask_token_id: Annotated[
        int | None, typer.Option(help="Token that stands for one to draft. Default: the rarest in the data.")
    ] = None,
    anchors: Annotated[int, typer.Option(help="Blocks drafted per stream and step.")] = 64,
    taps: Taps = None,
    fresh: Fresh = False,
    target: TargetOptions,
    options: TrainOptions,
) -> None:
    settings = TrainSettings(
        method="dflash",
        data=tuple(data),
        output=output,
        layers=layers,
        k=block_size - 1,
        smaller_block=smaller_block,
        causal=causal,
        mask_token_id=mask_token_id,
        anchors=anchors,
        taps=tap_ids(taps),
        **parts_of("smaller_block", smaller_block, smaller_share=smaller_share),
        **options.settings(),
    )
    _train(settings, target, fresh=fresh)


@train_app.command("eagle3", help=EAGLE3_HELP)
@grouped
def eagle3(
    *,
    data: Data,
    output: Output,
    unroll: Annotated[int, typer.Option(min=1, help="Drafts in a row, each made from the one before.")] = 6,
    draft_vocab_size: Annotated[
        int | None, typer.Option(help="Draft only that many tokens, the most frequent ones. Default: all.")
    ] = None,
    anchors: Annotated[int, typer.Option(help="Chains drafted per stream and step.")] = 64,
    taps: Taps = None,
    fresh: Fresh = False,
    target: TargetOptions,
    options: TrainOptions,
) -> None:
    settings = TrainSettings(
        method="eagle3",
        data=tuple(data),
        output=output,
        layers=1,
        k=unroll,
        draft_vocab_size=draft_vocab_size,
        anchors=anchors,
        taps=tap_ids(taps),
        **options.settings(),
    )
    _train(settings, target, fresh=fresh)


@train_app.command("average", help=AVERAGE_HELP)
def average(
    *,
    drafters: Annotated[
        list[str], typer.Argument(metavar="DRAFTER", help="Directories or names of installed drafters, two or more.")
    ],
    output: Annotated[Path, typer.Option(help="Directory for the mean; new or empty.")],
    shares: Annotated[
        str | None, typer.Option(help="How much each counts, as in 0.7,0.3. Default: all the same.")
    ] = None,
    shard_mib: Annotated[
        int | None, typer.Option(min=1, help="Cut the weights into files of at most this size.")
    ] = None,
) -> None:
    from outrider.training.average import average_drafters

    average_drafters(drafters, output, shares=share_list(shares), shard_mib=shard_mib, report=_report)


def _writer(prompts: Path, output: Path, options: TargetOptions) -> tuple[list[PromptLine], ChatText, Target]:
    from outrider.training.export import make_directory
    from outrider.training.prompts import load_chat_text, read_prompts
    from outrider.training.run import pick_device, target_dtype
    from outrider.training.target import load_target

    lines = read_prompts(prompts)
    text = load_chat_text(options.model)
    device = pick_device(options.device)
    # Before anything is computed that could then not be kept.
    make_directory(output)
    _report(f"loading {options.model}")
    return lines, text, load_target(options.model, dtype=target_dtype(device, options.dtype), device=device)
