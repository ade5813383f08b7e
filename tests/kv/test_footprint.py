"""The contract: the table of drafters, what is derived from it, and every contradiction refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from tests.kv.fakes import ARCHETYPES_WITH_KV, drafter, full

from outrider.errors import ConfigError, FootprintError
from outrider.kv import NO_DRAFTER, Interval, KVFootprint, Proposing
from outrider.kv.archetypes import ARCHETYPES, DrafterShape

NUMBERS = range(1, 9)


@dataclass(frozen=True)
class Column:
    """One column of the table, for k > 0; with k = 0 every count is 0."""

    passes: Callable[[int], int]
    query_len: Callable[[int], int]
    scratch_ahead: Callable[[int], int]
    written: Callable[[int], int]
    durable_lead: int
    reach: int
    taps: bool
    keeps_accepted: bool
    feed_reads_kv: bool
    rebuild: bool


NOTHING_OWNED = Column(lambda k: 0, lambda k: 0, lambda k: 0, lambda k: 0, 0, 0, False, False, False, False)
ONE_LAYER_AHEAD = Column(lambda k: k, lambda k: 1, lambda k: k, lambda k: k - 1, 0, 1, True, False, False, False)
ONE_HIDDEN_STATE = replace(NOTHING_OWNED, passes=lambda k: 1, query_len=lambda k: 1, taps=True)
TABLE = {
    "nothing": NOTHING_OWNED,
    "lookup": NOTHING_OWNED,
    "heads": ONE_HIDDEN_STATE,
    "chain_from_tokens": Column(lambda k: k, lambda k: 1, lambda k: k, lambda k: k, 1, 0, False, True, True, True),
    "chain_from_taps": ONE_LAYER_AHEAD,
    "block_from_taps": Column(
        lambda k: 1, lambda k: k + 1, lambda k: k + 1, lambda k: k + 1, 0, 0, True, False, False, False
    ),
}


def test_the_table_has_a_column_for_every_archetype() -> None:
    assert TABLE.keys() == ARCHETYPES.keys()


@pytest.mark.parametrize("archetype", TABLE)
def test_declaration_is_its_column_of_the_table(archetype: str) -> None:
    column, footprint = TABLE[archetype], drafter(archetype)
    assert footprint.name == ("none" if archetype == "nothing" else archetype)
    assert footprint.durable_lead == column.durable_lead
    assert footprint.token_reach == column.reach
    assert bool(footprint.taps) == column.taps
    assert footprint.keeps_accepted == column.keeps_accepted
    assert footprint.feed_reads_kv == column.feed_reads_kv
    assert footprint.rebuild == column.rebuild
    assert bool(footprint.groups) == (archetype in ARCHETYPES_WITH_KV)
    for k in NUMBERS:
        assert footprint.passes(k) == column.passes(k)
        assert footprint.query_len(k) == column.query_len(k)
        assert footprint.draft_rows(k) == column.passes(k) * column.query_len(k)
        assert footprint.scratch_ahead(k) == column.scratch_ahead(k)
        assert footprint.slots_written(k) == column.written(k)
    for v in (0, 1, 15, 16, 1000):
        assert footprint.durable_end(v) == v + column.durable_lead


@pytest.mark.parametrize("archetype", TABLE)
def test_proposing_nothing_costs_nothing(archetype: str) -> None:
    footprint = drafter(archetype)
    counts = (footprint.passes, footprint.query_len, footprint.draft_rows, footprint.scratch_ahead)
    assert [count(0) for count in (*counts, footprint.slots_written)] == [0] * 5
    assert footprint.scratch(50, 0).empty


@pytest.mark.parametrize("archetype", ARCHETYPES_WITH_KV)
@pytest.mark.parametrize("k", NUMBERS)
def test_everything_that_a_step_writes_is_reserved(archetype: str, k: int) -> None:
    footprint, v = drafter(archetype), 40
    end = footprint.reserve_end(v=v, k=k)
    assert end == v + footprint.scratch_ahead(k)
    scratch = footprint.scratch(v, k)
    assert scratch.end == v + TABLE[archetype].written(k) <= end
    assert footprint.durable_end(v) <= end
    assert scratch.start in (v, footprint.durable_end(v))


@pytest.mark.parametrize("k", NUMBERS)
def test_a_block_of_few_drafts_has_the_rows_it_was_trained_with(k: int) -> None:
    """Everything that a block costs and writes follows from its rows, not from what is taken of it."""
    footprint, rows = drafter("block_from_taps", block_sizes=(6,)), max(k + 1, 6)
    assert footprint.passes(k) == 1
    assert footprint.query_len(k) == footprint.draft_rows(k) == rows
    assert footprint.scratch_ahead(k) == footprint.slots_written(k) == rows
    assert footprint.scratch(40, k) == Interval(40, 40 + rows)
    assert footprint.reserve_end(v=40, k=k) == 40 + rows


def test_a_block_ends_at_the_drafters_limit() -> None:
    footprint = drafter("block_from_taps", max_len=100, block_sizes=(6,))
    for v, k, rows in ((93, 3, 6), (94, 3, 6), (95, 3, 5), (96, 3, 4), (97, 2, 3), (98, 1, 2), (99, 0, 0)):
        assert footprint.fit(k=3, v=v, max_model_len=4096, remaining_tokens=9) == k
        assert footprint.scratch(v, k).size == rows
        assert footprint.scratch(v, k).end <= footprint.reserve_end(v=v, k=k) <= 100
    assert footprint.scratch_ahead(0) == 0


@pytest.mark.parametrize("max_len", [None, 100, 200])
def test_no_block_reaches_past_the_models_limit(max_len: int | None) -> None:
    """Where the memory allows less than drafter and model would, nothing shortens a block: it is not begun."""
    footprint = drafter("block_from_taps", max_len=max_len, block_sizes=(6,))
    found = [footprint.fit(k=3, v=v, max_model_len=100, remaining_tokens=9) for v in range(93, 99)]
    assert found == ([3, 3, 3, 3, 2, 1] if max_len == 100 else [3, 3, 0, 0, 0, 0])


def test_reservation_without_proposing_still_holds_the_durable_lead() -> None:
    assert drafter("chain_from_tokens").reserve_end(v=16, k=0) == 17
    assert drafter("chain_from_taps").reserve_end(v=16, k=0) == 16
    assert drafter("lookup").reserve_end(v=16, k=5) == drafter("heads").reserve_end(v=16, k=5) == 0
    assert NO_DRAFTER.reserve_end(v=16, k=0) == 0


# ---- fit -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("archetype", TABLE)
@pytest.mark.parametrize("max_len", [None, 20, 25])
def test_fit_is_the_largest_k_that_meets_all_three_limits(archetype: str, max_len: int | None) -> None:
    footprint = drafter(archetype, max_len=max_len)
    # A drafter that stores nothing has no limit of its own.
    limited = footprint.max_len is not None and footprint.groups
    drafter_limit = footprint.max_len if limited else 10**9
    for k in range(6):
        for v in range(28):
            for model_limit in (22, 30):
                for remaining in (0, 1, 2, 4, 50):
                    meets = [
                        drafts
                        for drafts in range(k + 1)
                        if archetype != "nothing"
                        and v + footprint.scratch_ahead(drafts) <= drafter_limit
                        and v + 1 + drafts <= model_limit
                        and drafts < remaining
                    ]
                    found = footprint.fit(k=k, v=v, max_model_len=model_limit, remaining_tokens=remaining)
                    assert found == max(meets, default=0), (k, v, model_limit, remaining)


@pytest.mark.parametrize("archetype", ARCHETYPES_WITH_KV)
def test_nothing_is_stored_past_the_drafters_limit(archetype: str) -> None:
    footprint = drafter(archetype, max_len=100)
    for v in range(90, 130):
        assert footprint.durable_end(v) <= 100
        assert footprint.reserve_end(v=v, k=0) <= 100
        k = footprint.fit(k=5, v=v, max_model_len=4096, remaining_tokens=1000)
        if k:
            assert footprint.scratch(v, k).end <= footprint.reserve_end(v=v, k=k) <= 100
    assert footprint.durable_end(200) == 100


def test_backlog_is_what_could_be_stored_but_was_not_fed() -> None:
    footprint = drafter("chain_from_tokens", max_len=100)
    for durable_end, v, backlog in ((10, 40, 30), (41, 40, 0), (90, 140, 10), (100, 140, 0)):
        assert footprint.backlog(durable_end=durable_end, v=v) == backlog


# ---- feed ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("archetype", ARCHETYPES_WITH_KV)
@pytest.mark.parametrize("proposed", range(6))
def test_feeding_closes_every_hole_and_rewrites_nothing_that_was_kept(archetype: str, proposed: int) -> None:
    """Slot by slot: which ones were written from tokens that then turned out to be committed?"""
    footprint, v = drafter(archetype), 20
    durable = set(range(footprint.durable_end(v)))
    for accepted in range(proposed + 1):
        kept = set()
        if footprint.keeps_accepted:
            # The chain's scratch at v + i was written from draft i, and drafts 1..accepted were right.
            kept = {p for p in range(*footprint.scratch(v, proposed)) if p - v <= accepted}
        after = v + 1 + accepted
        feed = footprint.feed(durable_end=footprint.durable_end(v), v=after, accepted=accepted, proposed=proposed)
        missing = set(range(footprint.durable_end(after))) - durable - kept
        assert set(range(*feed)) == missing, (accepted, feed)


# ---- contradictions ------------------------------------------------------------------------------------

GROUPS = (full("draft"),)
FROM_TOKENS = {"proposing": Proposing.CHAIN, "groups": GROUPS, "rebuild": True}
FROM_TAPS = {"proposing": Proposing.CHAIN, "groups": GROUPS, "taps": (1,)}
ON_HEADS = {"proposing": Proposing.HEADS, "taps": (5,)}
IN_BLOCKS = {"proposing": Proposing.BLOCK, "groups": GROUPS, "taps": (1,), "scratch_extra": 1}

CONTRADICTIONS: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    ("negative scratch", FROM_TOKENS | {"scratch_extra": -1}, ("scratch_extra", "-1")),
    ("negative lead", FROM_TOKENS | {"durable_lead": -1}, ("durable_lead", "-1")),
    ("negative reach", FROM_TAPS | {"token_reach": -1}, ("token_reach", "-1")),
    ("a limit of nothing", FROM_TAPS | {"max_len": 0}, ("max_len", "at least 1")),
    ("two groups of one name", FROM_TAPS | {"groups": GROUPS * 2}, ("same name", "draft")),
    (
        "lookup with groups",
        {"proposing": Proposing.LOOKUP, "groups": GROUPS},
        ("reads and writes no KV", "groups"),
    ),
    ("lead past the last sampled token", FROM_TOKENS | {"durable_lead": 2}, ("durable_lead 2", "use 0 or 1")),
    ("lead and reach", FROM_TAPS | {"durable_lead": 1, "token_reach": 1}, ("not sampled yet", "stops at v")),
    ("reach of two", FROM_TAPS | {"token_reach": 2}, ("token_reach 2", "not sampled yet")),
    ("rebuilt although it reads taps", FROM_TAPS | {"rebuild": True}, ("rebuild", "taps", "one or the other")),
    ("no taps and no rebuild", FROM_TAPS | {"taps": ()}, ("no taps", "rebuild=True")),
    ("rebuilt although it reaches", FROM_TOKENS | {"token_reach": 1}, ("token ids alone", "later token")),
    ("a block that keeps", IN_BLOCKS | {"keeps_accepted": True}, ("masks", "keeps_accepted=False")),
    ("taps and keeps", FROM_TAPS | {"keeps_accepted": True}, ("taps", "keeps_accepted=False")),
    ("a block without the bonus slot", IN_BLOCKS | {"scratch_extra": 0}, ("scratch_ahead(1)", "raise scratch_extra")),
    (
        "a block longer than those it was trained with, without the bonus slot",
        IN_BLOCKS | {"scratch_extra": 0, "block_sizes": (4, 9)},
        ("scratch_ahead(9)", "raise scratch_extra"),
    ),
    ("rows of a block in a chain", FROM_TAPS | {"block_sizes": (4,)}, ("block_sizes are (4,)", "blocks")),
    ("sizes of blocks that fall", IN_BLOCKS | {"block_sizes": (8, 4)}, ("block_sizes must ascend", "(8, 4)")),
    ("fewer rows than none", IN_BLOCKS | {"block_sizes": (-1,)}, ("block_sizes", "-1")),
    ("passes without groups", {"proposing": Proposing.CHAIN}, ("chain", "declare the groups")),
    ("a block without groups", {"proposing": Proposing.BLOCK}, ("block", "declare the groups")),
    ("heads with groups", ON_HEADS | {"groups": GROUPS}, ("heads reads and writes no KV", "drop the groups")),
    ("heads without a hidden state", {"proposing": Proposing.HEADS}, ("hidden state", "taps")),
    ("heads that reach ahead", ON_HEADS | {"token_reach": 1}, ("token_reach", "no groups")),
] + [
    (f"{field} without groups", {"proposing": Proposing.LOOKUP, field: value}, (field, "no groups"))
    for field, value in {
        "scratch_extra": 1,
        "block_sizes": (1,),
        "durable_lead": 1,
        "token_reach": 1,
        "taps": (3,),
        "keeps_accepted": True,
        "feed_reads_kv": True,
        "rebuild": True,
    }.items()
]


@pytest.mark.parametrize(("fields", "words"), [c[1:] for c in CONTRADICTIONS], ids=[c[0] for c in CONTRADICTIONS])
def test_contradiction_is_refused_with_its_reason(fields: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(FootprintError) as refused:
        KVFootprint(name="mine", **fields)
    assert isinstance(refused.value, ConfigError)
    for word in ("mine", *words):
        assert word in str(refused.value)


@pytest.mark.parametrize("fields", [FROM_TOKENS, FROM_TAPS, IN_BLOCKS, ON_HEADS, {"proposing": Proposing.LOOKUP}])
def test_what_the_contradictions_start_from_is_fine(fields: dict[str, Any]) -> None:
    assert KVFootprint(name="mine", **fields).name == "mine"


def test_a_shape_that_lacks_what_its_archetype_needs_is_refused() -> None:
    for archetype in ("heads", *ARCHETYPES_WITH_KV):
        with pytest.raises(FootprintError):
            ARCHETYPES[archetype].declare("mine", DrafterShape())
    with pytest.raises(FootprintError):
        ARCHETYPES["chain_from_taps"].declare("mine", DrafterShape(groups=GROUPS))
    assert ARCHETYPES["lookup"].declare("mine", DrafterShape(groups=GROUPS)).groups == ()
