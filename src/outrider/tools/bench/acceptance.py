"""How many drafts a target accepts: chats from a file, greedy and sampled, by category.

    chat      turns in order, each after the model's own answers to those before it
    length    mean acceptance length: 1 + accepted drafts / steps that verified any
    accepted  per draft position: the fraction of steps with drafts in which the draft there was accepted

Chats run as a batch for speed. The requests of a step divide its rows, and a drafter loses its KV when pages run out,
so a large batch could shorten drafts. A chat is therefore started only when rows and pages suffice for all, and the
figures are those of chats that run alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from outrider.backends import Progress
from outrider.config import EngineConfig
from outrider.engine.build import build_engine
from outrider.engine.engine import Engine
from outrider.engine.outputs import RequestOutput, SpeculationCounts
from outrider.errors import ConfigError, ModelError, RequestError
from outrider.kv.checked import whole_number
from outrider.kv.sizing import worst_case_pages
from outrider.models.load import LoadedModel
from outrider.models.resolve import packaged_drafter
from outrider.sampling import SamplingParams
from outrider.tools.bench.copying import copied_ngrams
from outrider.tools.json_lines import json_objects

SEED = 20_260
TURNS_MAX = 1_000
"""Most turns of a chat: each has a seed of its own, and the seeds of different chats are this far apart."""
STEP_ROWS = 2_048
"""Rows of a step: enough for an ordinary prompt in one step."""
USUAL_DRAFTS = 8
"""Drafts per step to plan for if the configuration does not name a number."""
UNCATEGORISED = "without category"
EXPECTED = (
    'expected one object per line: {"category": "…", "turns": ["first question", "next question"]} or {"prompt": "…"}'
)


# ---- what is asked --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Chat:
    turns: tuple[str, ...]
    category: str | None
    """None for a chat that counts under "all" only."""
    number: int
    """Line number in the file; seeds derive from it, so they do not depend on which other chats run."""
    source: str
    """Where the chat comes from, for error messages."""


def read_chats(path: Path) -> list[Chat]:
    """Reads one JSON object per line; empty lines are skipped, malformed ones are refused."""
    try:
        # Some editors write a byte-order mark first.
        text = path.read_text(encoding="utf-8-sig")
    except OSError as problem:
        raise ConfigError(f"cannot read {path}: {problem.strerror or problem}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8 text; convert it first") from None
    return [_chat(f"{path}, line {number}", number, fields) for number, fields in json_objects(path, text, EXPECTED)]


def _chat(source: str, number: int, fields: dict[str, Any]) -> Chat:
    if "turns" in fields and "prompt" in fields:
        raise ConfigError(f'{source} has both "turns" and "prompt"; keep one of them')
    if "turns" not in fields and "prompt" not in fields:
        raise ConfigError(f'{source} has neither "turns" nor "prompt"; {EXPECTED}')
    turns = fields["turns"] if "turns" in fields else [fields["prompt"]]
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        name = "turns" if "turns" in fields else "prompt"
        raise ConfigError(f'{source}: "{name}" must hold text that is not empty; {EXPECTED}')
    if len(turns) > TURNS_MAX:
        raise ConfigError(f"{source} has {len(turns)} turns; split it, at most {TURNS_MAX} are allowed")
    category = fields.get("category")
    if category is not None and (not isinstance(category, str) or not category.strip()):
        raise ConfigError(f'{source}: "category" must be a name, got {category!r}; leave it out for none')
    for text in (*turns, category or ""):
        if not _is_unicode(text):
            raise ConfigError(
                f"{source} contains half a character (a lone surrogate), which cannot be encoded; replace it"
            )
    # The report names the total of all chats "all".
    return Chat(turns=tuple(turns), category=None if category == "all" else category, number=number, source=source)


def _is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def spread(chats: Sequence[Chat], limit: int | None) -> list[Chat]:
    """Returns at most `limit` chats of each category, evenly spread over the file and in its order."""
    if limit is None:
        return list(chats)
    by_category: dict[str | None, list[Chat]] = {}
    for chat in chats:
        by_category.setdefault(chat.category, []).append(chat)
    chosen = [
        members[place * len(members) // min(limit, len(members))]
        for members in by_category.values()
        for place in range(min(limit, len(members)))
    ]
    return sorted(chosen, key=lambda chat: chat.number)


# ---- what came of it ------------------------------------------------------------------------------------


@dataclass(slots=True)
class Tally:
    """Counts of one chat or of many."""

    prompts: int = 0
    turns: int = 0
    tokens: int = 0
    steps: int = 0
    """Target passes that sampled a token, those at the ends of prompts included."""
    cached_tokens: int = 0
    too_long: int = 0
    """Chats that ended early because the next turn did not fit into the context."""
    speculation: SpeculationCounts = field(default_factory=SpeculationCounts)
    answers: list[list[int]] = field(default_factory=list)
    """Token ids of every turn."""
    copied_ngrams: int = 0
    """4-grams of the answers that occur in their prompts."""
    ngrams: int = 0

    def take(self, output: RequestOutput) -> None:
        self.turns += 1
        self.tokens += len(output.outputs[0].token_ids)
        self.steps += output.metrics.steps
        self.cached_tokens += output.metrics.cached_tokens
        self.speculation.add(output.metrics.speculation)
        answer = output.outputs[0].token_ids
        self.answers.append(answer)
        copied, ngrams = copied_ngrams(output.prompt_token_ids, answer)
        self.copied_ngrams += copied
        self.ngrams += ngrams

    def add(self, other: Tally) -> None:
        for name in ("prompts", "turns", "tokens", "steps", "cached_tokens", "too_long", "copied_ngrams", "ngrams"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.speculation.add(other.speculation)
        self.answers += other.answers

    @property
    def length(self) -> float:
        return self.speculation.mean_acceptance_length

    @property
    def tokens_per_step(self) -> float:
        return self.tokens / self.steps if self.steps else 0.0

    def accepted_at(self, k: int) -> list[float]:
        """Returns for each draft position the fraction of steps with drafts that accepted it."""
        counts = self.speculation
        at = counts.accepted_at + [0] * (k - len(counts.accepted_at))
        return [number / counts.drafts if counts.drafts else 0.0 for number in at]

    def as_json(self, k: int) -> dict[str, Any]:
        counts = self.speculation
        return {
            "prompts": self.prompts,
            "turns": self.turns,
            "tokens": self.tokens,
            "steps": self.steps,
            "drafts": counts.drafts,
            "draft_tokens": counts.draft_tokens,
            "accepted_tokens": counts.accepted_tokens,
            "mean_acceptance_length": self.length,
            "tokens_per_step": self.tokens_per_step,
            "acceptance_rate": counts.acceptance_rate,
            "accepted_share": self.accepted_at(k),
            "too_long": self.too_long,
            "copied": self.copied_ngrams / self.ngrams if self.ngrams else 0.0,
        }


def total(tallies: Sequence[Tally]) -> Tally:
    everything = Tally()
    for tally in tallies:
        everything.add(tally)
    return everything


# ---- running chats --------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Conversation:
    chat: Chat
    tally: Tally = field(default_factory=lambda: Tally(prompts=1))
    messages: list[dict[str, str]] = field(default_factory=list)
    prompt: list[int] = field(default_factory=list)
    """Token ids up to where the model continues."""
    output: RequestOutput | None = None
    """Output of the running turn; None between turns."""

    @property
    def asked(self) -> int:
        """Number of turns asked so far."""
        return (len(self.messages) + 1) // 2

    @property
    def decoding(self) -> bool:
        """Whether its prompt has been computed."""
        return self.output is not None and bool(self.output.outputs[0].token_ids)

    @property
    def done(self) -> bool:
        return self.asked == len(self.chat.turns)


def run_chats(
    engine: Engine,
    chats: Sequence[Chat],
    params: SamplingParams,
    *,
    at_once: int,
    on_turns: Callable[[int], None] = lambda turns: None,
) -> list[Tally]:
    """Returns one tally per chat; `on_turns` is called with the number of turns that ended. The engine must be idle."""
    if engine.model.chat_template is None:
        raise ModelError(
            f"{engine.model.name} has no chat template, so it cannot hold a conversation; choose a chat model with "
            "--model"
        )
    return _ChatRun(engine, chats, params, at_once, on_turns).run()


class _ChatRun:
    def __init__(
        self,
        engine: Engine,
        chats: Sequence[Chat],
        params: SamplingParams,
        at_once: int,
        on_turns: Callable[[int], None],
    ) -> None:
        assert not engine.has_work
        self._engine, self._params, self._on_turns = engine, params, on_turns
        self._all = [_Conversation(chat) for chat in chats]
        self._waiting = deque(self._all)
        self._running: dict[str, _Conversation] = {}
        layout, rows = engine.scheduler.kv.layout, engine.config.max_num_batched_tokens
        self._layout = layout
        self._draft_rows = layout.footprint.draft_rows(engine.k)
        self._decode_rows = 1 + engine.k + self._draft_rows
        # An eighth of a step is kept for prompts.
        most_decoding = (rows - max(1 + layout.footprint.token_reach, rows // 8)) // self._decode_rows
        self._at_once = max(1, min(at_once, engine.config.max_num_seqs, most_decoding))

    def run(self) -> list[Tally]:
        engine = self._engine
        try:
            while self._waiting or self._running:
                self._start_next()
                for output in engine.step() if self._running else ():
                    if output.finished:
                        self._end_turn(output)
        finally:
            # An interrupted run leaves nothing behind.
            for name in self._running:
                engine.abort(name)
        return [conversation.tally for conversation in self._all]

    def _start_next(self) -> None:
        """Starts at most one turn, and only if all others keep the rows and pages that they would have alone."""
        while self._waiting:
            conversation = self._waiting[0]
            if not conversation.prompt:
                self._ask(conversation)
            if not self._fits(conversation):
                self._waiting.popleft()
                conversation.tally.too_long += 1
                self._on_turns(len(conversation.chat.turns) - conversation.asked + 1)
                continue
            if not self._running or self._has_room_for(conversation):
                self._waiting.popleft()
                self._start(conversation)
            return

    def _ask(self, conversation: _Conversation) -> None:
        conversation.messages.append({"role": "user", "content": conversation.chat.turns[conversation.asked]})
        model = self._engine.model
        assert model.chat_template is not None
        text = model.chat_template.render(conversation.messages, add_generation_prompt=True)
        conversation.prompt = model.tokenizer.encode(text, add_special_tokens=False)

    def _most_tokens(self, conversation: _Conversation) -> int:
        assert self._params.max_tokens is not None
        return len(conversation.prompt) + self._params.max_tokens

    def _pages(self, conversation: _Conversation) -> list[int]:
        kv, k = self._engine.scheduler.kv, self._engine.k
        return worst_case_pages(self._layout, kv.config, self._most_tokens(conversation), k, draft=True)

    def _fits(self, conversation: _Conversation) -> bool:
        """Whether the turn fits into the context and, alone, into the KV memory."""
        if self._most_tokens(conversation) > self._engine.max_model_len:
            return False
        arenas = self._engine.scheduler.kv.config.arena_pages
        return all(needed < pages for needed, pages in zip(self._pages(conversation), arenas, strict=True))

    def _has_room_for(self, conversation: _Conversation) -> bool:
        running = list(self._running.values())
        if len(running) >= self._at_once:
            return False
        if any(not other.decoding for other in running):
            return False  # a prompt is being computed
        rows = len(conversation.prompt) + self._draft_rows + len(running) * self._decode_rows
        if rows > self._engine.config.max_num_batched_tokens:
            return False
        held = zip(*(self._pages(each) for each in (*running, conversation)), strict=True)
        arenas = self._engine.scheduler.kv.config.arena_pages
        return all(sum(needed) < pages for needed, pages in zip(held, arenas, strict=True))

    def _start(self, conversation: _Conversation) -> None:
        engine, chat = self._engine, conversation.chat
        name = f"{chat.number}, turn {conversation.asked}"
        params = self._params
        if params.seed is not None:
            params = replace(params, seed=params.seed + TURNS_MAX * chat.number + conversation.asked)
        engine.add_request(name, conversation.prompt, params)
        conversation.output = engine.output(name)
        self._running[name] = conversation

    def _end_turn(self, output: RequestOutput) -> None:
        conversation = self._running.pop(output.request_id)
        if output.error is not None:
            raise RequestError(f"{conversation.chat.source}, turn {conversation.asked}: {output.error}")
        conversation.tally.take(output)
        conversation.output = None
        conversation.prompt = []
        self._on_turns(1)
        if not conversation.done:
            conversation.messages.append({"role": "assistant", "content": output.outputs[0].text})
            self._waiting.appendleft(conversation)


# ---- the benchmark --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class AcceptanceConfig:
    engine: EngineConfig
    """Settings of the engine; speculative_config is required."""
    max_tokens: int = 256
    """Most tokens of each answer."""
    temperature: float | None = 0.7
    """Temperature of the sampled pass; None for a greedy pass only."""
    seed: int = SEED
    batch: int = 16
    """Most chats that run at once; the figures do not depend on it."""

    def __post_init__(self) -> None:
        for name in ("max_tokens", "batch"):
            whole_number(getattr(self, name), name, at_least=1)
        if self.engine.speculative_config is None:
            raise ConfigError("no drafting method is given, so there are no drafts to accept; choose one with --method")
        if self.temperature is not None and SamplingParams(temperature=self.temperature).greedy:
            raise ConfigError(
                f"the sampled pass at temperature {self.temperature:g} would repeat the greedy one; "
                "choose a higher temperature or --no-sampled"
            )

    @property
    def samplings(self) -> dict[str, SamplingParams]:
        greedy = SamplingParams(temperature=0.0, max_tokens=self.max_tokens)
        if self.temperature is None:
            return {"greedy": greedy}
        return {"greedy": greedy, "sampled": replace(greedy, temperature=self.temperature, seed=self.seed)}


def prepare(config: AcceptanceConfig, model: LoadedModel | None = None, progress: Progress | None = None) -> Engine:
    speculation = config.engine.speculative_config
    assert speculation is not None
    # Enough for most drafters; if one proposes in more rows, fewer chats run at once.
    batch_rows = 2 * config.batch * 2 * (1 + (speculation.num_speculative_tokens or USUAL_DRAFTS))
    settings = replace(
        config.engine,
        max_num_seqs=config.batch,
        max_num_batched_tokens=max(config.engine.max_num_batched_tokens, STEP_ROWS, batch_rows),
        # With prefix caching, earlier chats would decide how much of the drafter's context is present.
        enable_prefix_caching=False,
    )
    return build_engine(settings, model=model, progress=progress)


def measure(
    config: AcceptanceConfig,
    engine: Engine,
    chats: Sequence[Chat],
    on_turns: Callable[[str, int], None] = lambda what, turns: None,
) -> dict[str, Any]:
    """Returns plain data, ready for JSON; `on_turns` is called with the pass and the number of turns that ended."""
    speculation = config.engine.speculative_config
    assert speculation is not None
    report: dict[str, Any] = {
        "config": asdict(config) | {"k": engine.k, "max_model_len": engine.max_model_len},
        "model": engine.model.name,
        "drafter": speculation.model or packaged_drafter(engine.model.name, speculation.method) or speculation.method,
        "sampled": None,
    }
    for name, params in config.samplings.items():
        tallies = run_chats(engine, chats, params, at_once=config.batch, on_turns=partial(on_turns, name))
        categories: dict[str, list[Tally]] = {}
        named = any(chat.category is not None for chat in chats)
        for chat, tally in zip(chats, tallies, strict=True):
            if named:
                categories.setdefault(chat.category or UNCATEGORISED, []).append(tally)
        report[name] = {
            "all": total(tallies).as_json(engine.k),
            "categories": {category: total(some).as_json(engine.k) for category, some in sorted(categories.items())},
        }
    return report
