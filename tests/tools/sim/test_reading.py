"""Traces are files that people edit: what is wrong with one is said before anything runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outrider.errors import TraceError
from outrider.tools.sim.campaign import run_scenario
from outrider.tools.sim.drawing import draw
from outrider.tools.sim.reading import read_scenario
from outrider.tools.sim.replay import Trace, record, replay


def split_trace() -> dict[str, Any]:
    """A good trace with a peer, faults and drafts, as plain data."""
    for index in range(400):
        scenario = draw(3, index)
        if scenario.split and scenario.faults and scenario.draft and len(scenario.workers) == 2:
            data: dict[str, Any] = json.loads(json.dumps(scenario.as_json()))
            return {"format": 1, "mutation": None, "failure": None, "digest": "", "scenario": data}
    raise AssertionError("no such scenario")


def put(*path: str | int, value: Any) -> Callable[[dict[str, Any]], None]:
    def edit(trace: dict[str, Any]) -> None:
        place: Any = trace
        for step in path[:-1]:
            place = place[step]
        place[path[-1]] = value

    return edit


def duplicate_id(trace: dict[str, Any]) -> None:
    requests = trace["scenario"]["requests"]
    requests[1]["id"] = requests[0]["id"]


def endless_text(trace: dict[str, Any]) -> None:
    trace["scenario"]["max_model_len"] = trace["scenario"]["requests"][0]["max_tokens"] = 10**9


def without(*path: str) -> Callable[[dict[str, Any]], None]:
    def edit(trace: dict[str, Any]) -> None:
        place: Any = trace
        for step in path[:-1]:
            place = place[step]
        del place[path[-1]]

    return edit


BAD: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "too many peer pages": (put("scenario", "peers", 0, "target_pages", value=[4] * 9), "one page size for each of"),
    "draft pages of the peer missing": (
        put("scenario", "peers", 0, "draft_pages", value=[]),
        "peer 'prefill': draft_pages must give one",
    ),
    "peer pages of no tokens": (put("scenario", "peers", 0, "draft_pages", 0, value=0), "at least 1"),
    "unknown role of a peer": (put("scenario", "peers", 0, "role", value="judge"), "role 'judge'; known: prefill, dec"),
    "unknown drafter of a peer": (put("scenario", "peers", 0, "drafter", value="x"), "drafter 'x'; known: same, other"),
    "a peer without a name of its own": (
        put("scenario", "peers", 0, "name", value="decode"),
        "2 workers have the name",
    ),
    "no worker for prompts": (put("scenario", "peers", 0, "role", value="decode"), "no worker computes prompts"),
    "unknown phase": (
        put("scenario", "faults", 0, value={"at": 1, "kind": "abort", "target": "r0", "phase": "lost"}),
        "unknown phase 'lost'",
    ),
    "unknown side": (
        put("scenario", "faults", 0, value={"at": 1, "kind": "stop", "target": "r0", "phase": "held", "side": "left"}),
        "unknown side 'left'",
    ),
    "a phase without a side": (
        put("scenario", "faults", 0, value={"at": 1, "kind": "stop", "target": "r0", "phase": "held"}),
        "say which side",
    ),
    "unknown kind of fault": (
        put("scenario", "faults", 0, "kind", value="flood"),
        "'flood'; known: abort, death, interrupt, reset, stop",
    ),
    "unknown worker": (
        put("scenario", "faults", 0, value={"at": 1, "kind": "death", "target": "moon"}),
        "'moon', which is not here; known: decode, prefill",
    ),
    "abort of an unknown request": (
        put("scenario", "faults", 0, value={"at": 1, "kind": "abort", "target": "ghost"}),
        "'ghost', which is not here",
    ),
    "fault in the past": (
        put("scenario", "faults", 0, value={"at": -1, "kind": "death", "target": "decode"}),
        "negative tick",
    ),
    "vocabulary 0": (put("scenario", "vocabulary", value=0), "vocabulary must be at least 2"),
    "duplicate ids": (duplicate_id, "2 requests have the id"),
    "id of a leg": (put("scenario", "requests", 0, "id", value="a~1"), "'~', which name forks and legs"),
    "id of a fork": (put("scenario", "requests", 0, "id", value="a#1"), "'#' or '~', which name forks"),
    "request in the past": (put("scenario", "requests", 0, "at", value=-3), "negative tick"),
    "unknown policy": (put("scenario", "load_failure", value="x"), "load_failure 'x'; known: recompute, fail"),
    "unknown retention": (put("scenario", "retention", value="some"), "cannot run.*dense, tail, or an interval"),
    "unknown retention of a tier": (put("scenario", "tier_retention", value="0"), "cannot run.*got 0"),
    "host tier of more than all": (
        put("scenario", "host_probability", value=2.0),
        "host_probability must lie",
    ),
    "unknown archetype": (put("scenario", "archetype", value="crystal ball"), "known: nothing, lookup, heads"),
    "no target": (put("scenario", "target", value=[]), "peers|at least one|target_pages must give"),
    "page of no tokens": (put("scenario", "target", 0, "page_tokens", value=0), "cannot run.*page_tokens"),
    "negative window": (put("scenario", "target", 0, "window", value=-4), "cannot run.*window"),
    "fewer rows than requests": (
        put("scenario", "max_num_batched_tokens", value=1),
        "cannot run.*max_num_batched_tokens",
    ),
    "no tokens wanted": (put("scenario", "requests", 0, "max_tokens", value=0), "cannot run.*max_tokens"),
    "empty prompt": (put("scenario", "requests", 0, "prompt", value=[]), "cannot run.*empty"),
    "negative token": (put("scenario", "requests", 0, "prompt", 0, value=-1), "cannot run.*token id"),
    "negative k": (put("scenario", "requests", 0, "k", value=-1), "cannot run.*k must be"),
    "media past the prompt": (put("scenario", "requests", 0, "media", value=[[0, 999, "cat"]]), "cannot run.*media"),
    "media of two parts": (put("scenario", "requests", 0, "media", value=[[0, 1]]), r"media\[0\] must have 3 items"),
    "acceptance above 1": (put("scenario", "acceptance", value=1.5), "acceptance must lie between 0 and 1"),
    "too much memory": (put("scenario", "target", 0, "page_tokens", value=10**9), "at most 256"),
    "too many slots": (endless_text, "make it smaller"),
    "a number beyond JSON": (put("scenario", "requests", 0, "priority", value=10**30), "must not be beyond"),
    "endless slack": (put("scenario", "arena_slack", value=float("inf")), "arena_slack must lie"),
    "one by one with a peer": (put("scenario", "one_by_one", value=True), "leave peers, faults, tiers and forks out"),
    "k as true": (put("scenario", "requests", 1, "k", value=True), r"requests\[1\].k must be a whole number, got True"),
    "request as a number": (put("scenario", "requests", 0, value=7), r"requests\[0\] must be an object"),
    "misspelt field": (put("scenario", "vocabularly", value=3), "did you mean 'vocabulary'"),
    "missing field": (without("scenario", "archetype"), "lacks the field 'archetype'"),
    "missing field of a group": (
        put("scenario", "target", 0, value={"slot_bytes": 1}),
        "lacks the field 'page_tokens'",
    ),
    "mutation as a number": (put("mutation", value=3), "mutation must be text"),
    "digest as a list": (put("digest", value=[]), "digest must be text"),
    "failure as text": (put("failure", value="bad"), "failure must be an object"),
    "failure of wrong types": (
        put("failure", value={"kind": 1, "invariant": None, "message": "", "step": 0}),
        "failure.kind must be text",
    ),
    "scenario as a list": (put("scenario", value=[]), "not a trace of format 1"),
    "other format": (put("format", value=2), "not a trace of format 1"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_trace_that_could_not_run_is_refused_with_a_reason(case: str, tmp_path: Path) -> None:
    edit, says = BAD[case]
    trace = split_trace()
    edit(trace)
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(trace))
    with pytest.raises(TraceError, match=says) as refused:
        Trace.read(path)
    assert "\n" not in str(refused.value)


def test_the_trace_that_those_are_edits_of_is_good(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(split_trace()))
    result, _exact = replay(Trace.read(path))
    assert result.failure is None


def test_whatever_is_drawn_can_be_read_back() -> None:
    for index in range(200):
        scenario = draw(8, index)
        assert read_scenario(json.loads(json.dumps(scenario.as_json()))) == scenario


def test_bytes_that_are_no_text_are_no_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TraceError, match="is not a trace"):
        Trace.read(path)


def test_an_unknown_mutation_in_a_trace_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(split_trace() | {"mutation": "gremlins"}))
    with pytest.raises(TraceError, match="unknown mutation 'gremlins'"):
        replay(Trace.read(path))


def test_every_single_field_of_the_wrong_type_is_refused() -> None:
    """Whatever is put where it does not belong is refused, or runs."""
    good = record(draw(3, 1))[1].scenario.as_json()
    for name in good:
        for wrong in ("x", -1, 0, 1, 1.5, None, True, [], {}, [[]], [None], ["x"], 10**30, 10**9, float("nan")):
            data = json.loads(json.dumps(good | {name: wrong}))
            try:
                scenario = read_scenario(data)
            except TraceError:
                continue
            failure = run_scenario(scenario).failure
            assert failure is None, f"{name} = {wrong!r}: {failure}"
