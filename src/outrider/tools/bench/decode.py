"""How fast text is generated: Outrider with and without speculation, and Transformers with the same weights.

All contestants run in one process, one after the other, there and back (A B C D, D C B A, …), so that a slow minute
of the machine touches all alike. Every run generates the same number of tokens greedily, past end-of-text, after
the same prompts. What is reported:

    prompt      time from the first request until every request has its first token
    tokens/s    of decoding: tokens of all requests after that moment / time from then to the last token
    step        median time of one decoding step, whatever it yields
    ratio       median over the rounds of (tokens/s of this contestant / tokens/s of another) in the same round

A drafter takes part with the engine choosing the number of drafts, which is "auto" for short, and with fixed numbers.
What the choice is worth are the ratios of auto to plain decoding and to the fixed number that is fastest in that case.

The garbage collector runs before each run and never within one.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any, NamedTuple

from outrider.backends import Progress
from outrider.config import EngineConfig, SpeculativeConfig
from outrider.engine.build import build_engine
from outrider.engine.engine import Engine
from outrider.engine.step_costs import know_costs
from outrider.engine.ties import examine, first_difference
from outrider.errors import ConfigError
from outrider.kv.checked import whole_number
from outrider.models.load import LoadedModel
from outrider.sampling import SamplingParams
from outrider.tools.bench.busy import usable_cores
from outrider.tools.bench.comparison import Measure
from outrider.tools.bench.contestants import Contestant, OutriderContestant, Run, TransformersContestant
from outrider.tools.bench.process_memory import peak_mb, resident_mb
from outrider.tools.bench.reference import reference_model, why_no_reference
from outrider.tools.bench.texts import PLAIN_TEXTS, TEXTS, prompts_of

WARM_UP_TOKENS = 8
PLAIN, REFERENCE = "outrider", "transformers"
LOOKUP = f"{REFERENCE}, prompt lookup"


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeBenchConfig:
    engine: EngineConfig
    speculations: tuple[SpeculativeConfig, ...]
    batches: tuple[int, ...] = (1, 8)
    prompt_tokens: int = 64
    tokens: int = 128
    rounds: int = 5
    texts: tuple[str, ...] | None = None
    """Kinds of prompts; None for all kinds that the model can be given."""
    fixed_drafts: tuple[int, ...] = ()
    """Fixed numbers of drafts with which the first drafter also runs that chooses its number itself."""
    reference: bool = True
    """Whether Transformers takes part, where it can."""

    def __post_init__(self) -> None:
        for name, least in (("prompt_tokens", 1), ("tokens", 2), ("rounds", 1)):
            whole_number(getattr(self, name), name, at_least=least)
        for drafts in self.fixed_drafts:
            whole_number(drafts, "a fixed number of drafts", at_least=1)
        for text in self.texts or ():
            if text not in TEXTS:
                raise ConfigError(f"unknown kind of text {text!r}; there are: {', '.join(TEXTS)}")
        if not self.batches or min(self.batches) < 1:
            raise ConfigError(f"a batch has at least 1 request, got {', '.join(map(str, self.batches)) or 'none'}")

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(temperature=0.0, max_tokens=self.tokens, ignore_eos=True)


class Contest(NamedTuple):
    """All contestants, loaded and ready to run."""

    contestants: list[Contestant]
    model: LoadedModel
    plain: Engine
    texts: tuple[str, ...]
    memory_mb: dict[str, float]
    """Resident memory after each contestant was loaded."""
    note: str | None
    """Reason why Transformers does not take part; None if it does."""


def prepare(config: DecodeBenchConfig, model: LoadedModel | None = None, progress: Progress | None = None) -> Contest:
    threads = config.engine.num_threads or usable_cores()
    longest = config.prompt_tokens + config.tokens
    settings = replace(
        config.engine,
        speculative_config=None,
        num_threads=threads,
        max_num_seqs=max(config.batches),
        max_num_batched_tokens=max(config.engine.max_num_batched_tokens, max(config.batches) * config.prompt_tokens),
        # Rounds repeat their prompts: with a prefix cache the later ones would skip their prefill.
        enable_prefix_caching=False,
    )
    plain = build_engine(settings, model=model, progress=progress)
    if longest > plain.max_model_len:
        raise ConfigError(
            f"{config.prompt_tokens} prompt tokens and {config.tokens} generated ones exceed the context of "
            f"{plain.max_model_len}; ask for fewer"
        )
    contestants: list[Contestant] = [OutriderContestant(PLAIN, plain, speculate=False)]
    contestants += _speculating(config, settings, plain.model, progress)
    memory = {PLAIN: resident_mb()}
    texts = TEXTS if plain.model.chat_template is not None else PLAIN_TEXTS
    if config.texts is not None and not set(config.texts) <= set(texts):
        raise ConfigError(f"{plain.model.name} has no chat template; of texts, ask for {' or '.join(PLAIN_TEXTS)}")
    note = why_no_reference(plain.model.spec) if config.reference else None
    if config.reference and note is None:
        reference = reference_model(plain.model)
        contestants.append(TransformersContestant(REFERENCE, reference, threads))
        contestants.append(
            TransformersContestant(
                LOOKUP, reference, threads, lookup=SpeculativeConfig(method="ngram", num_speculative_tokens=4)
            )
        )
        memory[REFERENCE] = resident_mb()
    return Contest(contestants, plain.model, plain, config.texts or texts, memory, note)


def _speculating(
    config: DecodeBenchConfig, settings: EngineConfig, model: LoadedModel, progress: Progress | None
) -> Iterator[OutriderContestant]:
    fixed = config.fixed_drafts
    for speculation in config.speculations:
        given = replace(settings, speculative_config=speculation)
        engine = build_engine(given, model=model, progress=progress)
        know_costs(engine, progress)
        yield OutriderContestant(
            _name(speculation, speculation.num_speculative_tokens),
            engine,
            speculate=True,
            chooses=speculation.chooses,
            method=speculation.method,
        )
        if speculation.chooses and fixed:
            yield from _with_fixed_drafts(fixed, given, speculation, model, progress)
            fixed = ()


def _with_fixed_drafts(
    fixed: Sequence[int],
    settings: EngineConfig,
    speculation: SpeculativeConfig,
    model: LoadedModel,
    progress: Progress | None,
) -> Iterator[OutriderContestant]:
    """Yields contestants whose requests ask for a number of drafts.

    They have an engine for all of them, but none in common with the one that chooses: that one must not learn from
    steps that it did not choose.
    """
    engine = build_engine(settings, model=model, progress=progress)
    for drafts in fixed:
        if drafts > engine.k:
            raise ConfigError(f"{speculation.method} drafts at most {engine.k} tokens in a step, got --k {drafts}")
        name = _name(speculation, drafts)
        yield OutriderContestant(name, engine, speculate=True, drafts=drafts, method=speculation.method)


def _name(speculation: SpeculativeConfig, drafts: int | None) -> str:
    name = f"{PLAIN}, {speculation.method}"
    if drafts is not None:
        name += f", k = {drafts}"
    if speculation.draft_confidence is not None:
        name += f", confidence {speculation.draft_confidence:g}"
    return name


class Case(NamedTuple):
    batch: int
    text: str


def measurements(config: DecodeBenchConfig, contest: Contest) -> int:
    """Returns the number of runs, warm-up included."""
    per_round = sum(c.takes(batch) for c in contest.contestants for batch in config.batches)
    return per_round * (1 + config.rounds * len(contest.texts))


def measure(
    config: DecodeBenchConfig, contest: Contest, progress: Callable[[str], None] = lambda what: None
) -> dict[str, Any]:
    """Runs everything; returns plain data, ready for JSON."""
    cases = [Case(batch, text) for batch in config.batches for text in contest.texts]
    prompts = {
        case: prompts_of(case.text, contest.model, number=case.batch, tokens=config.prompt_tokens) for case in cases
    }
    for batch in config.batches:
        for contestant in contest.contestants:
            if contestant.takes(batch):
                progress(f"warming up: {contestant.name}, batch {batch}")
                contestant.run(prompts[Case(batch, contest.texts[0])], min(WARM_UP_TOKENS, config.tokens))
    runs: dict[Case, dict[str, list[Run]]] = {case: {} for case in cases}
    for number in range(config.rounds):
        for case in cases:
            for contestant in contest.contestants[:: -1 if number % 2 else 1]:
                if contestant.takes(case.batch):
                    progress(f"round {number + 1}: {contestant.name}, batch {case.batch}, {case.text} text")
                    with _no_garbage_collection():
                        run = contestant.run(prompts[case], config.tokens)
                    runs[case].setdefault(contestant.name, []).append(run)
    return {
        "config": asdict(config) | {"num_threads": contest.plain.config.num_threads, "texts": contest.texts},
        "model": contest.model.name,
        "dtype": str(contest.model.dtype).removeprefix("torch."),
        "backend": contest.plain.runner.backend.name,
        "cases": [_case_report(config, contest, case, prompts[case], runs[case]) for case in cases],
        "draft_kv_share": {c.name: c.draft_kv_ratio for c in contest.contestants if isinstance(c, OutriderContestant)},
        "cost_curves": {
            c.name: c.cost_curves for c in contest.contestants if isinstance(c, OutriderContestant) and c.chooses
        },
        "memory_mb": contest.memory_mb | {"peak": peak_mb()},
        "note": contest.note,
    }


class _no_garbage_collection:  # noqa: N801 - used as a statement
    def __enter__(self) -> None:
        gc.collect()
        self._was_on = gc.isenabled()
        gc.disable()

    def __exit__(self, *_error: object) -> None:
        if self._was_on:
            gc.enable()


def _case_report(
    config: DecodeBenchConfig, contest: Contest, case: Case, prompts: Sequence[list[int]], runs: dict[str, list[Run]]
) -> dict[str, Any]:
    prompt_tokens = sum(map(len, prompts))
    expected = runs[REFERENCE if REFERENCE in runs else PLAIN][0].tokens
    report: dict[str, Any] = {"batch": case.batch, "text": case.text, "contestants": {}}
    for name, each in runs.items():
        lengths = [run.acceptance_length for run in each if run.acceptance_length is not None]
        entry: dict[str, Any] = {
            "tokens_per_s": median(run.tokens_per_s for run in each),
            "whole_tokens_per_s": median(run.whole_tokens_per_s for run in each),
            "best_tokens_per_s": max(run.tokens_per_s for run in each),
            "tokens_per_s_by_round": [run.tokens_per_s for run in each],
            "prompt_ms": 1000 * median(run.prompt_s for run in each),
            "prompt_tokens_per_s": prompt_tokens / median(run.prompt_s for run in each),
            "step_ms": 1000 * median(step for run in each for step in run.steps_s),
            "tokens_per_step": median(run.tokens_per_step for run in each),
            "acceptance_length": median(lengths) if lengths else None,
            "ratio": _ratio(each, runs[REFERENCE]).ratio if REFERENCE in runs else None,
            "ratio_to_plain": _ratio(each, runs[PLAIN]).ratio,
        }
        entry |= _agreement(contest.plain, prompts, expected, each, config.params)
        report["contestants"][name] = entry
    report["auto"] = _choices(contest, runs)
    return report


def _ratio(head: Sequence[Run], base: Sequence[Run]) -> Measure:
    """Returns the speeds of two contestants in the same rounds, as pairs."""
    pairs = [(one.tokens_per_s, other.tokens_per_s) for one, other in zip(base, head, strict=True)]
    return Measure("decoding", "tokens/s", more_is_better=True, pairs=pairs)


def _choices(contest: Contest, runs: dict[str, list[Run]]) -> list[dict[str, Any]]:
    """Returns for each drafter whose engine chooses the number of drafts what the choice is worth."""
    drafting = [each for each in contest.contestants if isinstance(each, OutriderContestant) and each.method]
    choices = []
    for auto in (each for each in drafting if each.chooses):
        fixed = [each.name for each in drafting if each.method == auto.method and not each.chooses]
        best = max(fixed, key=lambda name: median(run.tokens_per_s for run in runs[name]), default=None)
        choices.append(
            {
                "contestant": auto.name,
                "to_plain": _ratio(runs[auto.name], runs[PLAIN]).as_json(),
                "best_fixed": best,
                "to_best_fixed": None if best is None else _ratio(runs[auto.name], runs[best]).as_json(),
            }
        )
    return choices


def _agreement(
    plain: Engine,
    prompts: Sequence[list[int]],
    expected: Sequence[list[int]],
    runs: Sequence[Run],
    params: SamplingParams,
) -> dict[str, int]:
    """Counts the texts that differ from the expected ones, and those of them that first differ at a proven tie."""
    differ = ties = 0
    for number, (prompt, right) in enumerate(zip(prompts, expected, strict=True)):
        place = next(_places(right, [run.tokens[number] for run in runs]), None)
        if place is None:
            continue
        differ += 1
        at, other = place
        if at < len(right) and at < len(other):
            ties += examine(plain, [*prompt, *right[:at]], (right[at], other[at]), params).tied
    return {"texts": len(prompts), "texts_that_differ": differ, "at_a_proven_tie": ties}


def _places(right: list[int], others: Sequence[list[int]]) -> Iterator[tuple[int, list[int]]]:
    for other in others:
        place = first_difference(right, other)
        if place is not None:
            yield place, other
