"""The openings of conversations: a prompt, its first words, or a question invented by the target."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from outrider.errors import ConfigError
from outrider.tools.training.generate import Opening
from outrider.tools.training.prompts import ChatText, PromptLine

# Largest part of a stream that the prompt may take, so that there is room for an answer.
PROMPT_FRACTION = 0.75
FIRST_WORDS = 8
"""Most words of a prompt that are given when the target completes the question."""
PROBE = ("first question", "an answer", "second question")


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnTexts:
    """Text that a chat template puts around turns."""

    before: str
    """Text before the first question."""
    to_question: str
    """Text between an answer's end token and the next question."""
    to_answer: str
    """Text between a question and its answer."""
    end: str
    """The end token, which the previous turn already ended with."""


def turn_texts(text: ChatText) -> TurnTexts:
    """Finds the texts by rendering a sample conversation with the chat template."""
    question, answer, second = PROBE
    first = [{"role": "user", "content": question}]
    both = [*first, {"role": "assistant", "content": answer}, {"role": "user", "content": second}]
    opening = text.template.render(first, add_generation_prompt=True)
    whole = text.template.render(both, add_generation_prompt=True)
    rest = whole.removeprefix(opening)
    to_question, found, to_answer = rest.partition(second)
    to_question = to_question.removeprefix(answer)
    end = text.tokenizer.token(text.eos_ids[0]) or ""
    if not found or rest == whole or not to_question.startswith(end) or not to_answer.startswith(end):
        raise ConfigError("the chat template does not render turns one after the other; write single answers instead")
    return TurnTexts(
        before=opening.partition(question)[0], to_question=to_question.removeprefix(end), to_answer=to_answer, end=end
    )


def ids_of(text: ChatText, part: str) -> list[int]:
    return text.tokenizer.encode(part, add_special_tokens=False)


class Openings:
    """The openings of a corpus in order; every prompt comes once before any is repeated.

    All random choices are made at the start, which is fast. Token ids are made on demand, because encoding half a
    million conversations is not.
    """

    def __init__(
        self,
        text: ChatText,
        prompts: Sequence[PromptLine],
        *,
        length: int,
        count: int | None,
        temperatures: Sequence[tuple[float, float]],
        invented: float,
        begun: float,
        seed: int,
    ) -> None:
        """`invented` and `begun` are fractions of the openings; see CorpusSettings for the rest."""
        self._text, self._texts, self._longest = text, turn_texts(text), int(length * PROMPT_FRACTION)
        random = np.random.Generator(np.random.PCG64(seed))
        self._prompts = [one for one in map(self._whole, prompts) if len(one.ids) <= self._longest]
        if not self._prompts:
            raise ConfigError(f"every prompt is too long for streams of {length} tokens; raise --length")
        wanted = count or len(self._prompts)
        rounds = -(-wanted // len(self._prompts))
        self._order = np.concatenate([random.permutation(len(self._prompts)) for _ in range(rounds)])[:wanted]
        values, fractions = zip(*temperatures, strict=True)
        self._temperatures = random.choice(values, size=wanted, p=np.array(fractions) / sum(fractions))
        kind = random.random(wanted)
        self._invents, self._begins = kind < invented, kind >= 1.0 - begun
        self._own = Opening(ids=ids_of(text, self._texts.before), invents=True)
        if invented and not self._own.ids:
            raise ConfigError(
                "the chat template writes nothing before a question, so none can be invented; set --invented 0"
            )
        # A prompt that gives way to an invented question is used by the next conversation.
        self._turn = np.cumsum(~self._invents & ~self._begins) - 1
        self._worded = [line.turns[0].lstrip() for line in prompts if line.turns[0].strip()]
        if begun and not self._worded:
            raise ConfigError("no prompt has a word that a question could begin with; set --begun 0")
        self._begun_with = random.integers(max(1, len(self._worded)), size=wanted)
        self._portion = random.random(wanted)

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Opening]:
        return map(self._opening, range(len(self)))

    def part(self, start: int, stop: int) -> list[Opening]:
        return [self._opening(number) for number in range(start, min(stop, len(self)))]

    def _opening(self, number: int) -> Opening:
        if self._invents[number]:
            one = self._own
        elif self._begins[number]:
            words = _first_words(self._worded[self._begun_with[number]], self._portion[number])
            # In languages without spaces the first word may be a whole page.
            one = Opening(ids=ids_of(self._text, self._texts.before + words)[: self._longest], invents=True)
        else:
            one = self._prompts[self._order[self._turn[number]]]
        return replace(one, temperature=float(self._temperatures[number]))

    def _whole(self, line: PromptLine) -> Opening:
        texts = self._texts
        return Opening(
            ids=self._text.encode([{"role": "user", "content": line.turns[0]}]),
            turns=[ids_of(self._text, f"{texts.to_question}{turn}{texts.to_answer}") for turn in line.turns[1:]],
        )


def _first_words(prompt: str, portion: float) -> str:
    """Returns the fraction `portion` of the words to give: at most half of the prompt, the target finds the rest."""
    ends = [word.end() for word in islice(re.finditer(r"\S+", prompt), 2 * FIRST_WORDS)]
    return prompt[: ends[int(portion * max(1, len(ends) // 2))]]
