"""How conversations begin: with a prompt, with its first words, or with a question of the target's own."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from outrider.errors import ConfigError
from outrider.training.generate import Opening
from outrider.training.prompts import ChatText, PromptLine

# A stream must have room for an answer worth learning from.
PROMPT_SHARE = 0.75
FIRST_WORDS = 8
"""Of a prompt, at most, where the target finishes the question."""
PROBE = ("first question", "an answer", "second question")


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnTexts:
    """What a chat template writes around turns."""

    before: str
    """In front of the first question."""
    to_question: str
    """From behind an answer's end token to the next question, and next from behind that question to the answer."""
    to_answer: str
    end: str
    """The end token, which the turn before has already brought."""


def turn_texts(text: ChatText) -> TurnTexts:
    """Read off the chat template with a conversation of our own."""
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
        raise ConfigError("the chat template does not lay turns out one behind the other; write single answers instead")
    return TurnTexts(
        before=opening.partition(question)[0], to_question=to_question.removeprefix(end), to_answer=to_answer, end=end
    )


def ids_of(text: ChatText, part: str) -> list[int]:
    return text.tokenizer.encode(part, add_special_tokens=False)


class Openings:
    """In the order in which they are written; every prompt comes before any comes again.

    What chance decides is decided at once, for so many numbers are drawn in no time; token ids are made when they are
    asked for, since nobody should wait for those of half a million conversations.
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
        """`invented` and `begun` are shares of them; the other settings are those of a corpus."""
        self._text, self._texts, self._longest = text, turn_texts(text), int(length * PROMPT_SHARE)
        random = np.random.Generator(np.random.PCG64(seed))
        self._prompts = [one for one in map(self._whole, prompts) if len(one.ids) <= self._longest]
        if not self._prompts:
            raise ConfigError(f"every prompt is too long for streams of {length} tokens")
        wanted = count or len(self._prompts)
        rounds = -(-wanted // len(self._prompts))
        self._order = np.concatenate([random.permutation(len(self._prompts)) for _ in range(rounds)])[:wanted]
        heats, shares = zip(*temperatures, strict=True)
        self._heats = random.choice(heats, size=wanted, p=np.array(shares) / sum(shares))
        kind = random.random(wanted)
        self._invents, self._begins = kind < invented, kind >= 1.0 - begun
        self._own = Opening(ids=ids_of(text, self._texts.before), invents=True)
        if invented and not self._own.ids:
            raise ConfigError("the chat template writes nothing in front of a question, so none can be invented")
        # Prompts that another question stands in for are not lost: the next conversation has them.
        self._turn = np.cumsum(~self._invents & ~self._begins) - 1
        self._worded = [line.turns[0].lstrip() for line in prompts if line.turns[0].strip()]
        if begun and not self._worded:
            raise ConfigError("no prompt has a word that a question could begin with")
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
            said = _first_words(self._worded[self._begun_with[number]], self._portion[number])
            # Where nothing is put between words, the first one may be a whole page.
            one = Opening(ids=ids_of(self._text, self._texts.before + said)[: self._longest], invents=True)
        else:
            one = self._prompts[self._order[self._turn[number]]]
        return replace(one, temperature=float(self._heats[number]))

    def _whole(self, line: PromptLine) -> Opening:
        texts = self._texts
        return Opening(
            ids=self._text.encode([{"role": "user", "content": line.turns[0]}]),
            turns=[ids_of(self._text, f"{texts.to_question}{turn}{texts.to_answer}") for turn in line.turns[1:]],
        )


def _first_words(prompt: str, portion: float) -> str:
    """At most half of it: the rest is for the target to find. `portion`, from 0 to 1, says how much of that."""
    ends = [word.end() for word in islice(re.finditer(r"\S+", prompt), 2 * FIRST_WORDS)]
    return prompt[: ends[int(portion * max(1, len(ends) // 2))]]
