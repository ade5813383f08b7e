"""What steps cost on this machine: measured once for a model and a drafter, and kept in the user's cache directory."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from outrider import __version__
from outrider.backends import Progress
from outrider.engine.engine import Engine
from outrider.errors import OutriderError
from outrider.runner.runner import StepWork
from outrider.sampling import SamplingParams
from outrider.scheduler.pacing.costs import CostRecord
from outrider.scheduler.pacing.curves import KNOTS
from outrider.scheduler.pacing.pacer import Pacer

logger = logging.getLogger("outrider.engine")

BATCHES = (1, 2, 4, 8, 16, 32, 64)
MOST_ROWS = 128
"""Most rows of a measured step, of the target or of a drafter's pass."""
REPETITIONS = 4
"""Number of steps of each kind. The first one may compile kernels, so it does not count."""
PROMPT_TOKENS = 4
LONG_PROMPT_TOKENS = 1024
LONG_CONTEXT = 512
"""Positions per request from which on a context is long."""
WEIGHT = 25.0
"""Number of observations that a measured cost counts for."""
CURVES = ("target", "draft", "feed", "host", "drafting_host")
MEASURING = "measuring the cost of steps (once for this machine and model)"


@dataclass(frozen=True, slots=True)
class Sample:
    work: StepWork
    host_s: float


def know_costs(engine: Engine, progress: Progress | None = None) -> None:
    """Tells the engine's pacer what steps cost, as it was measured before; otherwise measures it. Called while the
    engine has no requests."""
    pacer = engine.pacer
    if pacer is None:
        return
    path = _path(engine)
    record = _read(path)
    if record is None:
        samples = list(_measure(engine, pacer, progress))
        if not samples:
            return
        record = fitted(samples)
        _write(path, record)
    pacer.reset()
    pacer.costs.restore(record, weight=WEIGHT)


# ---- measuring -----------------------------------------------------------------------------------------


def _measure(engine: Engine, pacer: Pacer, progress: Progress | None) -> Iterator[Sample]:
    """Runs steps of known shapes, and leaves no trace of them."""
    batches = [count for count in BATCHES if count <= min(engine.config.max_num_seqs, MOST_ROWS)]
    limit = engine.max_model_len
    try:
        for number, count in enumerate(batches):
            if progress is not None:
                progress(MEASURING, number, len(batches))
            if not _start(engine, count, limit):
                break
            yield from _steps_of_batch(engine, pacer, count)
            _drop_all(engine)
        _drop_all(engine)
        yield from _long_context(engine, pacer, limit)
    finally:
        _drop_all(engine)
        pacer.forced = None
        pacer.reset()
        engine.reset_prefix_cache()
        engine.clear_counts()
    if progress is not None:
        progress(MEASURING, len(batches), len(batches))


def _start(engine: Engine, count: int, limit: int) -> bool:
    """Adds so many requests and computes their prompts; False if there is no room for them."""
    pacer = engine.pacer
    assert pacer is not None
    pacer.forced = (0, 0)
    for number in range(count):
        prompt = [(1 + 7 * number + place) % engine.model.spec.vocab_size for place in range(PROMPT_TOKENS)]
        params = SamplingParams(temperature=0, max_tokens=limit - PROMPT_TOKENS, ignore_eos=True)
        try:
            engine.add_request(f"cost-{number}", prompt, params, compute_prompt=True)
        except OutriderError:
            return False
    requests, done = engine.scheduler.requests, 0
    while done < count * PROMPT_TOKENS:
        engine.step()
        before, done = done, sum(min(PROMPT_TOKENS, request.kv.committed) for request in requests.values())
        if done <= before:
            # Those that run leave no room for the others, and may do so until they end.
            return False
    return True


def _steps_of_batch(engine: Engine, pacer: Pacer, count: int) -> Iterator[Sample]:
    footprint = engine.scheduler.kv.layout.footprint
    yield from _steps(engine, pacer, 0, 0)
    for size in pacer.sizes:
        if count * footprint.query_len(size) > MOST_ROWS:
            continue
        for verified in sorted({0, 1, 3, size}):
            if verified <= size and count * (1 + verified) <= MOST_ROWS:
                yield from _steps(engine, pacer, verified, size)


