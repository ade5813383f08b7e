"""The state of every page at one moment, for the playground and for people. Reads the pool and the ledger only.

k null page f free      c cached: in the index and not held
h held      s shared: held several times      x scratch: held, nothing in it is durable yet
p released, but a step in flight may touch it      q quarantined
"""

from __future__ import annotations

from itertools import groupby
from typing import NamedTuple

from outrider.kv.intervals import page_count
from outrider.kv.manager import KVManager
from outrider.kv.pages import NULL_PAGE, PageArena

NULL_STATE, FREE, CACHED, HELD, SHARED, SCRATCH, PENDING, QUARANTINED = "kfchsxpq"


class ArenaCensus(NamedTuple):
    page_bytes: int
    pages: int
    states: str
    """States of all pages in order, run-length encoded, such as 1k12h3s40f."""


class GroupCensus(NamedTuple):
    name: str
    arena: int
    kind: str
    """Label of the group's kind: full, or sliding with its window."""
    page_tokens: int
    held: int
    """Number of pages that sequences hold; a shared page counts once for each sequence."""
    published: int


class Census(NamedTuple):
    step: int
    arenas: list[ArenaCensus]
    groups: list[GroupCensus]


def take_census(kv: KVManager) -> Census:
    layout, pool = kv.layout, kv.pool
    states = [_arena_states(arena) for arena in pool.arenas]
    held = [0] * len(layout.groups)
    for sequence in kv.sequences.values():
        for group, state in enumerate(sequence.groups):
            held[group] += state.num_held
            end = sequence.committed if group < layout.num_target else sequence.draft_end
            first_empty = max(page_count(end, layout.groups[group].page_tokens), state.first_page)
            for page in state.pages[first_empty:]:
                if states[layout.arena_of[group]][page] == HELD:
                    states[layout.arena_of[group]][page] = SCRATCH
    for arena, page in pool.pending():
        if pool.arenas[arena].refs[page] == 1:
            states[arena][page] = PENDING
    return Census(
        step=pool.last_completed,
        arenas=[
            ArenaCensus(page_bytes, len(pages), run_lengths(pages))
            for page_bytes, pages in zip(layout.arena_page_bytes, states, strict=True)
        ],
        groups=[
            GroupCensus(
                name=spec.name,
                arena=layout.arena_of[group],
                kind=spec.kind.label,
                page_tokens=spec.page_tokens,
                held=held[group],
                published=pool.arena(group).published.count(group + 1),
            )
            for group, spec in enumerate(layout.groups)
        ],
    )


def _arena_states(arena: PageArena) -> list[str]:
    states = [
        SHARED if holders > 1 else HELD if holders else CACHED if published else FREE
        for holders, published in zip(arena.refs, arena.published, strict=True)
    ]
    states[NULL_PAGE] = NULL_STATE
    for page in arena.quarantined:
        states[page] = QUARANTINED
    return states


def run_lengths(states: list[str]) -> str:
    return "".join(f"{sum(1 for _ in run)}{state}" for state, run in groupby(states))
