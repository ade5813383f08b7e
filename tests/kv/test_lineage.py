"""The reports that this project answers, with their own numbers, through the real scheduler."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import pytest
from tests.kv.fakes import (
    ARCHETYPES_WITH_KV,
    Engine,
    Hand,
    drafter,
    full,
    held_pages,
    ids,
    make_manager,
    reference_text,
)

from outrider.kv import BlockTableLists, Interval, KVManager
from outrider.kv.intervals import SlotRun, page_count, pair
from outrider.kv.ledger import Load
from outrider.scheduler import Role

AHEAD = {"lookup": 0, "chain_from_tokens": 3, "chain_from_taps": 3, "block_from_taps": 4}
"""Slots ahead with k = 3."""


def make_engine(archetype: str, *, page: int = 16, max_len: int | None = None, pages: int = 400, **config) -> Engine:
    kv = make_manager(
        full(page=page),
        footprint=drafter(archetype, page=page, max_len=max_len),
        pages=pages,
        max_model_len=4096,
        keep_margin=2,
    )
    return Engine(kv, **config)


def draft_slots(engine: Engine, id: str) -> int:
    """Slots that the request holds in its draft group."""
    kv = engine.kv
    groups = kv.layout.draft_groups
    if not groups:
        return 0
    return len(engine.scheduler.requests[id].kv.groups[groups[0]].pages) * kv.layout.groups[groups[0]].page_tokens


# ---- L1: slots ahead -----------------------------------------------------------------------------------


@pytest.mark.parametrize("archetype", AHEAD)
@pytest.mark.parametrize("prompt", [1, 5, 16, 17])
def test_l1_slots_ahead_are_reserved_at_the_first_prefill_too(archetype: str, prompt: int) -> None:
    """Pages of one slot, so that pages count slots."""
    engine = make_engine(archetype, page=1)
    engine.add("a", ids(prompt), max_tokens=40, k=3)
    plan = engine.scheduler.schedule()
    (row,) = plan.scheduled
    assert (row.start, row.num_rows, row.propose) == (0, prompt, 3)
    assert draft_slots(engine, "a") == (prompt + AHEAD[archetype] if archetype != "lookup" else 0)
    assert len(engine.scheduler.requests["a"].kv.groups[0].pages) == prompt


@pytest.mark.parametrize("archetype", ARCHETYPES_WITH_KV)
def test_l1_a_chunk_that_does_not_propose_reserves_nothing_ahead(archetype: str) -> None:
    engine = make_engine(archetype, page=1, max_num_batched_tokens=16, max_num_seqs=2)
    engine.add("a", ids(30), max_tokens=8, k=3)
    (row,) = engine.scheduler.schedule().scheduled
    assert (row.num_rows, row.propose) == (16, 0)
    assert draft_slots(engine, "a") == engine.kv.layout.footprint.durable_end(16)


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("archetype", ARCHETYPES_WITH_KV)
def test_l1_nothing_ahead_while_loading_and_again_before_the_first_proposing_step(archetype: str, drafts: int) -> None:
    engine = make_engine(archetype, page=1, role=Role.DECODE)
    scheduler = engine.scheduler
    offer = {0: Interval(0, 16), 1: Interval(0, 16)}
    engine.add_handed_over("a", ids(16), offer, drafts=drafts, max_tokens=40, k=3)
    for _ in range(3):
        engine.step()
        assert engine.plans[-1].scheduled == ()
        assert engine.text == {"a": reference_text(ids(16), 1)}
        sequence = scheduler.requests["a"].kv
        assert [len(state.pages) for state in sequence.groups] == [16, 16]
    ((id, loads),) = scheduler.take_loads()
    for load in loads:
        scheduler.load_arrived(id, load)
    plan = scheduler.schedule()
    (row,) = plan.scheduled
    assert (row.start, row.num_rows, row.drafts, row.propose) == (16, 1 + drafts, drafts, 3)
    assert len(sequence.groups[0].pages) == 17 + drafts
    assert len(sequence.groups[1].pages) == 17 + drafts + AHEAD[archetype]


# ---- L2: the first prefill of a block drafter, and its limit --------------------------------------------


def test_l2_the_draft_group_holds_two_pages_after_the_first_schedule() -> None:
    engine = make_engine("block_from_taps")
    engine.add("a", ids(16), max_tokens=40, k=3)
    plan = engine.scheduler.schedule()
    sequence = engine.scheduler.requests["a"].kv
    held = held_pages(engine.kv, sequence, 1)
    assert sorted(held) == [0, 1]
    assert {position // 16 for position in range(16, 20)} <= held.keys()
    assert sorted(held_pages(engine.kv, sequence, 0)) == [0]
    tables = BlockTableLists(2)
    plan.kv.apply_to(tables)
    assert tables.table("a", 1) == list(held.values())


@pytest.mark.parametrize(
    ("archetype", "proposed"),
    [
        ("block_from_taps", [3, 2, 1, 0]),
        ("chain_from_taps", [3, 3, 2, 1]),
        ("chain_from_tokens", [3, 3, 2, 1]),
        ("lookup", [3, 3, 3, 3]),
        ("heads", [3, 3, 3, 3]),
    ],
)
def test_l2_near_its_limit_a_drafter_proposes_what_fits(archetype: str, proposed: list[int]) -> None:
    for length, expected in zip((96, 97, 98, 99), proposed, strict=True):
        engine = make_engine(archetype, max_len=100 if archetype not in ("lookup", "heads") else None)
        engine.add("a", ids(length), max_tokens=40, k=3)
        (row,) = engine.scheduler.schedule().scheduled
        assert row.propose == expected, length
        if archetype == "block_from_taps":
            assert draft_slots(engine, "a") >= min(100, length + expected + 1)


@pytest.mark.parametrize("archetype", ARCHETYPES_WITH_KV)
def test_l2_one_long_request_does_not_change_what_the_others_propose(archetype: str) -> None:
    lengths = {"long": 99, "short": 20, "mid": 90, "past": 150}
    engine = make_engine(archetype, max_len=100)
    for id, length in lengths.items():
        engine.add(id, ids(length, seed=length), max_tokens=40, k=3)
    engine.step()
    proposed = {row.sequence_id: row.propose for row in engine.plans[0].scheduled}
    assert proposed == {"long": 0 if archetype == "block_from_taps" else 1, "short": 3, "mid": 3, "past": 0}
    engine.run()
    for id, length in lengths.items():
        assert engine.text[id] == reference_text(ids(length, seed=length), 40)


# ---- L4: transfers ---------------------------------------------------------------------------------------


def transfer(source: KVManager, source_id: str, destination: KVManager, id: str, load: Load) -> Sequence[SlotRun]:
    """The copies that one load stands for."""
    sender, receiver = source.sequences[source_id], destination.sequences[id]
    return list(
        pair(
            load.interval,
            source=source.export_intervals(sender)[load.group],
            source_pages=sender.groups[load.group].pages,
            source_page_tokens=source.layout.groups[load.group].page_tokens,
            destination_pages=receiver.groups[load.group].pages,
            destination_page_tokens=destination.layout.groups[load.group].page_tokens,
        )
    )


def test_l4_the_prompts_page_goes_into_the_prompts_page() -> None:
    """P has looked ahead and holds [b0, b1]; D holds [a0]; exactly b0 goes into a0."""
    prefill = make_engine("chain_from_taps")
    prefill.add("p", ids(16), max_tokens=8, k=1, hand_over=True)
    prefill.step()
    assert prefill.finished == {"p": "prefilled"}
    sender = prefill.scheduler.requests["p"].kv
    b0, *rest = held_pages(prefill.kv, sender, 1).values()
    assert len(rest) == 1
    decode = make_engine("chain_from_taps", role=Role.DECODE)
    decode.add_handed_over("d", ids(16), prefill.kv.export_intervals(sender), max_tokens=8, k=1)
    decode.step()
    ((_id, loads),) = decode.scheduler.take_loads()
    receiver = decode.scheduler.requests["d"].kv
    (a0,) = held_pages(decode.kv, receiver, 1).values()
    runs = {load.group: transfer(prefill.kv, "p", decode.kv, "d", load) for load in loads}
    assert runs[1] == [SlotRun(b0, 0, a0, 0, 16, 0)]
    assert runs[0] == [SlotRun(sender.groups[0].pages[0], 0, receiver.groups[0].pages[0], 0, 16, 0)]


@pytest.mark.parametrize("archetype", ARCHETYPES_WITH_KV)
@pytest.mark.parametrize(("source_page", "destination_page"), [(16, 16), (16, 8), (8, 16), (12, 8)])
@pytest.mark.parametrize("length", [15, 16, 17, 32, 33])
def test_l4_every_combination_gives_the_decode_side_exactly_what_it_lacks(
    archetype: str, source_page: int, destination_page: int, length: int
) -> None:
    """P's lookahead (k), D's lookahead, D's own prefix (a surplus at the front), and both page sizes."""
    for source_k in (0, 1, 4):
        for local in (0, 7, 16):
            prefill = make_engine(archetype, page=source_page)
            prefill.add("p", ids(length), max_tokens=8, k=source_k, hand_over=True)
            prefill.step()
            sender = prefill.scheduler.requests["p"].kv
            kv = make_manager(full(page=destination_page), footprint=drafter(archetype, page=destination_page))
            hand = Hand(kv)
            if local:
                hand.serve(ids(local) + ids(40, seed=2))
            tokens = array("I", [*ids(length), *prefill.text["p"]])
            receiver = hand.open(tokens, total=length + 20, k=3)
            admission = kv.admit(receiver, remote=prefill.kv.export_intervals(sender))
            held = [Interval(receiver.groups[g].low, receiver.hit if g == 0 else receiver.draft_end) for g in (0, 1)]
            got: list[dict[int, tuple[int, int]]] = [{}, {}]
            for load in admission.loads:
                for run in transfer(prefill.kv, "p", kv, receiver.id, load):
                    for i in range(run.slots):
                        position = run.start + i
                        assert (run.source_page, run.source_offset + i) == slot(
                            sender, load.group, source_page, position
                        )
                        destination = (run.destination_page, run.destination_offset + i)
                        assert destination == slot(receiver, load.group, destination_page, position)
                        assert position not in got[load.group]
                        got[load.group][position] = destination
            for g in (0, 1):
                assert sorted(got[g]) == [p for p in range(length) if p not in range(*held[g])]
                assert len(receiver.groups[g].pages) == page_count(length, destination_page)
                written = [page for page, _offset in got[g].values()]
                arena = kv.pool.arena(g)
                assert all(arena.refs[page] == 1 and not arena.published[page] for page in written)


def slot(sequence, group: int, page_tokens: int, position: int) -> tuple[int, int]:
    number, offset = divmod(position, page_tokens)
    return sequence.groups[group].pages[number], offset
