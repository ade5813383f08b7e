"""Corpora written by the target: conversations to train on, and greedy answers to measure with."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np

from outrider.errors import ConfigError
from outrider.training.corpus import NOTE_FILE, CorpusNote, Streams, write_note, write_shard
from outrider.training.evaluate import CATEGORIES_FILE
from outrider.training.generate import Conversation, Lockstep, Opening, generate_corpus
from outrider.training.prompts import ChatText, PromptLine
from outrider.training.settings import SEEDS
from outrider.training.target import Target, device_name

Report = Callable[[str], None]
# A stream must have room for an answer worth learning from.
PROMPT_SHARE = 0.75
PULSE_S = 15.0
FIRST_WORDS = 8
"""Of a prompt, at most, where the target finishes the question."""
PROBE = ("first question", "an answer", "second question")


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusSettings:
    output: Path
    length: int = 768
    streams: int = 2048
    """Conversations that are written at once."""
    count: int | None = None
    """Of conversations; None: one for each prompt."""
    temperatures: tuple[tuple[float, float], ...] = ((0.0, 0.8), (0.6, 0.2))
    """(temperature, share of the conversations)"""
    question_temperature: float = 0.8
    invented: float = 0.0
    """Share of the conversations that begin with a question of the target's own instead of a prompt."""
    begun: float = 0.0
    """Share of those that begin with a prompt's first words, which the target finishes in its own way: questions of
    the prompts' kind, as many as one likes."""
    seed: int = 0
    minutes: float | None = None
    """Start no further batch after that."""
    source: str | None = None
    """Where the prompts come from, and next their licence: kept beside the corpus for the model card."""
    licence: str | None = None

    def __post_init__(self) -> None:
        for name in ("length", "streams", "count", "minutes"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name} must be more than 0, got {value}")
        if not self.temperatures or any(
            not (0 <= heat < math.inf and 0 < share < math.inf) for heat, share in self.temperatures
        ):
            raise ConfigError("temperatures are pairs of a temperature of at least 0 and a share of more than 0")
        if not 0 <= self.question_temperature < math.inf:
            raise ConfigError(f"question_temperature must be at least 0, got {self.question_temperature}")
        if not 0 <= self.seed < SEEDS:
            raise ConfigError(f"seed must be at least 0 and less than {SEEDS:,}, got {self.seed:,}")
        for name in ("invented", "begun"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ConfigError(f"{name} is a share between 0 and 1, got {getattr(self, name)}")
        if self.invented + self.begun > 1.0:
            raise ConfigError(f"invented and begun are shares of one whole, got {self.invented} and {self.begun}")


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


def conversation_of(text: ChatText, *, question_temperature: float, single: bool) -> Conversation:
    """The tokens between turns."""
    if not text.eos_ids:
        raise ConfigError("the model has no end token, so its answers would not end")
    end = text.eos_ids[0]
    if single:
        return Conversation(end=end, to_question=(), to_answer=(), single=True)
    texts = turn_texts(text)
    return Conversation(
        end=end,
        to_question=tuple(_ids(text, texts.to_question)),
        to_answer=tuple(_ids(text, texts.to_answer.removeprefix(texts.end))),
        question_temperature=question_temperature,
    )


def _ids(text: ChatText, part: str) -> list[int]:
    return text.tokenizer.encode(part, add_special_tokens=False)


def make_openings(settings: CorpusSettings, text: ChatText, prompts: list[PromptLine]) -> list[Opening]:
    """In the order in which they are written; every prompt comes before any comes again."""
    random = np.random.Generator(np.random.PCG64(settings.seed))
    texts = turn_texts(text)
    encoded = [
        Opening(
            ids=text.encode([{"role": "user", "content": line.turns[0]}]),
            turns=[_ids(text, f"{texts.to_question}{turn}{texts.to_answer}") for turn in line.turns[1:]],
        )
        for line in prompts
    ]
    encoded = [one for one in encoded if len(one.ids) <= settings.length * PROMPT_SHARE]
    if not encoded:
        raise ConfigError(f"every prompt is too long for streams of {settings.length} tokens")
    wanted = settings.count or len(encoded)
    order = np.concatenate([random.permutation(len(encoded)) for _ in range(-(-wanted // len(encoded)))])[:wanted]
    heats, shares = zip(*settings.temperatures, strict=True)
    chosen = random.choice(heats, size=wanted, p=np.array(shares) / sum(shares))
    kind = random.random(wanted)
    invents, begins = kind < settings.invented, kind >= 1.0 - settings.begun
    own = Opening(ids=_ids(text, texts.before), invents=True)
    if settings.invented and not own.ids:
        raise ConfigError("the chat template writes nothing in front of a question, so none can be invented")
    # Prompts that another question stands in for are not lost: the next conversation has them.
    turn = np.cumsum(~invents & ~begins) - 1

    worded = [line for line in prompts if line.turns[0].strip()]
    if settings.begun and not worded:
        raise ConfigError("no prompt has a word that a question could begin with")

    def opening(number: int) -> Opening:
        if invents[number]:
            return own
        if begins[number]:
            line = worded[int(random.integers(len(worded)))]
            ids = _ids(text, texts.before + _first_words(line.turns[0], random))
            # Where nothing is put between words, the first one may be a whole page.
            return Opening(ids=ids[: int(settings.length * PROMPT_SHARE)], invents=True)
        return encoded[int(order[turn[number]])]

    return [replace(opening(number), temperature=float(chosen[number])) for number in range(wanted)]


def _first_words(prompt: str, random: np.random.Generator) -> str:
    """At most half of it: the rest is for the target to find."""
    prompt = prompt.lstrip()
    ends = [word.end() for word in islice(re.finditer(r"\S+", prompt), 2 * FIRST_WORDS)]
    return prompt[: ends[int(random.integers(1, max(2, len(ends) // 2 + 1))) - 1]]


def write_conversations(
    settings: CorpusSettings, target: Target, text: ChatText, prompts: list[PromptLine], report: Report
) -> int:
    """How many streams were written."""
    conversation = conversation_of(text, question_temperature=settings.question_temperature, single=False)
    openings = make_openings(settings, text, prompts)
    if settings.source or settings.licence or not (settings.output / NOTE_FILE).exists():
        note = CorpusNote(source=settings.source, licence=settings.licence, written_by=target.name)
        write_note(settings.output, note)
    lockstep = Lockstep(
        target,
        streams=min(settings.streams, len(openings)),
        length=settings.length,
        conversation=conversation,
        seed=settings.seed,
        compiled=True,
    )
    began = time.monotonic()
    written = 0

    def each(streams: Streams, left: int) -> None:
        nonlocal written
        path = write_shard(settings.output, streams)
        written += len(streams)
        seconds = time.monotonic() - began
        report(
            f"{path.name}: {written:,} streams, {written * settings.length / seconds:,.0f} tokens/s, "
            f"{streams.roles.mean():.0%} answers, {left:,} left"
        )
        if settings.minutes is not None and seconds > settings.minutes * 60:
            raise _TimeIsUp

    try:
        generate_corpus(lockstep, openings, each=each, progress=_Pulse(lockstep, report))
    except _TimeIsUp:
        report("time is up")
    return written


class _Pulse:
    """A line now and then while a batch is written: on a CPU one takes minutes."""

    def __init__(self, lockstep: Lockstep, report: Report) -> None:
        self._lockstep, self._report = lockstep, report
        device = device_name(lockstep.tokens.device)
        report(f"writing streams of {lockstep.length:,} tokens on {device}: {lockstep.streams:,} at once")
        self._told = time.monotonic()

    def __call__(self, position: int) -> None:
        now = time.monotonic()
        if now - self._told > PULSE_S:
            self._told = now
            self._report(f"token {position:,} of {self._lockstep.length:,}")


class _TimeIsUp(Exception):
    pass


def write_greedy_answers(
    settings: CorpusSettings, target: Target, text: ChatText, prompts: list[PromptLine], report: Report, *, tokens: int
) -> int:
    """Greedy answers of at most `tokens` tokens to every turn of every prompt, with their categories."""
    conversation = conversation_of(text, question_temperature=0.0, single=True)
    histories = [(line, [{"role": "user", "content": line.turns[0]}]) for line in prompts]
    done: list[Streams] = []
    categories: list[str] = []
    left_out = 0
    turn = 0
    while histories:
        fitting = [(line, history, text.encode(history)) for line, history in histories]
        room = [(line, history, ids) for line, history, ids in fitting if len(ids) + tokens <= settings.length]
        left_out += len(fitting) - len(room)
        histories = []
        turn += 1
        if not room:
            break
        lockstep = Lockstep(
            target, streams=len(room), length=settings.length, conversation=conversation, seed=settings.seed
        )
        streams = lockstep.run([Opening(ids=ids) for _, _, ids in room], progress=_Pulse(lockstep, report))
        roles = streams.roles.copy()
        for number, (line, history, ids) in enumerate(room):
            roles[number, len(ids) + tokens :] = False
            answer = streams.tokens[number][roles[number]].tolist()
            if turn < len(line.turns):
                said = text.tokenizer.decode([one for one in answer if one != conversation.end])
                more = [{"role": "assistant", "content": said}, {"role": "user", "content": line.turns[turn]}]
                histories.append((line, [*history, *more]))
        done.append(Streams(tokens=streams.tokens, roles=roles))
        categories += [line.category for line, _, _ in room]
    if not done:
        raise ConfigError(f"no prompt leaves room for {tokens} tokens in streams of {settings.length}")
    everything = Streams(
        tokens=np.concatenate([part.tokens for part in done]), roles=np.concatenate([part.roles for part in done])
    )
    write_shard(settings.output, everything)
    (settings.output / CATEGORIES_FILE).write_text(json.dumps(categories), encoding="utf-8")
    report(f"{len(everything)} greedy answers, {int(everything.roles.sum()):,} tokens; {left_out} left out as too long")
    return len(everything)
