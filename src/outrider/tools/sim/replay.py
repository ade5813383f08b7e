"""Traces: one file per failure, with the scenario, the mutation if any, and what went wrong; it replays exactly."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from outrider.errors import TraceError
from outrider.tools.sim.campaign import run_scenario
from outrider.tools.sim.mutation_table import MUTATIONS, mutation_named
from outrider.tools.sim.plain import read
from outrider.tools.sim.reading import read_scenario
from outrider.tools.sim.scenario import RequestDraw, Scenario
from outrider.tools.sim.world import Failure, Result

FORMAT = 1


@dataclass(frozen=True)
class Trace:
    scenario: Scenario
    mutation: str | None
    failure: Failure | None
    digest: str

    def write(self, path: Path) -> None:
        data = {
            "format": FORMAT,
            "mutation": self.mutation,
            "failure": asdict(self.failure) if self.failure else None,
            "digest": self.digest,
            "scenario": self.scenario.as_json(),
        }
        path.write_text(json.dumps(data, indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> Trace:
        try:
            data: Any = json.loads(path.read_text())
        except OSError as error:
            raise TraceError(f"cannot read {path}: {error.strerror}; give the file that a failing run wrote") from error
        except ValueError as error:
            raise TraceError(f"{path} is not a trace: {error}; give the file that a failing run wrote") from error
        if not isinstance(data, dict) or data.get("format") != FORMAT or not isinstance(data.get("scenario"), dict):
            raise TraceError(f"{path} is not a trace of format {FORMAT}; was it written by another version?")
        failure, mutation, digest = data.get("failure"), data.get("mutation"), data.get("digest", "")
        for name, value in (("mutation", mutation), ("digest", digest)):
            if not isinstance(value, str) and not (name == "mutation" and value is None):
                raise TraceError(f"{path}: {name} must be text, got {value!r}; give the file that a failing run wrote")
        return cls(
            scenario=read_scenario(data["scenario"], f"{path}: scenario"),
            mutation=mutation,
            failure=read(Failure, failure, f"{path}: failure") if failure is not None else None,
            digest=digest,
        )


def mutated(name: str | None) -> AbstractContextManager[None]:
    """Returns a context in which the mutation is applied; None applies nothing."""
    if name is None:
        return nullcontext()
    mutation = mutation_named(name)
    if mutation is None:
        raise TraceError(f"unknown mutation {name!r}; known: {', '.join(m.name for m in MUTATIONS)}")
    return mutation.applied()


def record(scenario: Scenario, mutation: str | None = None) -> tuple[Result, Trace]:
    """Run a scenario and describe the run so that it can be repeated."""
    with mutated(mutation):
        result = run_scenario(scenario)
    return result, Trace(scenario, mutation, result.failure, result.digest)


def replay(trace: Trace) -> tuple[Result, bool]:
    """Run a trace again. Returns the result, and whether the run did exactly what was recorded."""
    result, again = record(trace.scenario, trace.mutation)
    return result, again.failure == trace.failure and again.digest == trace.digest


def shrink(trace: Trace, progress: Callable[[Scenario], None] | None = None) -> Trace:
    """Make the scenario smaller for as long as it fails in the same way."""
    best = trace
    smaller_found = True
    while smaller_found:
        smaller_found = False
        for scenario in _smaller(best.scenario):
            candidate = _try(scenario, trace)
            if candidate is not None:
                best, smaller_found = candidate, True
                if progress is not None:
                    progress(scenario)
                break
    return best


def _try(scenario: Scenario, original: Trace) -> Trace | None:
    _result, candidate = record(scenario, original.mutation)
    if candidate.failure is None or original.failure is None:
        return None
    same = (candidate.failure.kind, candidate.failure.invariant) == (
        original.failure.kind,
        original.failure.invariant,
    )
    return candidate if same else None


def _smaller(scenario: Scenario) -> Iterator[Scenario]:
    """Yields simpler scenarios, the boldest simplification first."""
    requests = scenario.requests
    for size in (len(requests) // 2, 1):
        for start in range(0, len(requests), max(1, size)):
            rest = requests[:start] + requests[start + max(1, size) :]
            if rest and len(rest) < len(requests):
                yield _with_requests(scenario, rest)
    for number, fault in enumerate(scenario.faults):
        yield replace(scenario, faults=tuple(f for n, f in enumerate(scenario.faults) if n != number or f is not fault))
    if scenario.transfer_faults:
        yield replace(scenario, transfer_faults=0.0)
    if scenario.tier_probability:
        yield replace(scenario, tier_probability=0.0)
    if scenario.host_probability:
        yield replace(scenario, host_probability=0.0)
    if scenario.retention != "dense":
        yield replace(scenario, retention="dense")
    if scenario.step_in_flight:
        yield replace(scenario, step_in_flight=False)
    for number, request in enumerate(requests):
        for simpler in _simpler_requests(request):
            yield _with_requests(scenario, (*requests[:number], simpler, *requests[number + 1 :]))
    if scenario.max_num_seqs > 1:
        yield replace(scenario, max_num_seqs=scenario.max_num_seqs - 1)


def _simpler_requests(request: RequestDraw) -> Iterator[RequestDraw]:
    if len(request.prompt) > 1:
        yield request.with_prompt(request.prompt[: len(request.prompt) // 2])
        yield request.with_prompt(request.prompt[:-1])
    for number in range(len(request.media)):
        yield replace(request, media=request.media[:number] + request.media[number + 1 :])
    if request.adapter:
        yield replace(request, adapter="")
    if request.max_tokens > 1:
        yield replace(request, max_tokens=request.max_tokens // 2)
    if request.n > 1:
        yield replace(request, n=1)
    if request.k > 1:
        yield replace(request, k=request.k - 1)
    if request.at:
        yield replace(request, at=0)
    if request.priority:
        yield replace(request, priority=0)


def _with_requests(scenario: Scenario, requests: tuple[RequestDraw, ...]) -> Scenario:
    names = {request.id for request in requests}
    kept = tuple(fault for fault in scenario.faults if fault.kind != "abort" or fault.target in names)
    return replace(scenario, requests=requests, faults=kept)
