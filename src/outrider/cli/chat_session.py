"""A conversation with a model: its messages, and the cost of each answer against steps without drafts."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median
from time import perf_counter

from outrider.api.llm import LLM, Message
from outrider.engine.engine import Engine
from outrider.engine.outputs import RequestOutput, SpeculationCounts
from outrider.sampling import SamplingParams
from outrider.tools.bench.speedup import StepTimes, plain_engine, plain_step_times

WARM_UP_STEPS = 2


@dataclass(slots=True)
class Turn:
    """One answer and its timings."""

    output: RequestOutput
    times: StepTimes
    seconds: float = 0.0
    """Time from the question to the last token."""
    plain_steps_s: list[float] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return len(self.output.outputs[0].token_ids)

    @property
    def plain_step_s(self) -> float | None:
        return median(self.plain_steps_s) if self.plain_steps_s else None

    @property
    def speed_up(self) -> float | None:
        return None if self.plain_step_s is None else self.times.speed_up(self.plain_step_s)


class ChatSession:
    def __init__(self, llm: LLM, params: SamplingParams, *, system: str | None = None) -> None:
        self.llm = llm
        self.params = params
        self.turns: list[Turn] = []
        self.speculation = SpeculationCounts()
        self._opening: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self.messages = list(self._opening)
        # The first steps of a process are slower; they must not count against the first answer.
        plain_step_times(self._plain, [0], steps=WARM_UP_STEPS, salt="warm-up")

    @property
    def speculates(self) -> bool:
        return self.llm.engine.k > 0

    @cached_property
    def _plain(self) -> Engine:
        return plain_engine(self.llm.engine) if self.speculates else self.llm.engine

    def reset(self) -> None:
        self.messages = list(self._opening)

    def answer(self, text: str, *, probe_before: bool = False) -> Generator[Turn, None, None]:
        """Yields the turn as it grows. Closing the generator early keeps the part of the answer that is there."""
        messages = [*self.messages, {"role": "user", "content": text}]
        prompt = self.llm.chat_prompt(messages)
        before = self._probe(prompt, salt="before") if probe_before else []
        stream = self.llm.stream(prompt, self.params)
        turn: Turn | None = None
        started = perf_counter()
        tokens = drafts = 0
        try:
            while True:
                step_started = perf_counter()
                output = next(stream, None)
                ended = perf_counter()
                if output is None:
                    break
                if turn is None:
                    turn = Turn(output, StepTimes(), plain_steps_s=before)
                    self.turns.append(turn)
                new_tokens = len(output.outputs[0].token_ids) - tokens
                new_drafts = output.metrics.speculation.draft_tokens - drafts
                if tokens:
                    # The steps before the first token are those of the prompt.
                    turn.times.add(drafts=new_drafts, tokens=new_tokens, seconds=ended - step_started)
                tokens, drafts = tokens + new_tokens, drafts + new_drafts
                turn.seconds = ended - started
                yield turn
        finally:
            stream.close()
            if turn is not None:
                self.messages = [*messages, {"role": "assistant", "content": turn.output.outputs[0].text}]
                self.speculation.add(turn.output.metrics.speculation)

    def measure_plain_steps(self, turn: Turn, *, limit_s: float) -> None:
        """Measures steps without drafts at the end of an answer, with a context of the same length."""
        if self.speculates and turn.times.steps:
            context = [*turn.output.prompt_token_ids, *turn.output.outputs[0].token_ids]
            turn.plain_steps_s = turn.plain_steps_s + self._probe(context, limit_s=limit_s)

    def _probe(self, tokens: list[int], *, limit_s: float = 2.0, salt: str = "") -> list[float]:
        if not self.speculates or len(tokens) >= self.llm.engine.max_model_len:
            return []
        return plain_step_times(self._plain, tokens, limit_s=limit_s, salt=salt)
