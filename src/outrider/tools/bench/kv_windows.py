"""What windows cost the KV manager and what they save: one long prompt, and one long text that decodes.

long prompt   hash, search, compute in chunks (publish, free), close, search again; compared with the plain case,
              every layer full, in the same round
decoding      bytes that one request holds in every step, against the least that any scheme could hold
"""

from __future__ import annotations

import gc
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from statistics import median
from time import perf_counter
from typing import Any

from outrider.kv import Full, GroupSpec, KVConfig, KVFootprint, KVLayout, KVManager, Sliding
from outrider.kv.archetypes import DrafterShape
from outrider.kv.footprint import NO_DRAFTER
from outrider.kv.retention import Retention
from outrider.kv.sizing import worst_case_pages
from outrider.models.kv_groups import layer_groups
from outrider.models.spec import DecoderSpec, LayerSpec, RopeSpec
from outrider.scheduler import RequestSpec, Scheduler, SchedulerConfig, Verdict
from outrider.scheduler.request import token_array
from outrider.tools.bench.kv import archetype_of

LAYERS = 18
FULL_EVERY = 6
"""Every sixth layer is full; the five before it have a window."""
WINDOW = 512
PAGE_TOKENS = 16
DRAFT_SLOT_BYTES = 2_048
LARGE_PAGE_TOKENS, SMALL_PAGE_TOKENS, SMALL_WINDOW = 256, 64, 128
"""Sizes for a full group with large pages beside a sliding one with small pages."""
CHUNK_TOKENS = 2_048
CONTEXT_TOKENS = 8_192
DECODED_TOKENS = 512
PROMPTS_PER_ROUND = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowCase:
    """A layout and a retention policy; its costs are compared with those of the case named `against`."""

    layout: KVLayout
    retention: str = "dense"
    against: str | None = None


def _target(*, windows: bool) -> tuple[GroupSpec, ...]:
    """Returns the KV groups of a decoder that has one full layer in FULL_EVERY, or full layers only."""
    rope = RopeSpec(rotary_dim=256)
    layers = tuple(
        LayerSpec(window=WINDOW if windows and (number + 1) % FULL_EVERY else None, rope=rope)
        for number in range(LAYERS)
    )
    spec = DecoderSpec(
        family="bench",
        vocab_size=1 << 16,
        hidden_size=640,
        intermediate_size=2048,
        heads=4,
        kv_heads=1,
        head_dim=256,
        max_position=1 << 20,
        layers=layers,
    )
    return layer_groups(spec, owner="target", page_tokens=PAGE_TOKENS, item_bytes=2, one_arena=True).specs


def _footprint(method: str, *, window: int | None = None, page_tokens: int = PAGE_TOKENS) -> KVFootprint:
    archetype = archetype_of(method)
    kind = Full() if window is None else Sliding(window)
    group = GroupSpec(name="draft", kind=kind, page_tokens=page_tokens, slot_bytes=DRAFT_SLOT_BYTES)
    shape = DrafterShape(groups=(group,) if archetype.owns_kv else (), taps=(2, 9, 15) if archetype.reads_taps else ())
    return archetype.declare(method, shape)


def window_cases(method: str) -> dict[str, WindowCase]:
    """Returns the measured layouts and policies by name; drafters use `method`."""
    plain, hybrid = _target(windows=False), _target(windows=True)
    large_and_small = (
        GroupSpec(name="target.full", kind=Full(), page_tokens=LARGE_PAGE_TOKENS, slot_bytes=1_024),
        GroupSpec(name="target.window", kind=Sliding(SMALL_WINDOW), page_tokens=SMALL_PAGE_TOKENS, slot_bytes=4_096),
    )
    own_window = _footprint(method, window=SMALL_WINDOW, page_tokens=SMALL_PAGE_TOKENS)
    return {
        "plain": WindowCase(layout=KVLayout(target=plain)),
        "5:1, dense": WindowCase(layout=KVLayout(target=hybrid), against="plain"),
        "5:1, tail": WindowCase(layout=KVLayout(target=hybrid), retention="tail", against="plain"),
        "5:1, every 2,048": WindowCase(layout=KVLayout(target=hybrid), retention="2048", against="plain"),
        "plain, drafter": WindowCase(layout=KVLayout(target=plain, footprint=_footprint(method))),
        "5:1, dense, drafter": WindowCase(
            layout=KVLayout(target=hybrid, footprint=_footprint(method)), against="plain, drafter"
        ),
        "5:1, tail, drafter": WindowCase(
            layout=KVLayout(target=hybrid, footprint=_footprint(method)), retention="tail", against="plain, drafter"
        ),
        "256 and 64 a page, drafter with a window": WindowCase(
            layout=KVLayout(target=large_and_small, footprint=own_window), against="plain, drafter"
        ),
    }