def _steps(engine: Engine, pacer: Pacer, verified: int, proposed: int) -> Iterator[Sample]:
    """Runs steps that verify and propose so many drafts for each request."""
    # What the first step verifies was proposed by another kind of step.
    pacer.forced = (verified, proposed)
    for repetition in range(REPETITIONS + 1):
        if len(engine.scheduler.requests) == 0:
            return
        engine.step()
        seen = pacer.last_seen
        if repetition > 1 and seen is not None and not seen[0].prompt_rows:
            shape, times = seen
            host_s = times.total_s - times.target_s - times.draft_s
            yield Sample(StepWork(shape, times.target_s, times.draft_s), host_s)


def _long_context(engine: Engine, pacer: Pacer, limit: int) -> Iterator[Sample]:
    count = min(LONG_PROMPT_TOKENS, limit // 2)
    if count < LONG_CONTEXT:
        return
    pacer.forced = (0, 0)
    prompt = [(3 + 5 * place) % engine.model.spec.vocab_size for place in range(count)]
    try:
        params = SamplingParams(temperature=0, max_tokens=REPETITIONS + 4, ignore_eos=True)
        engine.add_request("cost-long", prompt, params, compute_prompt=True)
    except OutriderError:
        return
    while any(request.kv.committed < count for request in engine.scheduler.requests.values()):
        engine.step()
    yield from _steps(engine, pacer, 0, 0)


def _drop_all(engine: Engine) -> None:
    for name in [live.id for live in engine.live_requests]:
        engine.abort(name)


# ---- from samples to costs -----------------------------------------------------------------------------


def fitted(samples: Sequence[Sample]) -> CostRecord:
    """Returns the costs that explain the samples. A step may be held up by anything, so fast ones count."""
    per_key_s = _per_key(samples)
    short = [sample for sample in samples if not _is_long(sample)]
    target = _fastest(
        (each.work.shape.requests, each.work.shape.rows, each.work.target_s - per_key_s * each.work.shape.keys)
        for each in short
    )
    per_request_s = _per_request(target)
    by_rows: dict[int, list[float]] = defaultdict(list)
    for (requests, rows), seconds in target.items():
        by_rows[rows].append(max(1e-6, seconds - per_request_s * requests))
    feed = _fastest((0, each.work.shape.fed, each.work.draft_s) for each in short if not each.work.shape.passes)
    passes: dict[int, float] = {}
    for each in short:
        sizes = set(each.work.shape.passes)
        if len(sizes) == 1:
            number = sizes.pop()
            fed_s = feed.get((0, each.work.shape.requests), 0.0)
            seconds = max(1e-6, (each.work.draft_s - fed_s) / len(each.work.shape.passes))
            passes[number] = min(passes.get(number, seconds), seconds)
    host: dict[bool, dict[int, list[float]]] = {False: defaultdict(list), True: defaultdict(list)}
    for each in short:
        shape = each.work.shape
        host[shape.rows > shape.requests or bool(shape.passes)][shape.requests].append(each.host_s)
    curves = {
        "target": {rows: min(values) for rows, values in by_rows.items()},
        "feed": {fed: seconds for (_none, fed), seconds in feed.items()},
        "draft": passes,
        "host": {requests: median(values) for requests, values in host[False].items()},
        "drafting_host": {requests: median(values) for requests, values in host[True].items()},
    }
    return CostRecord({name: _rising(values) for name, values in curves.items()}, per_request_s, per_key_s)


def _rising(values: Mapping[int, float]) -> list[tuple[int, float]]:
    """Returns the values at knots. None takes longer than a larger one: then it was held up."""
    found: list[tuple[int, float]] = []
    least = float("inf")
    for count in sorted(values, reverse=True):
        if count in KNOTS and values[count] > 0.0:
            least = min(least, values[count])
            found.append((count, least))
    return found[::-1]


def _is_long(sample: Sample) -> bool:
    return sample.work.shape.keys >= LONG_CONTEXT * sample.work.shape.requests


def _per_key(samples: Sequence[Sample]) -> float:
    """Returns what a further position of context costs, from single requests with a short and with a long one."""
    alone = [sample.work for sample in samples if sample.work.shape.requests == sample.work.shape.rows == 1]
    long = [work for work in alone if work.shape.keys >= LONG_CONTEXT]
    short = [work for work in alone if work.shape.keys < LONG_CONTEXT]
    if not long or not short:
        return 0.0
    slow, fast = min(long, key=lambda work: work.target_s), min(short, key=lambda work: work.target_s)
    return max(0.0, (slow.target_s - fast.target_s) / (slow.shape.keys - fast.shape.keys))


def _fastest(found: Iterator[tuple[int, int, float]]) -> dict[tuple[int, int], float]:
    best: dict[tuple[int, int], float] = {}
    for requests, rows, seconds in found:
        best[requests, rows] = min(best.get((requests, rows), seconds), seconds)
    return best


def _per_request(target: Mapping[tuple[int, int], float]) -> float:
    """Returns what a further request costs in a step of as many rows."""
    slopes = []
    for (requests, rows), seconds in target.items():
        fewer = [other for other, same in target if same == rows and other < requests]
        if fewer:
            least = min(fewer)
            slopes.append((seconds - target[least, rows]) / (requests - least))
    return max(0.0, median(slopes)) if slopes else 0.0


# ---- on disk -------------------------------------------------------------------------------------------


def _path(engine: Engine) -> Path:
    """Returns the file for this machine, model, drafter and the settings that change what steps cost."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    config, pacer = engine.config, engine.pacer
    assert pacer is not None
    facts = {
        "outrider": __version__,
        "torch": torch.__version__,
        "machine": [platform.machine(), _processor(), os.cpu_count()],
        "device": str(engine.runner.device),
        "backend": type(engine.runner.backend).__name__,
        "threads": config.num_threads,
        "dtype": config.dtype,
        "expand_weights": config.expand_weights,
        "model": engine.model.fingerprint,
        "drafter": [engine.scheduler.kv.layout.footprint.name, engine.scheduler.kv.layout.footprint.fingerprint],
        "sizes": list(pacer.sizes),
        "most_requests": min(config.max_num_seqs, BATCHES[-1]),
        "sanitizer": [config.sanitizer, config.sanitizer_level],
    }
    name = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]
    return Path(base) / "outrider" / "step-costs" / f"{name}.json"


def _processor() -> str:
    with suppress(OSError):
        for fact in Path("/proc/cpuinfo").read_text().splitlines():
            if fact.startswith("model name"):
                return fact.partition(":")[2].strip()
    return platform.processor()


def _read(path: Path) -> CostRecord | None:
    try:
        found = json.loads(path.read_text())
        curves = {name: [(int(knot), float(seconds)) for knot, seconds in found["curves"][name]] for name in CURVES}
        record = CostRecord(curves, float(found["per_request_s"]), float(found["per_key_s"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        logger.warning("%s cannot be read and is measured again: %s: %s", path, type(error).__name__, error)
        return None
    sound = all(knot in KNOTS and 0 < seconds < 1e3 for values in curves.values() for knot, seconds in values)
    if sound and curves["target"] and 0 <= record.per_request_s < 1 and 0 <= record.per_key_s < 1:
        return record
    logger.warning("%s says what no step can cost, so it is measured again", path)
    return None


def _write(path: Path, record: CostRecord) -> None:
    """Keeps a measurement for the next start; without a place to write to, the next start measures again."""
    found = {"curves": record.curves, "per_request_s": record.per_request_s, "per_key_s": record.per_key_s}
    unfinished = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            unfinished = file.name
            json.dump(found, file)
        os.replace(unfinished, path)
    except OSError as error:
        logger.info("the cost of steps is not kept: %s", error)
        if unfinished is not None:
            with suppress(OSError):
                os.unlink(unfinished)
