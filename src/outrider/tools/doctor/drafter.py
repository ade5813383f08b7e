"""Does a drafter fit its target? Measures acceptance as it is, from a warm cache, and with other target layers.

    cold       every prompt computed
    warm       the same prompts again, their KV and the drafter's from the prefix cache
    +1, −1     the drafter reads the target layers after, or before, those that its checkpoint names
    chance     the drafter reads its target layers in reverse order: its acceptance without the target's state

Greedy text is the same with any drafter, so all of these are measured on the same text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from outrider.config import EngineConfig, SpeculativeConfig
from outrider.engine.build import build_engine
from outrider.engine.engine import Engine
from outrider.errors import ConfigError, ModelError
from outrider.models.resolve import packaged_drafter
from outrider.sampling import SamplingParams
from outrider.speculative.registry import load_drafter, written_layer_ids
from outrider.speculative.settings import DrafterSettings
from outrider.tools.bench.acceptance import STEP_ROWS, Chat, Tally, run_chats, total
from outrider.tools.doctor.findings import Finding, Status

TOKENS = 96
AT_ONCE = 8
SHIFTS = (1, -1)
STALE_DIFFERENCE = 0.02
CLEARLY_BETTER = 1.05
MOST_CHATS = 2 / 3
"""Fraction of the differing chats that must be better too, so that one odd chat does not make a shift right."""
LEAST_GOOD_LENGTH = 2.0
"""One accepted draft per step; below that drafting hardly pays."""

PROMPTS = (
    "Explain to a child of ten why the sky is blue.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "A train travels 180 km in 2 hours and then 120 km in 3 hours. What is its average speed?",
    "Write a short story about a lighthouse keeper and a lost dog.",
    "Name five causes of the French Revolution, one line each.",
    "Draft a polite email to a colleague asking to move our meeting to Thursday.",
    "Which is better for a small garden, a pear tree or a cherry tree? Give reasons.",
    'List three rivers of Europe as JSON, with the fields "name", "length_km" and "countries".',
)


def built_in_chats() -> list[Chat]:
    return [
        Chat(turns=(prompt,), category=None, number=number, source=f"built-in prompt {number}")
        for number, prompt in enumerate(PROMPTS, start=1)
    ]


# ---- figures --------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """Another run of the drafter compared with the cold run, over the chats whose text is the same in both."""

    length: float
    cold_length: float
    """Mean acceptance length of the cold run over the same chats."""
    better: int
    """Number of chats with more accepted drafts per step than in the cold run."""
    worse: int
    taps: tuple[int, ...] = ()

    @property
    def ratio(self) -> float:
        return self.length / self.cold_length

    @property
    def clearly_better(self) -> bool:
        return self.ratio >= CLEARLY_BETTER and self.better >= MOST_CHATS * (self.better + self.worse)


@dataclass(kw_only=True, slots=True)
class Figures:
    k: int
    taps: tuple[int, ...]
    """Target layers that the drafter reads; () for a drafter that reads none."""
    chats: int
    tokens: int
    drafts: int
    cold: float
    """Mean acceptance length of the cold run."""
    warm: Compared | None = None
    """Run from a warm prefix cache; None without one."""
    shifted: dict[int, Compared] = field(default_factory=dict)
    """Runs with shifted layers, by shift; a shift past the target's layers is left out."""
    chance: Compared | None = None

    def as_json(self) -> dict[str, Any]:
        def one(figure: Compared | None) -> dict[str, Any] | None:
            if figure is None:
                return None
            return {
                "mean_acceptance_length": figure.length,
                "cold_on_the_same_text": figure.cold_length,
                "taps": list(figure.taps),
            }

        return {
            "k": self.k,
            "taps": list(self.taps),
            "chats": self.chats,
            "tokens": self.tokens,
            "drafts": self.drafts,
            "cold": self.cold,
            "warm": one(self.warm),
            "shifted": {f"{shift:+d}": one(figure) for shift, figure in self.shifted.items()},
            "chance": one(self.chance),
        }


def compare(cold: Sequence[Tally], other: Sequence[Tally], taps: tuple[int, ...]) -> Compared | None:
    """Compares two runs over the chats with equal text; None if there are none."""
    pairs = [(a, b) for a, b in zip(cold, other, strict=True) if a.turns and a.answers == b.answers]
    if not pairs:
        return None
    return Compared(
        length=total([b for _, b in pairs]).length,
        cold_length=total([a for a, _ in pairs]).length,
        better=sum(b.length > a.length for a, b in pairs),
        worse=sum(b.length < a.length for a, b in pairs),
        taps=taps,
    )


# ---- the judgement --------------------------------------------------------------------------------------