# ---- one long prompt -------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class LongPrompt:
    """Milliseconds that the KV manager takes for one prompt: computed in chunks, then looked up again."""

    miss_ms: float
    """Time to hash and search a prompt that is not cached."""
    keep_ms: float
    """Time for its chunks and its end: reserve, publish, free behind windows."""
    hit_ms: float
    """Time to search it again, with its hashes known."""
    shared_ms: float
    """Time to search a prompt that shares its first three quarters."""
    total_ms: float


def measure_prompt(case: WindowCase, tokens: int, random: Random) -> LongPrompt:
    layout = case.layout
    pages = tuple(3 * -(-tokens // PAGE_TOKENS) * len(layout.groups) for _ in layout.arena_page_bytes)
    config = KVConfig(arena_pages=pages, retention=Retention.of(case.retention), step_tokens=CHUNK_TOKENS)
    manager, draft = KVManager(layout, config), len(layout.draft_groups) > 0
    prompt = token_array(array("H", random.randbytes(2 * tokens)).tolist())
    gc.collect()
    began = perf_counter()
    sequence = manager.open("first", array("I", prompt), total_tokens=tokens + 1)
    miss, _views = manager.search(sequence, tokens - 1, draft=draft)
    searched = perf_counter()
    manager.admit(sequence)
    sequence.tokens.append(0)
    for end in [*range(CHUNK_TOKENS, tokens, CHUNK_TOKENS), tokens]:
        manager.reserve(sequence, end, layout.footprint.reserve_end(v=end, k=0))
        manager.commit(sequence, end)
    manager.close(sequence)
    kept = perf_counter()
    manager.take_plan(0)
    manager.complete(0)
    sequence = manager.open("second", array("I", prompt), total_tokens=tokens + 1)
    sequence.chain.extend(sequence.tokens, tokens)
    opened = perf_counter()
    hit, _views = manager.search(sequence, tokens - 1, draft=draft)
    found = perf_counter()
    shared = prompt[: tokens * 3 // 4] + token_array([1 << 16] * (tokens - tokens * 3 // 4))
    sequence = manager.open("third", shared, total_tokens=tokens + 1)
    sequence.chain.extend(sequence.tokens, tokens)
    reopened = perf_counter()
    manager.search(sequence, tokens - 1, draft=draft)
    shared_ms = 1e3 * (perf_counter() - reopened)
    least = min(tokens - 1, tokens // layout.alignment * layout.alignment)
    assert miss.end == 0 and hit.end >= least, f"hits end at {miss.end} and {hit.end}, wanted 0 and {least} at least"
    return LongPrompt(
        miss_ms=1e3 * (searched - began),
        keep_ms=1e3 * (kept - searched),
        hit_ms=1e3 * (found - opened),
        shared_ms=shared_ms,
        total_ms=1e3 * (kept - began + found - opened) + shared_ms,
    )


# ---- one text that decodes ---------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """Bytes of target KV that one request holds while it decodes."""

    layout: str
    retention: str
    k: int
    most_bytes: int
    least_possible_bytes: int
    """Least bytes at the same step: every position in full layers, a window and one page in the others."""
    ratio: float
    """Largest ratio of held to least possible bytes over all steps."""
    plain_bytes: int
    """Bytes of the same text if every layer kept everything."""


def arithmetic_minimum(layout: KVLayout, length: int) -> int:
    """Returns the least bytes for `length` tokens: full layers hold all, layers with a window that and one page."""
    least = 0
    for spec in layout.target:
        window = spec.kind.window if isinstance(spec.kind, Sliding) else length
        kept = min(length, window + spec.page_tokens) if spec.kind.slides else length
        least += kept * spec.slot_bytes
    return least


def measure_held(case: WindowCase, name: str, k: int, *, context: int, decoded: int) -> Held:
    """Runs one request through the real scheduler, accepts half of its drafts and counts its pages after every step."""
    layout = case.layout
    roomy = KVConfig(
        arena_pages=(1 << 20,) * len(layout.arena_page_bytes),
        retention=Retention.of(case.retention),
        step_tokens=CHUNK_TOKENS,
    )
    pages = [count + 1 for count in worst_case_pages(layout, roomy, context + decoded + 1, k, draft=True)]
    manager = KVManager(layout, KVConfig(arena_pages=tuple(pages), retention=roomy.retention, step_tokens=CHUNK_TOKENS))
    scheduler = Scheduler(SchedulerConfig(max_num_batched_tokens=CHUNK_TOKENS, max_chunk_tokens=CHUNK_TOKENS), manager)
    scheduler.add(RequestSpec(id="text", prompt=list(range(1, context + 1)), max_tokens=decoded, k=k))
    worst, most, least, length = 0.0, 0, 1, context
    while scheduler.requests:
        plan = scheduler.schedule()
        tokens = tuple(tuple([1] * (1 + part.drafts // 2)) if part.samples else () for part in plan.scheduled)
        proposed = tuple(part.propose for part in plan.scheduled)
        scheduler.commit(plan, Verdict(step=plan.step, tokens=tokens, proposed=proposed))
        request = scheduler.requests.get("text")
        if request is None or request.kv.committed < context + WINDOW // 4:
            continue  # windows still cover the prompt's last chunk
        length = request.kv.committed
        held = sum(request.kv.groups[g].num_held * spec.page_bytes for g, spec in enumerate(layout.target))
        minimum = arithmetic_minimum(layout, length)
        if held / minimum > worst:
            worst, most, least = held / minimum, held, minimum
    plain = sum(spec.slot_bytes for spec in layout.target) * length
    return Held(
        layout=name,
        retention=case.retention,
        k=k,
        most_bytes=most,
        least_possible_bytes=least,
        ratio=worst,
        plain_bytes=plain,
    )


# ---- the whole measurement -------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowReport:
    prompt_tokens: int
    context_tokens: int
    prompts: Mapping[str, Sequence[LongPrompt]]
    against: Mapping[str, str | None]
    held: Sequence[Held]

    def to_json(self) -> dict[str, Any]:
        rows = []
        for name, runs in self.prompts.items():
            row: dict[str, Any] = {"case": name, "against": self.against[name]}
            base = self.prompts[self.against[name] or name]
            for field in LongPrompt.__dataclass_fields__:
                row[field] = median(getattr(run, field) for run in runs)
                # Ratio of the minima: other load can only add time.
                row[f"{field}_ratio"] = min(getattr(run, field) for run in runs) / min(
                    getattr(run, field) for run in base
                )
            rows.append(row)
        return {
            "prompt_tokens": self.prompt_tokens,
            "context_tokens": self.context_tokens,
            "long_prompt": rows,
            "ratio_max": max(row["total_ms_ratio"] for row in rows),
            "held": [{field: getattr(held, field) for field in Held.__dataclass_fields__} for held in self.held],
        }


def measure_windows(
    method: str,
    k: int,
    *,
    prompt_tokens: int,
    rounds: int,
    context: int = CONTEXT_TOKENS,
    decoded: int = DECODED_TOKENS,
    progress: Callable[[str], None] = lambda what: None,
) -> WindowReport:
    cases = window_cases(method)
    prompts: dict[str, list[LongPrompt]] = {name: [] for name in cases}
    random = Random(2)
    for number in range(rounds):
        progress(f"round {number + 1}: windows, a prompt of {prompt_tokens:,} tokens")
        for _ in range(PROMPTS_PER_ROUND):
            for name, case in cases.items():
                prompts[name].append(measure_prompt(case, prompt_tokens, random))
    held = [
        measure_held(case, name, drafts, context=context, decoded=decoded)
        for name, case in cases.items()
        for drafts in ((0, k) if case.layout.footprint is not NO_DRAFTER else (0,))
        if case.against is not None and case.layout.target == cases["5:1, dense"].layout.target
    ]
    return WindowReport(
        prompt_tokens=prompt_tokens,
        context_tokens=context,
        prompts=prompts,
        against={name: case.against for name, case in cases.items()},
        held=held,
    )
