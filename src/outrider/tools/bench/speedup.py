"""The speed-up over plain decoding, from plain steps of the same engine that are measured alongside.

    speed-up = (time that plain decoding would take for these tokens) / (time that the steps took)

Both sides are made of medians, so that a pause of the machine counts for neither. Steps that verify different
numbers of drafts cost differently: each kind has a median of its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from time import perf_counter

from outrider.engine.build import build_engine
from outrider.engine.engine import Engine
from outrider.sampling import SamplingParams

PROBE_STEPS = 16
FEWEST_PROBE_STEPS = 4
"""A probe that takes too long ends early, but not before this many steps."""
FEWEST_STEPS = 2
"""Fewest steps of an answer from which a speed-up is computed."""


class StepTimes:
    """How long the decoding steps of one request took, by the number of drafts that each verified."""

    def __init__(self) -> None:
        self.tokens = 0
        self._by_drafts: dict[int, list[float]] = defaultdict(list)

    def add(self, *, drafts: int, tokens: int, seconds: float) -> None:
        self._by_drafts[drafts].append(seconds)
        self.tokens += tokens

    @property
    def steps(self) -> int:
        return sum(map(len, self._by_drafts.values()))

    @property
    def typical_s(self) -> float:
        """Time that all steps would have taken if each had taken the median of its kind."""
        return sum(len(times) * median(times) for times in self._by_drafts.values())

    def speed_up(self, plain_step_s: float) -> float | None:
        """Speed-up over plain steps of one token each; None if too few tokens were decoded to say."""
        if self.steps < FEWEST_STEPS:
            return None
        return self.tokens * plain_step_s / self.typical_s


def plain_engine(engine: Engine) -> Engine:
    """Returns an engine for plain decoding: this one, unless its drafter owns KV, which is fed even without drafts."""
    if not engine.scheduler.kv.layout.footprint.groups:
        return engine
    settings = replace(engine.config, speculative_config=None)
    return build_engine(settings, model=engine.model)


def plain_step_times(
    engine: Engine, tokens: Sequence[int], *, steps: int = PROBE_STEPS, limit_s: float = 2.0, salt: str = ""
) -> list[float]:
    """Returns the seconds of each plain decoding step after `tokens`. The engine must be idle.

    With a `salt` the probe shares no cached prefix with other requests, and leaves none that they could hit.
    """
    assert not engine.has_work
    name = "plain-step-probe"
    room = engine.max_model_len - len(tokens)
    if room < FEWEST_PROBE_STEPS + 1:
        tokens = tokens[: engine.max_model_len - steps - 1]
    params = SamplingParams(temperature=0.0, max_tokens=steps + 1, ignore_eos=True)
    engine.add_request(name, tokens, params, salt=salt, speculate=False)
    output = engine.output(name)
    times: list[float] = []
    try:
        while not output.finished:
            first = not output.outputs[0].token_ids
            started = perf_counter()
            engine.step()
            if not first:
                # Steps up to the first token computed the prompt.
                times.append(perf_counter() - started)
            if sum(times) > limit_s and len(times) >= FEWEST_PROBE_STEPS:
                break
    finally:
        engine.abort(name)
    return times