class Diagnosis(Enum):
    FITS = "fits"
    WEAK = "weak drafter"
    WRONG_LAYERS = "wrong layer ids"
    WRONG_TARGET = "wrong target"
    STALE = "stale KV"
    REFUSED = "refused"

    @property
    def status(self) -> Status:
        return {Diagnosis.FITS: Status.OK, Diagnosis.WEAK: Status.NOTE}.get(self, Status.PROBLEM)


def judge(figures: Figures) -> Diagnosis:
    warm = figures.warm
    # First, because with wrong draft KV the other figures mean nothing.
    if warm is not None and abs(warm.ratio - 1) > STALE_DIFFERENCE:
        return Diagnosis.STALE
    if better_shift(figures) is not None:
        return Diagnosis.WRONG_LAYERS
    if figures.chance is not None and near_chance(figures.cold, figures.chance.length):
        return Diagnosis.WRONG_TARGET
    return Diagnosis.FITS if figures.cold >= good_length(figures.k) else Diagnosis.WEAK


def better_shift(figures: Figures) -> int | None:
    chance = 1.0 if figures.chance is None else figures.chance.length
    better = [
        shift
        for shift, figure in figures.shifted.items()
        # Near chance, one length exceeds another by luck.
        if figure.clearly_better and not near_chance(figure.length, chance)
    ]
    return max(better, key=lambda shift: figures.shifted[shift].ratio, default=None)


def near_chance(length: float, chance: float) -> bool:
    """Whether hardly more drafts per step are accepted than without the target's state."""
    return length - 1 <= 1.25 * (chance - 1) + 0.05


def good_length(k: int) -> float:
    """Returns the length that counts as good: LEAST_GOOD_LENGTH, or half of what `k` drafts can reach if less."""
    return min(LEAST_GOOD_LENGTH, 1 + k / 2)


# ---- the report -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterReport:
    method: str
    drafter: str
    diagnosis: Diagnosis
    finding: Finding
    figures: Figures | None = None
    """None if the drafter was refused."""

    @property
    def healthy(self) -> bool:
        return self.finding.status is not Status.PROBLEM

    def as_json(self) -> dict[str, Any]:
        return {
            "method": self.method,
            "drafter": self.drafter,
            "diagnosis": self.diagnosis.value,
            "text": self.finding.text,
            "advice": self.finding.advice,
            "figures": None if self.figures is None else self.figures.as_json(),
        }


def refused(method: str, drafter: str, problem: Exception) -> DrafterReport:
    finding = Finding(
        Diagnosis.REFUSED.value,
        str(problem),
        Status.PROBLEM,
        "nothing was measured; use a drafter that was made for this model, or name its --method",
    )
    return DrafterReport(method=method, drafter=drafter, diagnosis=Diagnosis.REFUSED, finding=finding)


def examine_drafter(
    plain: Engine, speculation: SpeculativeConfig, progress: Callable[[str], None] = lambda what: None
) -> DrafterReport:
    """Loads the drafter for the model of `plain`, measures it and judges the figures."""
    method = speculation.method
    drafter = speculation.model or packaged_drafter(plain.model.name, method) or method
    try:
        examination = _Examination(plain, speculation)
        figures = examination.figures(progress)
        diagnosis = judge(figures)
        finding = Finding(diagnosis.value, *_describe(diagnosis, figures, examination.written))
    except (ModelError, ConfigError) as problem:
        return refused(method, drafter, problem)
    return DrafterReport(method=method, drafter=drafter, diagnosis=diagnosis, finding=finding, figures=figures)


def _describe(
    diagnosis: Diagnosis, figures: Figures, written: Callable[[Sequence[int]], str | None]
) -> tuple[str, Status, str | None]:
    """Returns the text, the status and the advice for a diagnosis."""
    text, advice = f"acceptance length {figures.cold:.2f}", None
    if diagnosis is Diagnosis.FITS:
        text += f" of at most {figures.k + 1}" + ("; its layers are right" if figures.shifted else "")
    elif diagnosis is Diagnosis.WEAK:
        text += f", less than {good_length(figures.k):g}" + ("; other layers are no better" if figures.shifted else "")
        advice = "it works, but hardly pays off: train it longer on text that this model wrote, or try another --k"
    elif diagnosis is Diagnosis.WRONG_LAYERS:
        shift = better_shift(figures)
        assert shift is not None
        better = figures.shifted[shift]
        text += (
            f", but {better.length:.2f} when it reads the outputs of layers {_listed(better.taps)} in place of "
            f"{_listed(figures.taps)}"
        )
        line = written(better.taps)
        if line is None:
            advice = (
                "this method always reads the last layer, so no id can be changed: the drafter was made for a model "
                "with other last layers"
            )
        else:
            advice = f"write {line} into its config.json and run this command again"
    elif diagnosis is Diagnosis.WRONG_TARGET:
        assert figures.chance is not None
        text += (
            f", about what it reaches with its layers in reverse order ({figures.chance.length:.2f}): it cannot use "
            "this model's hidden states"
        )
        advice = "it was trained for another model, or hardly at all; use one that was trained for this model"
    elif diagnosis is Diagnosis.STALE:
        assert figures.warm is not None
        text = (
            f"acceptance length {figures.warm.cold_length:.2f} on computed prompts, but {figures.warm.length:.2f} on "
            "the same prompts from the prefix cache"
        )
        advice = (
            "the drafter's cached KV differs from what it computes: run with --sanitizer raise --sanitizer-level bytes "
            "and report what it says; --no-enable-prefix-caching avoids it until then"
        )
    return text, diagnosis.status, advice


