"""`outrider generate`: continue prompts from the command line, a file or a pipe."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from outrider.cli.drafter_options import DRAFTS_COME_FROM, NoSpeculation, with_default_speculation
from outrider.cli.engine_options import EngineOptions, ModelOptions
from outrider.cli.grouped import grouped, panel
from outrider.cli.main import INTERRUPTED_EXIT_STATUS
from outrider.cli.sampling_options import GENERATE_MAX_TOKENS, SamplingOptions, sampling_option
from outrider.cli.terminal import errors, interruptible, loading, out, progress_bar, summary
from outrider.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from outrider.api.llm import LLM, Prompt
    from outrider.engine.outputs import RequestOutput
    from outrider.sampling import SamplingParams

HEADING_CHARACTERS = 60

input_option = panel("Prompts and output")
GENERATE_HELP = (
    "Continue one prompt or many.\n\n"
    "Prompts come from the arguments, from [bold]--file[/bold], or from a pipe (which is one prompt). "
    f"An answer has at most {GENERATE_MAX_TOKENS} tokens unless --max-tokens says otherwise.\n\n"
    f"{DRAFTS_COME_FROM}\n\n"
    "[dim]Examples:[/dim]\n\n"
    '  outrider generate "The capital of France is" --max-tokens 20\n\n'
    '  outrider generate --chat "Name three rivers." --no-speculation\n\n'
    "  outrider generate --file prompts.jsonl --json > results.jsonl"
)


@grouped
def generate(
    *,
    prompts: Annotated[list[str] | None, typer.Argument(metavar="PROMPT", help="Texts to continue.")] = None,
    file: Annotated[
        str | None,
        input_option("--file", "-f", help='One prompt per line, or JSON lines with "prompt"; - reads standard input.'),
    ] = None,
    chat: Annotated[
        bool, input_option("--chat/--raw", help="Answer as in a conversation, or continue the text.")
    ] = False,
    as_json: Annotated[
        bool, input_option("--json", help="Print one JSON object per result on stdout, and nothing else.")
    ] = False,
    n: Annotated[int, sampling_option("--n", help="Continuations of each prompt.")] = 1,
    sampling: SamplingOptions,
    model: ModelOptions,
    no_speculation: NoSpeculation = False,
    engine: EngineOptions,
) -> None:
    texts = collect_prompts(prompts or [], file)
    sampling.check(n=n)
    engine = with_default_speculation(engine, model.model, no_speculation=no_speculation)
    settings = model.settings() | engine.settings()

    from outrider.api.llm import LLM

    with loading() as progress:
        llm = LLM(progress=progress, **settings)
    params = sampling.params(llm.engine.model.generation, max_tokens=GENERATE_MAX_TOKENS, n=n)
    inputs: list[Prompt] = [llm.chat_prompt([{"role": "user", "content": text}]) if chat else text for text in texts]
    if len(inputs) == 1 and n == 1 and not as_json:
        _stream(llm, inputs[0], params)
    else:
        _generate_all(llm, texts, inputs, params, as_json=as_json)


def collect_prompts(given: Sequence[str], file: str | None) -> list[str]:
    """Returns the prompts from the arguments, the file or standard input; refuses empty ones."""
    if given and file is not None:
        raise ConfigError("prompts are given both as arguments and by --file; use one of the two")
    if file is not None:
        return _prompts_in_file(file)
    if given:
        texts = list(given)
    elif sys.stdin.isatty():
        raise ConfigError('no prompt is given; try: outrider generate "The capital of France is"')
    else:
        texts = [_read("-").removesuffix("\n")]
    for text in texts:
        if not text.strip():
            raise RequestError("the prompt is empty; give at least one word")
    return texts


def _read(file: str) -> str:
    try:
        if file == "-":
            return sys.stdin.read()
        return Path(file).read_text(encoding="utf-8")
    except OSError as problem:
        raise ConfigError(f"cannot read {file}: {problem.strerror or problem}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{file} is not UTF-8 text; convert it first") from None


def _prompts_in_file(file: str) -> list[str]:
    lines = [(number, line) for number, line in enumerate(_read(file).splitlines(), start=1) if line.strip()]
    if not lines:
        raise ConfigError(f"{file} has no prompts; write one per line")
    if not file.endswith(".jsonl") and _prompt_in_json(lines[0][1]) is None:
        return [line for _number, line in lines]
    prompts = []
    for number, line in lines:
        prompt = _prompt_in_json(line)
        if prompt is None:
            raise ConfigError(f'{file}, line {number} is not a JSON object with a text "prompt": {line[:60]}')
        prompts.append(prompt)
    return prompts


def _prompt_in_json(line: str) -> str | None:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    prompt = value.get("prompt") if isinstance(value, dict) else None
    return prompt if isinstance(prompt, str) and prompt.strip() else None


def _stream(llm: LLM, prompt: Prompt, params: SamplingParams) -> None:
    """Shows the continuation of one prompt as it is generated."""
    shown, started = 0, time.perf_counter()
    output: RequestOutput | None = None
    with interruptible() as interruption:
        stream = llm.stream(prompt, params)
        for output in stream:
            text = output.outputs[0].text
            typer.echo(text[shown:], nl=False)
            shown = len(text)
            if interruption.wanted:
                stream.close()
                break
    typer.echo()
    assert output is not None
    _print_summary([output], llm, time.perf_counter() - started)
    if interruption.wanted:
        raise typer.Exit(INTERRUPTED_EXIT_STATUS)


def _generate_all(
    llm: LLM, texts: Sequence[str], inputs: Sequence[Prompt], params: SamplingParams, *, as_json: bool
) -> None:
    started = time.perf_counter()
    with progress_bar() as bar:
        task = bar.add_task("prompts", total=len(inputs))
        outputs = llm.generate(
            list(inputs), params, on_step=lambda changed: bar.advance(task, sum(output.finished for output in changed))
        )
    seconds = time.perf_counter() - started
    for number, (text, output) in enumerate(zip(texts, outputs, strict=True)):
        if as_json:
            for record in result_records(number, text, output):
                typer.echo(json.dumps(record))
        else:
            _print_result(number, len(outputs), text, output)
    _print_summary(outputs, llm, seconds)


def _print_summary(outputs: Sequence[RequestOutput], llm: LLM, seconds: float) -> None:
    errors.print(summary(outputs, llm.engine.speculation, seconds), style="dim", soft_wrap=True)
    failed = [output for output in outputs if output.error is not None]
    for output in failed:
        errors.print(Text(f"error: {output.error}", style="red"), soft_wrap=True)
    if failed:
        raise typer.Exit(1)


def _print_result(number: int, total: int, text: str, output: RequestOutput) -> None:
    heading = " ".join(text.split())
    if len(heading) > HEADING_CHARACTERS:
        heading = heading[: HEADING_CHARACTERS - 1] + "…"
    for continuation in output.outputs:
        which = f", answer {continuation.index + 1} of {len(output.outputs)}" if len(output.outputs) > 1 else ""
        out.print(Text(f"[{number + 1}/{total}{which}] {heading}", style="bold"), soft_wrap=True)
        typer.echo(continuation.text.strip("\n"))
        typer.echo()


def result_records(number: int, prompt: str, output: RequestOutput) -> list[dict[str, Any]]:
    """Returns what --json prints: one object for each continuation."""
    metrics, speculation = output.metrics, output.metrics.speculation
    first, last = metrics.first_token_s, metrics.finished_s
    of_request = {
        "metrics": {
            "prompt_tokens": len(output.prompt_token_ids),
            "cached_tokens": metrics.cached_tokens,
            "steps": metrics.steps,
            "time_to_first_token_s": None if first is None else first - metrics.arrival_s,
            "e2e_s": None if last is None else last - metrics.arrival_s,
        },
        "speculation": {
            "drafts": speculation.drafts,
            "draft_tokens": speculation.draft_tokens,
            "accepted_tokens": speculation.accepted_tokens,
            "accepted_at": speculation.accepted_at,
            "mean_acceptance_length": speculation.mean_acceptance_length,
        },
        "error": output.error,
    }
    return [
        {
            "prompt_index": number,
            "index": continuation.index,
            "prompt": prompt,
            "text": continuation.text,
            "token_ids": continuation.token_ids,
            "origins": [origin.value for origin in continuation.origins],
            "finish_reason": continuation.finish_reason,
            "stop_reason": continuation.stop_reason,
            **of_request,
        }
        for continuation in output.outputs
    ]
