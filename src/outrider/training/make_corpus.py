"""Corpora written by the target: conversations to train on, and greedy answers to measure with."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from outrider.errors import ConfigError
from outrider.training.corpus import NOTE_FILE, CorpusNote, Streams, write_note, write_shard
from outrider.training.evaluate import CATEGORIES_FILE
from outrider.training.generate import Conversation, Lockstep, generate_corpus
from outrider.training.prompts import ChatText, PromptLine
from outrider.training.target import Target

Report = Callable[[str], None]
# A stream must have room for an answer worth learning from.
PROMPT_SHARE = 0.75
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
        if not self.temperatures or any(heat < 0 or share <= 0 for heat, share in self.temperatures):
            raise ConfigError("temperatures are pairs of a temperature of at least 0 and a share of more than 0")


def conversation_of(text: ChatText, *, question_temperature: float, single: bool) -> Conversation:
    """The tokens between turns, read off the chat template with a conversation of our own."""
    if not text.eos_ids:
        raise ConfigError("the model has no end token, so its answers would not end")
    end = text.eos_ids[0]
    if single:
        return Conversation(end=end, to_question=(), to_answer=(), single=True)
    question, answer, second = PROBE
    first = [{"role": "user", "content": question}]
    both = [*first, {"role": "assistant", "content": answer}, {"role": "user", "content": second}]
    opening = text.template.render(first, add_generation_prompt=True)
    whole = text.template.render(both, add_generation_prompt=True)
    rest = whole.removeprefix(opening)
    to_question, found, to_answer = rest.partition(second)
    to_question = to_question.removeprefix(answer)
    end_text = text.tokenizer.token(end) or ""
    if not found or rest == whole or not to_question.startswith(end_text) or not to_answer.startswith(end_text):
        raise ConfigError("the chat template does not lay turns out one behind the other; write single answers instead")

    def bridge(part: str) -> tuple[int, ...]:
        return tuple(text.tokenizer.encode(part.removeprefix(end_text), add_special_tokens=False))

    return Conversation(
        end=end,
        to_question=bridge(to_question),
        to_answer=bridge(to_answer),
        question_temperature=question_temperature,
    )


def write_conversations(
    settings: CorpusSettings, target: Target, text: ChatText, prompts: list[PromptLine], report: Report
) -> int:
    """How many streams were written."""
    conversation = conversation_of(text, question_temperature=settings.question_temperature, single=False)
    random = np.random.Generator(np.random.PCG64(settings.seed))
    encoded = [text.encode([{"role": "user", "content": line.turns[0]}]) for line in prompts]
    encoded = [ids for ids in encoded if len(ids) <= settings.length * PROMPT_SHARE]
    if not encoded:
        raise ConfigError(f"every prompt is too long for streams of {settings.length} tokens")
    wanted = settings.count or len(encoded)
    order = np.concatenate([random.permutation(len(encoded)) for _ in range(-(-wanted // len(encoded)))])[:wanted]
    heats, shares = zip(*settings.temperatures, strict=True)
    chosen = random.choice(heats, size=wanted, p=np.array(shares) / sum(shares))
    if settings.source or settings.licence or not (settings.output / NOTE_FILE).exists():
        note = CorpusNote(source=settings.source, licence=settings.licence, written_by=target.name)
        write_note(settings.output, note)
    lockstep = Lockstep(
        target,
        streams=min(settings.streams, wanted),
        length=settings.length,
        conversation=conversation,
        seed=settings.seed,
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
        generate_corpus(lockstep, [encoded[i] for i in order], [float(heat) for heat in chosen], each=each)
    except _TimeIsUp:
        report("time is up")
    return written


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
        streams = lockstep.run([ids for _, _, ids in room], [0.0] * len(room))
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
