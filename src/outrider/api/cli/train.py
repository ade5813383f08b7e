"""`outrider train`: make drafters for a target, from corpus to checkpoint."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.api.cli.grouped import grouped
from outrider.api.cli.train_options import TargetOptions, TrainOptions, tap_ids, temperature_shares
from outrider.errors import ConfigError
from outrider.training.settings import TrainSettings

if TYPE_CHECKING:
    from outrider.training.make_corpus import CorpusSettings
    from outrider.training.prompts import ChatText, PromptLine
    from outrider.training.target import Target

CORPUS_HELP = (
    "Let the target write conversations to train on.\n\n"
    "Every prompt begins one; answers are sampled at a mixture of temperatures, further questions are invented."
)
HELD_OUT_HELP = "Let the target answer prompts greedily, to measure acceptance with [bold]--evaluation[/bold]."
DFLASH_HELP = "Train a DFlash drafter: one pass drafts a whole block."
EAGLE3_HELP = "Train an EAGLE-3 drafter: one layer drafts token by token."

train_app = typer.Typer(
    help="Train drafters for a target: first its own conversations, then a network that foresees them.",
    no_args_is_help=True,
)

Data = Annotated[list[Path], typer.Option(help="A corpus: a directory or one toks_N.npy. May be repeated.")]
Output = Annotated[Path, typer.Option(help="Where the drafter goes; a run that lies there is continued.")]
Fresh = Annotated[bool, typer.Option("--fresh", help="Begin anew, whatever lies in the output.")]
Taps = Annotated[
    str | None, typer.Option(help="Target layers to read, counted from 0: 1,8,14. Default: spread over the target.")
]
Prompts = Annotated[Path, typer.Option(help='JSON lines with "prompt" or "turns"; .gz is read too.')]
Length = Annotated[int, typer.Option(help="Tokens of a stream.")]


def _report(line: str) -> None:
    typer.echo(f"{time.strftime('%H:%M:%S')} {line}")


def _train(settings: TrainSettings, target: TargetOptions, *, fresh: bool) -> None:
    from outrider.training.run import train

    train(
        settings, model=target.model, report=_report, device=target.device, dtype=target.dtype, fresh=fresh
    )


@train_app.command("dflash", help=DFLASH_HELP)
@grouped
def dflash(
    *,
    data: Data,
    output: Output,
    layers: Annotated[int, typer.Option(help="Of the drafter.")] = 4,
    block_size: Annotated[int, typer.Option(help="The last token and the drafts behind it.")] = 8,
    causal: Annotated[bool, typer.Option("--causal", help="Drafts see only earlier ones of their block.")] = False,
    mask_token_id: Annotated[
        int | None, typer.Option(help="Stands for tokens to draft. Default: one that the data never uses.")
    ] = None,
    anchors: Annotated[int, typer.Option(help="Blocks per stream and step.")] = 64,
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
        causal=causal,
        mask_token_id=mask_token_id,
        anchors=anchors,
        taps=tap_ids(taps),
        **options.settings(),
    )
    _train(settings, target, fresh=fresh)


@train_app.command("eagle3", help=EAGLE3_HELP)
@grouped
def eagle3(
    *,
    data: Data,
    output: Output,
    unroll: Annotated[int, typer.Option(help="Steps on its own outputs while training.")] = 6,
    draft_vocab_size: Annotated[
        int | None, typer.Option(help="Draft only the most frequent tokens. Default: all.")
    ] = None,
    anchors: Annotated[int, typer.Option(help="Chains per stream and step.")] = 64,
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


@train_app.command("corpus", help=CORPUS_HELP)
@grouped
def corpus(
    *,
    prompts: Prompts,
    output: Annotated[Path, typer.Option(help="Directory of the corpus; what is there stays.")],
    length: Length = 768,
    streams: Annotated[int, typer.Option(help="Conversations that are written at once.")] = 2048,
    count: Annotated[int | None, typer.Option(help="Of conversations. Default: one for each prompt.")] = None,
    minutes: Annotated[float | None, typer.Option(help="Begin no further batch after that.")] = None,
    temperatures: Annotated[str, typer.Option(help="Temperature and share, of answers.")] = "0:0.8,0.6:0.2",
    question_temperature: Annotated[float, typer.Option(help="Of invented questions.")] = 0.8,
    seed: Annotated[int, typer.Option(help="Of prompts' order and sampling.")] = 0,
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
        seed=seed,
    )
    lines, text, model = _writer(prompts, target)
    write_conversations(settings, model, text, lines, _report)


@train_app.command("held-out", help=HELD_OUT_HELP)
@grouped
def held_out(
    *,
    prompts: Prompts,
    output: Annotated[Path, typer.Option(help="A new directory.")],
    length: Length = 768,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 256,
    target: TargetOptions,
) -> None:
    from outrider.training.make_corpus import CorpusSettings, write_greedy_answers

    if output.exists() and any(output.iterdir()):
        raise ConfigError(f"{output} is not empty; categories of several runs would be mixed up")
    settings: CorpusSettings = CorpusSettings(output=output, length=length)
    lines, text, model = _writer(prompts, target)
    write_greedy_answers(settings, model, text, lines, _report, tokens=max_tokens)


def _writer(prompts: Path, options: TargetOptions) -> tuple[list[PromptLine], ChatText, Target]:
    from outrider.training.prompts import load_chat_text, read_prompts
    from outrider.training.run import pick_device, target_dtype
    from outrider.training.target import load_target

    lines = read_prompts(prompts)
    text = load_chat_text(options.model)
    device = pick_device(options.device)
    return lines, text, load_target(options.model, dtype=target_dtype(device, options.dtype), device=device)
