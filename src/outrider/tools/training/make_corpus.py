"""Corpora written by the target: conversations to train on, and greedy answers to measure with."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from outrider.errors import ConfigError
from outrider.tools.training.corpus import NOTE_FILE, CorpusNote, Streams, write_note, write_shard
from outrider.tools.training.evaluate import CATEGORIES_FILE
from outrider.tools.training.generate import Conversation, Lockstep, Opening
from outrider.tools.training.openings import Openings, ids_of, turn_texts
from outrider.tools.training.prompts import ChatText, PromptLine
from outrider.tools.training.settings import SEEDS
from outrider.tools.training.target import Target, device_name

Report = Callable[[str], None]
PROGRESS_INTERVAL_S = 15.0


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusSettings:
    output: Path
    length: int = 768
    streams: int = 2048
    """Number of conversations that are written at once."""
    count: int | None = None
    """Number of conversations; None for one per prompt."""
    temperatures: tuple[tuple[float, float], ...] = ((0.0, 0.8), (0.6, 0.2))
    """Pairs of a temperature and its fraction of the conversations."""
    question_temperature: float = 0.8
    invented: float = 0.0
    """Fraction of the conversations that begin with a question invented by the target instead of a prompt."""
    begun: float = 0.0
    """Fraction of the conversations that begin with a prompt's first words, which the target completes: any number of
    questions like the prompts."""
    seed: int = 0
    minutes: float | None = None
    """Time after which no further batch is started."""
    source: str | None = None
    """Where the prompts come from, stored with the corpus for the model card."""
    licence: str | None = None
    """Licence of the prompts, stored with the corpus for the model card."""

    def __post_init__(self) -> None:
        for name in ("length", "streams", "count", "minutes"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name} must be more than 0, got {value}")
        if not self.temperatures or any(
            not (0 <= temperature < math.inf and 0 < fraction < math.inf) for temperature, fraction in self.temperatures
        ):
            raise ConfigError("temperatures are pairs of a temperature of at least 0 and a fraction of more than 0")
        if not 0 <= self.question_temperature < math.inf:
            raise ConfigError(f"question_temperature must be at least 0, got {self.question_temperature}")
        if not 0 <= self.seed < SEEDS:
            raise ConfigError(f"seed must be at least 0 and less than {SEEDS:,}, got {self.seed:,}")
        for name in ("invented", "begun"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ConfigError(f"{name} must be a fraction between 0 and 1, got {getattr(self, name)}")
        if self.invented + self.begun > 1.0:
            raise ConfigError(f"invented and begun must not exceed 1 together, got {self.invented} and {self.begun}")


def conversation_of(text: ChatText, *, question_temperature: float, single: bool) -> Conversation:
    """Returns the token ids between turns."""
    if not text.eos_ids:
        raise ConfigError("the model has no end token, so its answers would not end")
    end = text.eos_ids[0]
    if single:
        return Conversation(end=end, to_question=(), to_answer=(), single=True)
    texts = turn_texts(text)
    return Conversation(
        end=end,
        to_question=tuple(ids_of(text, texts.to_question)),
        to_answer=tuple(ids_of(text, texts.to_answer.removeprefix(texts.end))),
        question_temperature=question_temperature,
    )


def openings_of(settings: CorpusSettings, text: ChatText, prompts: list[PromptLine]) -> Openings:
    return Openings(
        text,
        prompts,
        length=settings.length,
        count=settings.count,
        temperatures=settings.temperatures,
        invented=settings.invented,
        begun=settings.begun,
        seed=settings.seed,
    )


def write_conversations(
    settings: CorpusSettings, target: Target, text: ChatText, prompts: list[PromptLine], report: Report
) -> int:
    """Writes conversations until all openings are used or time is up; returns the number of streams."""
    conversation = conversation_of(text, question_temperature=settings.question_temperature, single=False)
    openings = openings_of(settings, text, prompts)
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
    progress = _Progress(lockstep, report)
    began = time.monotonic()
    written = 0
    while written < len(openings):
        part = openings.part(written, written + lockstep.streams)
        real = len(part)
        streams = lockstep.run(part + part[:1] * (lockstep.streams - real), progress=progress)[slice(0, real)]
        path = write_shard(settings.output, streams)
        written += real
        seconds = time.monotonic() - began
        report(
            f"{path.name}: {written:,} streams, {written * settings.length / seconds:,.0f} tokens/s, "
            f"{streams.roles.mean():.0%} answers, {len(openings) - written:,} left"
        )
        if settings.minutes is not None and seconds > settings.minutes * 60:
            report("time is up")
            break
    return written


class _Progress:
    """Reports a line now and then while a batch is written, which takes minutes on a CPU."""

    def __init__(self, lockstep: Lockstep, report: Report) -> None:
        self._lockstep, self._report = lockstep, report
        device = device_name(lockstep.tokens.device)
        report(f"writing streams of {lockstep.length:,} tokens on {device}: {lockstep.streams:,} at once")
        self._last_report_s = time.monotonic()

    def __call__(self, position: int) -> None:
        now = time.monotonic()
        if now - self._last_report_s > PROGRESS_INTERVAL_S:
            self._last_report_s = now
            self._report(f"token {position:,} of {self._lockstep.length:,}")


def write_greedy_answers(
    settings: CorpusSettings, target: Target, text: ChatText, prompts: list[PromptLine], report: Report, *, tokens: int
) -> int:
    """Writes greedy answers of at most `tokens` tokens to every turn of every prompt, with their categories."""
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
        streams = lockstep.run([Opening(ids=ids) for _, _, ids in room], progress=_Progress(lockstep, report))
        roles = streams.roles.copy()
        for number, (line, history, ids) in enumerate(room):
            roles[number, len(ids) + tokens :] = False
            answer = streams.tokens[number][roles[number]].tolist()
            if turn < len(line.turns):
                answered = text.tokenizer.decode([one for one in answer if one != conversation.end])
                more = [{"role": "assistant", "content": answered}, {"role": "user", "content": line.turns[turn]}]
                histories.append((line, [*history, *more]))
        done.append(Streams(tokens=streams.tokens, roles=roles))
        categories += [line.category for line, _, _ in room]
    if not done:
        raise ConfigError(f"no prompt leaves room for {tokens} tokens in streams of {settings.length}; raise --length")
    everything = Streams(
        tokens=np.concatenate([part.tokens for part in done]), roles=np.concatenate([part.roles for part in done])
    )
    write_shard(settings.output, everything)
    (settings.output / CATEGORIES_FILE).write_text(json.dumps(categories), encoding="utf-8")
    report(f"{len(everything)} greedy answers, {int(everything.roles.sum()):,} tokens; {left_out} left out as too long")
    return len(everything)
