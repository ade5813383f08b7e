"""Does speculation change the text? Runs prompts without and with it, greedy and seeded, and compares tokens.

plain     prompt ─▶ t0 t1 t2 t3 t4 …
drafter   prompt ─▶ t0 t1 t2 x3            the first difference must be a proven tie (engine/ties.py);
                    t0 t1 t2 t3 ─▶ t4 …    then the drafter continues from the plain text, to the end
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, islice, zip_longest
from typing import Any

from outrider.api.llm import LLM
from outrider.engine.engine import Engine
from outrider.engine.ties import examine, first_difference
from outrider.errors import RequestError
from outrider.sampling import SamplingParams

MOST_TIES = 16
"""Most ties in one sequence; one that differs more often is a failure, because ties are rare."""
SEED = 20_240

PROMPTS = (
    "red, green, blue, red, green, blue, red, green,",
    "The tide comes in twice a day because",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "Question: Why is the sky blue?\nAnswer:",
    '[{"name": "Ada", "born": 1815}, {"name": "Alan", "born": 1912}, {"name":',
    "Once upon a time there was a horse that always rode ahead of",
    "1. Take the bread.\n2. Cut the bread.\n3. Take the butter.\n4.",
    "Dear Sir or Madam,\n\nI am writing to you because",
)


def check_prompts(number: int) -> list[str]:
    """Returns `number` prompts: those above, then the same with other beginnings."""
    endless = (f"{'' if not turn else f'Part {turn + 1}. '}{prompt}" for turn in count() for prompt in PROMPTS)
    return list(islice(endless, number))


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """A place where a run with a drafter differs from the plain text."""

    prompt: str
    place: int
    plain: int
    drafted: int | None
    """Token of the run with the drafter; None if that run had ended."""
    gap: float | None
    tolerance: float | None

    @property
    def tied(self) -> bool:
        return self.gap is not None and self.tolerance is not None and self.gap < self.tolerance

    def __str__(self) -> str:
        gap = "" if self.gap is None else f", {self.gap:.2g} apart"
        return f"{self.prompt!r}, token {self.place}: {self.plain} without drafts, {self.drafted} with drafts{gap}"


@dataclass(kw_only=True, slots=True)
class Comparison:
    """Results of one drafter with one way to sample."""

    drafter: str
    sampling: str
    prompts: int = 0
    tokens: int = 0
    exact: int = 0
    """Number of sequences that are equal token for token."""
    drafts: int = 0
    accepted: int = 0
    acceptance_length: float = 1.0
    ties: list[Difference] = field(default_factory=list)
    failures: list[Difference] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return {
            "drafter": self.drafter,
            "sampling": self.sampling,
            "prompts": self.prompts,
            "tokens": self.tokens,
            "exact": self.exact,
            "proven_ties": len(self.ties),
            "failures": len(self.failures),
            "draft_tokens": self.drafts,
            "accepted_tokens": self.accepted,
            "mean_acceptance_length": self.acceptance_length,
            "differences": [str(difference) for difference in (*self.failures, *self.ties)],
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckPlan:
    prompts: Sequence[str]
    max_tokens: int

    @property
    def samplings(self) -> dict[str, SamplingParams]:
        # Without top-k and the like, whose thresholds would add places for ties.
        greedy = SamplingParams(temperature=0.0, max_tokens=self.max_tokens, ignore_eos=True)
        return {"greedy": greedy, "seeded": replace(greedy, temperature=0.8, seed=SEED)}


def compare_all(
    plain: Engine,
    drafters: Sequence[tuple[str, Callable[[], Engine]]],
    plan: CheckPlan,
    progress: Callable[[str], None] = lambda what: None,
) -> Iterator[Comparison]:
    """Yields one comparison for each drafter and way to sample. Engines with drafters are built one at a time."""
    prompts = [list(LLM.over(plain).encode(prompt)[1]) for prompt in plan.prompts]
    expected: dict[str, list[list[int]]] = {}
    for name, params in plan.samplings.items():
        progress(f"plain, {name}")
        expected[name] = _run(plain, prompts, params)
    for drafter, build in drafters:
        engine = build()
        for name, params in plan.samplings.items():
            progress(f"{drafter}, {name}")
            result = Comparison(drafter=drafter, sampling=name)
            yield _compare(plain, engine, plan, prompts, params, expected[name], result)


def _run(engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[list[int]]:
    """Returns the tokens of each text. Where the engine chooses how much it drafts, it may find that drafts do not pay
    just now, so that every second text drafts as much as it can."""
    llm, all_prompts = LLM.over(engine), list(prompts)
    if engine.pacer is None:
        outputs = llm.generate(all_prompts, params)
    else:
        drafting = llm.generate(all_prompts[::2], params, num_speculative_tokens=engine.k)
        choosing = llm.generate(all_prompts[1::2], params)
        outputs = [output for pair in zip_longest(drafting, choosing) for output in pair if output is not None]
    for output in outputs:
        if output.error is not None:
            raise RequestError(output.error)
    return [output.outputs[0].token_ids for output in outputs]


def _compare(
    plain: Engine,
    engine: Engine,
    plan: CheckPlan,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    expected: Sequence[list[int]],
    result: Comparison,
) -> Comparison:
    before = replace(engine.speculation)
    found = _run(engine, prompts, params)
    for text, prompt, right, drafted in zip(plan.prompts, prompts, expected, found, strict=True):
        result.prompts += 1
        result.tokens += len(right)
        clean = True
        for difference in _differences(plain, engine, text, prompt, params, right, drafted):
            clean = False
            (result.ties if difference.tied else result.failures).append(difference)
        result.exact += clean
    counts = engine.speculation
    result.drafts = counts.draft_tokens - before.draft_tokens
    result.accepted = counts.accepted_tokens - before.accepted_tokens
    steps = counts.drafts - before.drafts
    result.acceptance_length = 1 + result.accepted / steps if steps else 1.0
    return result


def _differences(
    plain: Engine,
    engine: Engine,
    text: str,
    prompt: list[int],
    params: SamplingParams,
    right: list[int],
    drafted: list[int],
) -> Iterator[Difference]:
    """Yields all places where the texts differ. After a tie the drafter continues from the plain text."""
    done = 0
    for _ in range(MOST_TIES):
        place = first_difference(right[done:], drafted)
        if place is None:
            return
        difference = _examine(plain, text, prompt, params, right, done + place, drafted[place : place + 1])
        yield difference
        done += place + 1
        if not difference.tied or done >= len(right):
            return
        rest = replace(params, max_tokens=len(right) - done)
        (drafted,) = _run(engine, [[*prompt, *right[:done]]], rest)
    yield Difference(prompt=text, place=done, plain=right[done], drafted=None, gap=None, tolerance=None)


def _examine(
    plain: Engine,
    text: str,
    prompt: list[int],
    params: SamplingParams,
    right: list[int],
    place: int,
    drafted: list[int],
) -> Difference:
    if place >= len(right) or not drafted:
        # One of the texts ended: no tie makes a text shorter.
        kept = right[place] if place < len(right) else -1
        return Difference(
            prompt=text, place=place, plain=kept, drafted=drafted[0] if drafted else None, gap=None, tolerance=None
        )
    parting = examine(plain, [*prompt, *right[:place]], (right[place], drafted[0]), params)
    return Difference(
        prompt=text,
        place=place,
        plain=right[place],
        drafted=drafted[0],
        gap=parting.gap,
        tolerance=parting.tolerance,
    )
