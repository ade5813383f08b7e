"""`outrider train`: drafters for a target model, from the corpus to the checkpoint."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.cli.grouped import grouped
from outrider.cli.train_options import (
    TargetOptions,
    TrainOptions,
    parts_of,
    tap_ids,
    temperature_fractions,
    weight_list,
)
from outrider.errors import ConfigError
from outrider.tools.training.settings import SMALLER_SHARE, TrainSettings

if TYPE_CHECKING:
    from outrider.tools.training.make_corpus import CorpusSettings
    from outrider.tools.training.prompts import ChatText, PromptLine
    from outrider.tools.training.target import Target

TRAIN_HELP = (
    "Train a drafter for a target.\n\n"
    "1. [bold]corpus[/bold]: the target writes conversations to learn from.\n\n"
    "2. [bold]held-out[/bold]: the target answers other prompts greedily, to measure acceptance on.\n\n"
    "3. [bold]dflash[/bold] or [bold]eagle3[/bold]: a drafter learns to predict the target.\n\n"
    "4. [bold]average[/bold] (optional): the mean of a drafter and of others whose training continued from it."
)
CORPUS_HELP = (
    "Let the target write conversations to train on.\n\n"
    "Every prompt begins a conversation; all have the same length in tokens. The target answers, invents the next "
    "question where the line gives none, and so on until the stream is full. Streams that are already in the directory "
    "stay; new ones are added."
)
HELD_OUT_HELP = (
    "Let the target answer prompts greedily, to measure acceptance during training ([bold]--evaluation[/bold]).\n\n"
    "Use prompts that the corpus does not contain."
)
CONTINUE_HELP = (
    "\n\nThe output directory holds the drafter as it was last exported, ready for use, and the state of the run, from "
    "which the same command continues. Ctrl-C or SIGTERM saves, exports and ends; SIGUSR1 saves and exports."
)
DFLASH_HELP = f"Train a DFlash drafter: one pass drafts a whole block.{CONTINUE_HELP}"
AVERAGE_HELP = (
    "Make the mean of several drafters of one network.\n\n"
    "The mean of a drafter and of others whose training continued from it, each with data of its own, often has more "
    "drafts accepted than any of them. [bold]outrider bench acceptance[/bold] measures it."
)
EAGLE3_HELP = f"Train an EAGLE-3 drafter: one layer drafts token by token.{CONTINUE_HELP}"

train_app = typer.Typer(help=TRAIN_HELP, no_args_is_help=True)

Data = Annotated[list[Path], typer.Option(help="Corpus to learn from: a directory or one toks_N.npy; may be repeated.")]
Output = Annotated[Path, typer.Option(help="Directory of the drafter; a run that is there already is continued.")]
Fresh = Annotated[bool, typer.Option("--fresh", help="Start over even if the output holds a run.")]
Taps = Annotated[
    str | None,
    typer.Option(help="Target layers whose hidden states are read, counted from 0: 1,8,14. Default: spread evenly."),
]
Prompts = Annotated[Path, typer.Option(help='JSON lines, each with "prompt" or "turns"; .gz files are read too.')]
Length = Annotated[int, typer.Option(help="Tokens per stream.")]


def _report(line: str) -> None:
    typer.echo(f"{time.strftime('%H:%M:%S')} {line}")


def _train(settings: TrainSettings, target: TargetOptions, *, fresh: bool) -> None:
    from outrider.tools.training.run import train

    train(settings, model=target.model, report=_report, device=target.device, dtype=target.dtype, fresh=fresh)


@train_app.command("corpus", help=CORPUS_HELP)
@grouped
def corpus(
    *,
    prompts: Prompts,
    output: Annotated[Path, typer.Option(help="Directory of the corpus; new streams are added.")],
    length: Length = 768,
    streams: Annotated[int, typer.Option(help="Conversations written at once.")] = 2048,
    count: Annotated[int | None, typer.Option(help="Total number of conversations. Default: one per prompt.")] = None,
    minutes: Annotated[float | None, typer.Option(help="Start no further batch after this many minutes.")] = None,
    temperatures: Annotated[
        str, typer.Option(help="Temperatures of answers, each with its fraction of the conversations.")
    ] = "0:0.8,0.6:0.2",
    question_temperature: Annotated[float, typer.Option(help="Temperature of invented questions.")] = 0.8,
    invented: Annotated[
        float, typer.Option(help="Fraction of the conversations that begin with a question invented by the target.")
    ] = 0.0,
    begun: Annotated[
        float, typer.Option(help="Fraction that begin with a prompt's first words; the target completes the question.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of the prompts' order and of sampling.")] = 0,
    source: Annotated[
        str | None, typer.Option(help="Where the prompts come from, for the drafter's model card.")
    ] = None,
    licence: Annotated[str | None, typer.Option(help="Licence of the prompts, for the drafter's model card.")] = None,
    target: TargetOptions,
) -> None:
    from outrider.tools.training.make_corpus import CorpusSettings, write_conversations

    settings = CorpusSettings(
        output=output,
        length=length,
        streams=streams,
        count=count,
        minutes=minutes,
        temperatures=temperature_fractions(temperatures),
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
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 256,
    target: TargetOptions,
) -> None:
    from outrider.tools.training.make_corpus import CorpusSettings, write_greedy_answers

    if output.is_dir() and any(output.iterdir()):
        raise ConfigError(
            f"{output} is not empty, and categories of several runs would be mixed up; choose another directory"
        )
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
        typer.Option(help="Rows of a smaller block that is trained as well, so that fewer drafts cost less."),
    ] = None,
    smaller_share: Annotated[
        float | None, typer.Option(help=f"Fraction of the steps on smaller blocks. Default: {SMALLER_SHARE:g}.")
    ] = None,
    causal: Annotated[
        bool, typer.Option("--causal", help="Let a draft attend only to earlier drafts of its block.")
    ] = False,
    mask_token_id: Annotated[
        int | None, typer.Option(help="Token in the place of a token to draft. Default: the rarest in the data.")
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
    unroll: Annotated[int, typer.Option(min=1, help="Drafts in sequence, each from the one before.")] = 6,
    draft_vocab_size: Annotated[
        int | None, typer.Option(help="Draft only this many of the tokens, the most frequent. Default: all.")
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
    weights: Annotated[
        str | None, typer.Option("--shares", help="Weight of each drafter, as in 0.7,0.3. Default: equal weights.")
    ] = None,
    shard_mib: Annotated[
        int | None, typer.Option(min=1, help="Split the weights into files of at most this size.")
    ] = None,
) -> None:
    from outrider.tools.training.average import average_drafters

    average_drafters(drafters, output, weights=weight_list(weights), shard_mib=shard_mib, report=_report)


def _writer(prompts: Path, output: Path, options: TargetOptions) -> tuple[list[PromptLine], ChatText, Target]:
    from outrider.tools.training.export import make_directory
    from outrider.tools.training.prompts import load_chat_text, read_prompts
    from outrider.tools.training.run import pick_device, target_dtype
    from outrider.tools.training.target import load_target

    lines = read_prompts(prompts)
    text = load_chat_text(options.model)
    device = pick_device(options.device)
    # Made first, so that nothing is computed that could then not be saved.
    make_directory(output)
    _report(f"loading {options.model}")
    return lines, text, load_target(options.model, dtype=target_dtype(device, options.dtype), device=device)
