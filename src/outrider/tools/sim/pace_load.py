"""Synthetic machines, and what is to be generated on them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import exp, log
from random import Random

from outrider.kv.footprint import KVFootprint, Proposing


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """True costs in seconds."""

    fixed_s: float
    """Reading the weights."""
    row_s: float
    """Arithmetic of one row, which the fixed part hides for the first rows."""
    hidden_rows: int = 1
    rows_per_tile: int = 1
    """Rows cost time in whole tiles."""
    draft_fixed_s: float
    draft_row_s: float
    feed_row_s: float
    host_s: float
    host_request_s: float
    noise: float = 0.05
    """Standard deviation of the logarithm of a step's time."""

    def target_s(self, rows: int) -> float:
        tile = self.rows_per_tile
        return self.fixed_s + self.row_s * max(0, -(-rows // tile) * tile - self.hidden_rows)

    def pass_s(self, rows: int) -> float:
        return self.draft_fixed_s + self.draft_row_s * rows if rows else 0.0

    def host_time_s(self, requests: int) -> float:
        return self.host_s + self.host_request_s * requests


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """What is to be generated on a machine."""

    name: str
    machine: Machine
    batch: int
    k: int = 7
    skill: float
    """Mean probability that a draft is accepted after all before it."""
    spread: float = 1.0
    """Standard deviation of the log-odds of that probability among requests, and among drafts."""
    overconfidence: float = 0.0
    """What the drafter adds to the log-odds of its probabilities."""
    fading: float = 0.0
    """By how much the log-odds fall with each draft of a proposal, which the drafter's probabilities do not say."""
    chain: bool = False
    copied: float = 0.0
    """Part of the proposals for which a look-up finds drafts too."""
    later: Machine | None = None
    """The machine from the middle of the run on; None if nothing changes."""
    later_skill: float | None = None

    @property
    def footprint(self) -> KVFootprint:
        return _CHAIN if self.chain else _BLOCK

    @property
    def sizes(self) -> tuple[int, ...]:
        """The numbers of drafts that may be asked for."""
        return tuple(range(1, self.k + 1)) if self.chain else tuple(sorted({max(1, self.k // 2), self.k}))


class _ShapeOnly(KVFootprint):
    """Declares passes and rows of a drafter, without the KV that this simulation does not have."""

    __slots__ = ()

    def __post_init__(self) -> None:
        pass

    def passes(self, k: int) -> int:
        return 0 if not k else k if self.proposing is Proposing.CHAIN else 1

    def query_len(self, k: int) -> int:
        return 0 if not k else 1 if self.proposing is Proposing.CHAIN else k + 1


_CHAIN = _ShapeOnly(name="chain", proposing=Proposing.CHAIN)
_BLOCK = _ShapeOnly(name="block", proposing=Proposing.BLOCK)


@dataclass(frozen=True, slots=True)
class Drawn:
    """What could be proposed for a request at one step, under any policy."""

    confident: tuple[float, ...]
    """The drafter's own probabilities of its drafts."""
    accepted: int
    """How many of them the target accepts."""
    copied_confident: tuple[float, ...] = ()
    """The look-up's probabilities of what it finds; empty if it finds nothing."""
    copied_accepted: int = 0


class Tape:
    """All that is left to chance in a run: every policy meets the same drafts and the same noise."""

    def __init__(self, load: Load, seed: int, steps: int) -> None:
        self.load = load
        self.steps = steps
        self._random = random = Random(f"outrider:{load.name}:{seed}")
        ease = [random.gauss(0.0, load.spread) for _ in range(load.batch)]
        self.noise = [[exp(random.gauss(0.0, load.machine.noise)) for _ in range(2)] for _ in range(steps)]
        """By step: of its target and of all the rest."""
        self.drawn = [[self._draw(self.skill(step), each) for each in ease] for step in range(steps)]

    def machine(self, step: int) -> Machine:
        later = self.load.later
        return later if later is not None and 2 * step >= self.steps else self.load.machine

    def skill(self, step: int) -> float:
        later = self.load.later_skill
        return later if later is not None and 2 * step >= self.steps else self.load.skill

    def _draw(self, skill: float, ease: float) -> Drawn:
        load, random = self.load, self._random
        chances = [_probability(_odds(skill) + ease + random.gauss(0.0, load.spread)) for _ in range(load.k)]
        confident = tuple(_probability(_odds(chance) + load.overconfidence) for chance in chances)
        faded = [_probability(_odds(chance) - load.fading * place) for place, chance in enumerate(chances)]
        drawn = Drawn(confident, self._agreeing(faded))
        if random.random() >= load.copied:
            return drawn
        chances = [random.choice((0.3, 0.95))] * (2 * load.k)
        return replace(drawn, copied_confident=tuple(chances), copied_accepted=self._agreeing(chances))

    def _agreeing(self, chances: list[float]) -> int:
        for place, chance in enumerate(chances):
            if self._random.random() >= chance:
                return place
        return len(chances)


def _odds(probability: float) -> float:
    return log(probability / (1.0 - probability))


def _probability(odds: float) -> float:
    return 1.0 / (1.0 + exp(-odds))
