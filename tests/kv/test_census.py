"""The state of every page, as people see it."""

from __future__ import annotations

import re

from tests.engine.tiny import first_layers, tiny_draft_model, tiny_engine, tiny_model

from outrider.kv.census import run_lengths, take_census
from outrider.sampling import SamplingParams


def states(runs: str) -> str:
    """Written out again."""
    return "".join(state * int(count) for count, state in re.findall(r"(\d+)(\D)", runs))


def test_runs_are_written_shortly() -> None:
    assert run_lengths(list("kffffhhs")) == "1k4f2h1s"
    assert states("1k4f2h1s") == "kffffhhs"


def test_every_page_is_counted_once_in_the_state_it_is_in() -> None:
    model = tiny_model()
    engine = tiny_engine(model, drafter=tiny_draft_model(model, first_layers(model, 1)), k=4)
    kv = engine.scheduler.kv
    assert all(set(states(arena.states)) == {"k", "f"} for arena in take_census(kv).arenas)
    engine.add_request("a", list(range(40)), SamplingParams(n=3, max_tokens=60, seed=1))
    for _ in range(6):
        engine.step()
    census = take_census(kv)
    for number, arena in enumerate(census.arenas):
        seen = states(arena.states)
        pages = kv.pool.arenas[number]
        assert len(seen) == arena.pages == pages.num_pages
        assert seen[0] == "k"
        assert seen.count("f") == pages.num_free
        assert seen.count("c") == pages.num_cached
        assert seen.count("s") == sum(holders > 1 for holders in pages.refs)
        assert len(seen) - 1 - seen.count("f") - seen.count("c") == pages.num_held
    assert sum(group.held for group in census.groups) == sum(
        state.num_held for sequence in kv.sequences.values() for state in sequence.groups
    )
    # Pages that only drafts are written to, past what is committed.
    assert any("x" in states(arena.states) for arena in census.arenas) or any(
        sequence.committed % 16 < 11 for sequence in kv.sequences.values()
    )
    engine.abort("a")
    engine.reset_prefix_cache()
    assert all(set(states(arena.states)) == {"k", "f"} for arena in take_census(kv).arenas)
