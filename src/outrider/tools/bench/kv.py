"""The cost of the scheduler and the KV manager: the real ones, driven by made-up verdicts.

Three things are measured, in rounds that visit each of them once, so that a slow minute of the machine
touches all alike:

    serving     requests through Scheduler.add / schedule / commit, with and without a drafter
    scaling     the same with more requests running and more pages cached
    lookup      one long prompt: hash, search, allocate

Only calls into Scheduler and KVManager are timed; making prompts, reading plans and building verdicts is not. The
garbage collector stays on, as it does in an engine.
"""

from __future__ import annotations

import gc
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import cycle
from random import Random
from statistics import median
from time import perf_counter
from typing import Any

from outrider.errors import ConfigError
from outrider.kv import Full, GroupSpec, KVConfig, KVFootprint, KVLayout, KVManager
from outrider.kv.archetypes import ARCHETYPES, Archetype, DrafterShape
from outrider.kv.checked import whole_number
from outrider.kv.footprint import NO_DRAFTER
from outrider.kv.intervals import page_count
from outrider.kv.ledger import SequenceKV
from outrider.scheduler import RequestSpec, Scheduler, SchedulerConfig, StepPlan, Verdict
from outrider.scheduler.request import token_array
from outrider.speculative.registry import drafting_method
from outrider.tools.bench.process_memory import peak_mb

# One slot of an 8B target with 8 KV heads, and of one layer of it: the sizes differ, so there are two arenas.
TARGET_SLOT_BYTES = 131_072
DRAFT_SLOT_BYTES = 4_096
STEP_ROWS_PER_RUNNING = 64
"""Rows of the step budget per running request: prompts come in bursts and leave steps in which all requests decode."""
FIRST_UNDRAWN_TOKEN = 1 << 16
"""Smallest token id that is never drawn; drawn ids have 16 bits."""
SCALING_RUNNING_FACTOR = 4
SCALING_REQUESTS_FACTOR = 2
"""Requests served per running one when scaling: most of them run at once for most of the time."""