def _listed(taps: Sequence[int]) -> str:
    return ", ".join(map(str, taps))


# ---- measuring ------------------------------------------------------------------------------------------


class _Examination:
    """The runs of one drafter with one target; engines are built one at a time."""

    def __init__(self, plain: Engine, speculation: SpeculativeConfig) -> None:
        config: EngineConfig = replace(
            plain.config,
            speculative_config=speculation,
            max_num_seqs=min(AT_ONCE, plain.config.max_num_seqs),
            max_num_batched_tokens=max(STEP_ROWS, plain.config.max_num_batched_tokens),
        )
        self._plain, self._config, self._speculation = plain, config, speculation
        self._chats = built_in_chats()

    def figures(self, progress: Callable[[str], None]) -> Figures:
        progress("as it is")
        engine = build_engine(self._config, model=self._plain.model)
        taps, k = engine.scheduler.kv.layout.footprint.taps, engine.k
        cold = self._run(engine)
        everything = total(cold)
        if not everything.turns:
            raise ConfigError(
                f"none of the built-in prompts fits into {engine.max_model_len} tokens with an answer of {TOKENS}; "
                "raise --max-model-len or --kv-cache-memory-bytes"
            )
        figures = Figures(
            k=k,
            taps=taps,
            chats=everything.prompts - everything.too_long,
            tokens=everything.tokens,
            drafts=everything.speculation.drafts,
            cold=everything.length,
        )
        if self._config.enable_prefix_caching:
            progress("from a warm cache")
            warm = self._run(engine)
            # Without cache hits this is the cold run again.
            figures.warm = compare(cold, warm, taps) if total(warm).cached_tokens else None
        del engine
        for shift, moved in self._shifts(taps):
            progress(f"layers {shift:+d}")
            figure = compare(cold, self._run(self._reading(moved)), moved)
            if figure is not None:
                figures.shifted[shift] = figure
        misread = misread_taps(taps)
        if misread is not None:
            progress("layers backwards")
            figures.chance = compare(cold, self._run(self._reading(misread)), misread)
        return figures

    def written(self, taps: Sequence[int]) -> str | None:
        """Returns the line with which the drafter's config.json would name these layers; None if it cannot."""
        return written_layer_ids(self._speculation, self._settings(tuple(taps)), taps)

    def _shifts(self, taps: tuple[int, ...]) -> Iterator[tuple[int, tuple[int, ...]]]:
        layers = range(len(self._plain.model.spec.layers))
        for shift in SHIFTS if taps else ():
            moved = tuple(tap + shift for tap in taps)
            if all(tap in layers for tap in moved):
                yield shift, moved

    def _reading(self, taps: tuple[int, ...]) -> Engine:
        """Builds an engine whose drafter has the same weights but reads these layers."""
        drafter = load_drafter(self._speculation, self._settings(taps))
        return build_engine(self._config, model=self._plain.model, drafter=drafter)

    def _settings(self, taps: tuple[int, ...]) -> DrafterSettings:
        plain = self._plain
        return DrafterSettings(
            target=plain.model,
            backend=plain.runner.backend,
            page_tokens=plain.config.block_size,
            dtype=plain.model.dtype,
            device=plain.runner.device,
            max_model_len=plain.max_model_len,
            taps=taps,
        )

    def _run(self, engine: Engine) -> list[Tally]:
        params = SamplingParams(temperature=0.0, max_tokens=TOKENS)
        return run_chats(engine, self._chats, params, at_once=AT_ONCE)


def misread_taps(taps: tuple[int, ...]) -> tuple[int, ...] | None:
    """Returns the layers in reverse order, or the first layer for a single one; None if that changes nothing."""
    misread = taps[::-1] if len(taps) > 1 else (0,) * len(taps)
    return misread if misread != taps else None