REFERENCE: Mapping[str, float] = {
    "us_per_request_step": 44.0,
    "us_per_request_step_pure_decode": 32.0,
    "us_per_request_step_without_speculation": 19.0,
    "hash_ms": 5.0,
    "hit_ms": 1.9,
    "allocate_ms": 3.2,
}
REFERENCE_SOURCE = (
    "vLLM 0.32, pure-Python scheduler and KV cache manager; measured elsewhere, on a machine like the one "
    "this was written on and at another time, not in this run"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Requests of one shape, all waiting from the start. Half of each step's drafts are accepted."""

    method: str
    k: int = 4
    requests: int = 1000
    running: int = 256
    prompt_tokens: int = 1024
    shared_tokens: int = 512
    generated_tokens: int = 64
    page_tokens: int = 16
    cached_pages: int = 0
    """Pages per group that other prompts have left in the prefix index before the start."""

    def __post_init__(self) -> None:
        for name in ("requests", "running", "prompt_tokens", "generated_tokens", "page_tokens"):
            whole_number(getattr(self, name), name, at_least=1)
        for name in ("k", "cached_pages"):
            whole_number(getattr(self, name), name, at_least=0)
        if not 0 <= self.shared_tokens <= self.prompt_tokens:
            raise ConfigError(
                f"shared_tokens must lie between 0 and prompt_tokens ({self.prompt_tokens}), got {self.shared_tokens}"
            )

    @property
    def step_rows(self) -> int:
        return STEP_ROWS_PER_RUNNING * max(self.running, 2)


@dataclass(frozen=True, kw_only=True, slots=True)
class KVBenchConfig:
    workload: Workload
    scaling_cached_pages: tuple[int, ...] = (10_000, 100_000)
    lookup_tokens: int = 32_768
    repeats: int = 5

    def __post_init__(self) -> None:
        whole_number(self.repeats, "repeats", at_least=1)
        if self.lookup_tokens < 2 * self.workload.page_tokens:
            raise ConfigError(f"lookup_tokens must fill two pages at least, got {self.lookup_tokens}")

    @property
    def cases(self) -> dict[str, Workload]:
        """Workloads by name; scaling is relative to `main`."""
        main = self.workload
        cases = {"main": main, "plain": replace(main, method=NO_DRAFTER.name, k=0)}
        running = main.running * SCALING_RUNNING_FACTOR
        for pages in self.scaling_cached_pages:
            cases[f"cached {pages}"] = replace(
                main, running=running, requests=running * SCALING_REQUESTS_FACTOR, cached_pages=pages
            )
        return cases

    @property
    def measurements(self) -> int:
        """Number of times that `measure` reports progress."""
        return self.repeats * (len(self.cases) + 1)


# ---- serving ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """One run of a workload. A request-step is one request in one step."""

    seconds: float
    steps: int
    request_steps: int
    pure_seconds: float
    pure_request_steps: int
    """Request-steps of pure decoding: steps with no prompt rows in which no request started or ended."""
    finished: int

    @property
    def us_per_request_step(self) -> float:
        return 1e6 * self.seconds / self.request_steps

    @property
    def us_per_request_step_pure_decode(self) -> float:
        if not self.pure_request_steps:
            raise ConfigError("no step of this workload was pure decoding; raise generated_tokens or lower running")
        return 1e6 * self.pure_seconds / self.pure_request_steps


class Tokens:
    """Token ids drawn before the clock starts, the same in every run."""

    def __init__(self, workload: Workload) -> None:
        self._random = Random(0)
        shared = self._draw(workload.shared_tokens)
        own = workload.prompt_tokens - workload.shared_tokens
        self.prompts = [shared + self._draw(own) for _ in range(workload.requests)]
        longest = workload.k + 1
        self._sampled = [cycle([tuple(self._draw(length)) for _ in range(1009)]) for length in range(longest + 1)]

    def _draw(self, count: int) -> list[int]:
        return array("H", self._random.randbytes(2 * count)).tolist()

    def other_prompts(self, pages: int, page_tokens: int, pages_each: int) -> Iterator[list[int]]:
        """Yields prompts that share no prefix, `pages` whole pages in all."""
        for start in range(0, pages, pages_each):
            prompt = self._draw(min(pages_each, pages - start) * page_tokens)
            prompt[0] = FIRST_UNDRAWN_TOKEN + start
            yield prompt

    def verdict(self, plan: StepPlan) -> Verdict:
        sampled = self._sampled
        return Verdict(
            step=plan.step,
            tokens=tuple(next(sampled[1 + part.drafts // 2]) if part.samples else () for part in plan.scheduled),
            proposed=tuple(part.propose for part in plan.scheduled),
        )


def archetype_of(method: str) -> Archetype:
    """Returns how a drafter treats KV, by the name of an archetype or of a drafting method. Only the latter imports the
    drafter, and with it torch."""
    known = {**ARCHETYPES, NO_DRAFTER.name: ARCHETYPES["nothing"]}
    return known[method] if method in known else drafting_method(method).archetype


def layout_for(workload: Workload) -> KVLayout:
    """Returns the layout of a target with full attention and of the groups that the drafting method owns."""
    archetype = archetype_of(workload.method)
    target = GroupSpec(name="target", kind=Full(), page_tokens=workload.page_tokens, slot_bytes=TARGET_SLOT_BYTES)
    draft = GroupSpec(name="draft", kind=Full(), page_tokens=workload.page_tokens, slot_bytes=DRAFT_SLOT_BYTES)
    shape = DrafterShape(
        groups=(draft,) if archetype.owns_kv else (),
        taps=(2, 16, 29) if archetype.reads_taps else (),
    )
    return KVLayout(target=(target,), footprint=archetype.declare(workload.method, shape))


def pages_for(workload: Workload, footprint: KVFootprint) -> int:
    """Returns the pages per arena: those cached beforehand, those of the running requests, and a quarter more."""
    longest = workload.prompt_tokens + workload.generated_tokens
    ahead = 1 + workload.k + footprint.scratch_ahead(workload.k)
    each = page_count(longest + ahead, workload.page_tokens) + 1
    return 1 + workload.cached_pages + each * workload.running * 5 // 4


def build(workload: Workload) -> Scheduler:
    layout = layout_for(workload)
    pages = pages_for(workload, layout.footprint)
    manager = KVManager(layout, KVConfig(arena_pages=(pages,) * len(layout.arena_page_bytes)))
    config = SchedulerConfig(max_num_seqs=workload.running, max_num_batched_tokens=workload.step_rows)
    return Scheduler(config, manager)


def fill_cache(scheduler: Scheduler, workload: Workload, tokens: Tokens) -> None:
    """Leaves published pages in the index that no request holds, by serving other prompts."""
    pages_each = page_count(workload.prompt_tokens, workload.page_tokens)
    prompts = tokens.other_prompts(workload.cached_pages, workload.page_tokens, pages_each)
    for number, prompt in enumerate(prompts):
        scheduler.add(RequestSpec(id=f"other-{number}", prompt=prompt, max_tokens=1, k=workload.k))
    while scheduler.requests:
        plan = scheduler.schedule()
        scheduler.commit(plan, tokens.verdict(plan))
    cached = {arena.num_cached for arena in scheduler.kv.pool.arenas}
    assert cached == {workload.cached_pages}, f"wanted {workload.cached_pages} cached pages, got {cached}"


def serve(workload: Workload, tokens: Tokens) -> Served:
    """Serves the workload once, from the first add to the last commit."""
    specs = [
        RequestSpec(id=f"request-{number}", prompt=prompt, max_tokens=workload.generated_tokens, k=workload.k)
        for number, prompt in enumerate(tokens.prompts)
    ]
    # The prompts, millions of tokens, belong to the harness: the collector need not visit them.
    gc.collect()
    gc.freeze()
    try:
        return _serve(workload, tokens, specs)
    finally:
        gc.unfreeze()


def _serve(workload: Workload, tokens: Tokens, specs: Sequence[RequestSpec]) -> Served:
    scheduler = build(workload)
    fill_cache(scheduler, workload, tokens)
    gc.collect()
    start = perf_counter()
    for spec in specs:
        scheduler.add(spec)
    seconds, pure_seconds = perf_counter() - start, 0.0
    steps = request_steps = pure_request_steps = finished = 0
    while scheduler.requests:
        start = perf_counter()
        plan = scheduler.schedule()
        planned = perf_counter()
        assert plan.scheduled, "an empty step: the pool is too small for the workload"
        verdict = tokens.verdict(plan)
        resumed = perf_counter()
        updates = scheduler.commit(plan, verdict)
        spent = planned - start + perf_counter() - resumed
        seconds += spent
        steps += 1
        request_steps += len(plan.scheduled)
        ended = sum(update.finish is not None for update in updates)
        finished += ended
        if not ended and all(part.start >= workload.prompt_tokens for part in plan.scheduled):
            pure_seconds += spent
            pure_request_steps += len(plan.scheduled)
    return Served(
        seconds=seconds,
        steps=steps,
        request_steps=request_steps,
        pure_seconds=pure_seconds,
        pure_request_steps=pure_request_steps,
        finished=finished,
    )


# ---- one long prompt -------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Lookup:
    """Times of one long prompt: first unknown, then cached in every group."""

    hash_ms: float
    """Time to convert the tokens and compute the chain of keys."""
    miss_ms: float
    hit_ms: float
    allocate_ms: float
    """Time to allocate the pages of a prompt that was not cached."""
    total_fresh_ms: float
    """Time to hash, search, admit and allocate, measured as one."""
    total_cached_ms: float


class _Stopwatch:
    """Measures the milliseconds from one lap to the next."""

    def __init__(self) -> None:
        self._last = perf_counter()

    def lap_ms(self) -> float:
        elapsed_ms = 1e3 * (perf_counter() - self._last)
        self._last = perf_counter()
        return elapsed_ms


LOOKUPS_PER_ROUND = 7
"""Look-ups measured per round: one takes a millisecond or two, so a single sample says little."""


class _LongPrompt:
    def __init__(self, workload: Workload, length: int) -> None:
        self._layout = layout_for(workload)
        self._k = workload.k
        self._length = length
        pages = 3 * page_count(length, workload.page_tokens) + 8
        self._manager = KVManager(self._layout, KVConfig(arena_pages=(pages,) * len(self._layout.arena_page_bytes)))
        self._draft = len(self._layout.draft_groups) > 0
        self._random = Random(1)
        self._steps = 0

    def measure(self) -> Lookup:
        # Hashes are remembered, so every prompt that counts as new has new tokens.
        other, fresh, prompt = (array("H", self._random.randbytes(2 * self._length)).tolist() for _ in range(3))
        self._publish(self._start(other))
        gc.collect()
        watch = _Stopwatch()
        sequence = self._open(fresh)
        sequence.chain.extend(sequence.tokens, self._length)
        hash_ms = watch.lap_ms()
        miss, _views = self._manager.search(sequence, self._length - 1, draft=self._draft)
        miss_ms = watch.lap_ms()
        self._manager.admit(sequence, may_draft=self._draft)
        watch.lap_ms()
        self._reserve(sequence)
        allocate_ms = watch.lap_ms()
        self._drop(sequence)
        watch.lap_ms()
        sequence = self._start(prompt)
        total_fresh_ms = watch.lap_ms()
        self._publish(sequence)
        sequence = self._open(prompt)
        sequence.chain.extend(sequence.tokens, self._length)
        watch.lap_ms()
        hit, _views = self._manager.search(sequence, self._length - 1, draft=self._draft)
        hit_ms = watch.lap_ms()
        assert (miss.end, hit.end) == (0, self._length - 1), f"hits end at {miss.end} and {hit.end}"
        self._drop(sequence)
        watch.lap_ms()
        sequence = self._start(prompt)
        total_cached_ms = watch.lap_ms()
        self._drop(sequence)
        self._manager.reset_cache()
        return Lookup(
            hash_ms=hash_ms,
            miss_ms=miss_ms,
            hit_ms=hit_ms,
            allocate_ms=allocate_ms,
            total_fresh_ms=total_fresh_ms,
            total_cached_ms=total_cached_ms,
        )

    def _open(self, prompt: Sequence[int]) -> SequenceKV:
        return self._manager.open("long", token_array(prompt), total_tokens=self._length + 1, k=self._k)

    def _start(self, prompt: Sequence[int]) -> SequenceKV:
        sequence = self._open(prompt)
        self._manager.admit(sequence, may_draft=self._draft)
        self._reserve(sequence)
        return sequence

    def _reserve(self, sequence: SequenceKV) -> None:
        draft_end = self._layout.footprint.reserve_end(v=self._length, k=self._k)
        self._manager.reserve(sequence, self._length, draft_end)

    def _publish(self, sequence: SequenceKV) -> None:
        sequence.tokens.append(0)
        self._manager.commit(sequence, self._length)
        self._drop(sequence)

    def _drop(self, sequence: SequenceKV) -> None:
        self._manager.close(sequence)
        self._manager.take_plan(self._steps)
        self._manager.complete(self._steps)
        self._steps += 1


# ---- the whole measurement -------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class KVBenchReport:
    config: KVBenchConfig
    served: Mapping[str, Sequence[Served]]
    """Runs of each case, one per round."""
    lookups: Sequence[Lookup]
    peak_rss_main_mb: float
    peak_rss_mb: float

    def figures(self, pick: Callable[[Iterable[float]], float]) -> dict[str, Any]:
        """Returns everything that was timed; `pick` reduces the figures of all rounds to one."""
        main = self.served["main"]
        cases = self.config.cases
        scaling = [
            {
                "running": cases[name].running,
                "cached_pages": cases[name].cached_pages,
                "us_per_request_step": pick(run.us_per_request_step for run in runs),
            }
            for name, runs in self.served.items()
            if name != "plain"
        ]
        per_step = [float(entry["us_per_request_step"]) for entry in scaling]
        return {
            "us_per_request_step": pick(run.us_per_request_step for run in main),
            "us_per_request_step_pure_decode": pick(run.us_per_request_step_pure_decode for run in main),
            "us_per_request_step_without_speculation": pick(run.us_per_request_step for run in self.served["plain"]),
            "lookup_32k_ms": {
                name: pick(getattr(lookup, name) for lookup in self.lookups) for name in Lookup.__dataclass_fields__
            },
            "scaling": scaling,
            "scaling_ratio_max": max(per_step) / per_step[0],
        }

    def to_json(self) -> dict[str, Any]:
        """Returns medians at the top level and minima under `best`."""
        figures, main = self.figures(median), self.served["main"]
        # Within a round the machine is equally fast for all: ratios are taken there, and their median reported.
        figures["scaling_ratio_max"] = max(
            median(run.us_per_request_step / base.us_per_request_step for run, base in zip(runs, main, strict=True))
            for name, runs in self.served.items()
            if name not in ("main", "plain")
        )
        ours = {**figures, **figures["lookup_32k_ms"]}
        return {
            **figures,
            "steps_per_second": median(run.steps / run.seconds for run in main),
            "steps": main[0].steps,
            "request_steps": main[0].request_steps,
            "peak_rss_mb": self.peak_rss_mb,
            "peak_rss_main_mb": self.peak_rss_main_mb,
            "best": self.figures(min),
            "reference": {
                "source": REFERENCE_SOURCE,
                "figures": dict(REFERENCE),
                "ours_to_reference": {name: ours[name] / value for name, value in REFERENCE.items()},
            },
            "config": asdict(self.config),
        }


def measure(config: KVBenchConfig, progress: Callable[[str], None] = lambda what: None) -> KVBenchReport:
    """Runs every measurement `repeats` times, round by round; `progress` is called with the name of the next one."""
    cases = config.cases
    tokens = {name: Tokens(case) for name, case in cases.items()}
    long_prompt = _LongPrompt(config.workload, config.lookup_tokens)
    served: dict[str, list[Served]] = {name: [] for name in cases}
    lookups: list[Lookup] = []
    peak_rss_main_mb = 0.0
    for round_number in range(1, config.repeats + 1):
        for name, case in cases.items():
            progress(f"round {round_number}: {_describe(case)}")
            served[name].append(serve(case, tokens[name]))
            peak_rss_main_mb = peak_rss_main_mb or peak_mb()
        progress(f"round {round_number}: a prompt of {config.lookup_tokens:,} tokens")
        lookups += [long_prompt.measure() for _ in range(LOOKUPS_PER_ROUND)]
    return KVBenchReport(
        config=config,
        served=served,
        lookups=lookups,
        peak_rss_main_mb=peak_rss_main_mb,
        peak_rss_mb=peak_mb(),
    )


def _describe(case: Workload) -> str:
    cached = f", {case.cached_pages:,} pages cached" if case.cached_pages else ""
    return f"{case.running:,} running, {f'{case.k} drafts' if case.k else 'no drafts'}{cached}"
