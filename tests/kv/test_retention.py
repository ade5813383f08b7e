"""Retention against brute force: what each policy keeps, that it serves every hit it promises, and nothing more."""

from __future__ import annotations

from random import Random

import pytest
from tests.kv.fakes import OTHER, Hand, Watch, drafter, full, held_pages, ids, sliding, watched

from outrider.errors import ConfigError
from outrider.kv import Interval, KVFootprint, KVLayout
from outrider.kv.retention import DENSE, TAIL, Retention, RetentionMask

WINDOWS = (1, 7, 8, 9, 31, 32, 33, 100)
DRAFTERS = {
    "nothing": drafter("nothing"),
    "reach 1": drafter("chain_from_taps"),
    "reach 1, sliding": drafter("chain_from_taps", sliding(8, "draft")),
    "reach 0": drafter("block_from_taps"),
    "reach 0, sliding": drafter("block_from_taps", sliding(20, "draft")),
    "rebuilt": drafter("chain_from_tokens"),
}


def worth_keeping(window: int, page: Interval, boundaries: list[int], reach: int) -> bool:
    """Does any hit at any of the boundaries read a slot of the page?

    A hit ends at a boundary, or one before it when the whole prompt is cached; then up to `reach` (at least
    one is assumed) tap rows before the hit read further back.
    """
    for boundary in boundaries:
        for hit in (boundary, boundary - 1):
            for row in range(max(0, hit - max(1, reach)), hit + 1):
                first = max(0, row - window + 1)
                if first < page.end and page.start < hit:
                    return True
    return False


# ---- the mask ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(("page_tokens", "alignment_page"), [(8, 8), (8, 32), (4, 32), (16, 32), (1, 32), (32, 8)])
def test_the_mask_equals_asking_every_boundary(window: int, page_tokens: int, alignment_page: int) -> None:
    groups = (full(page=alignment_page), sliding(window, page=page_tokens))
    for footprint in (drafter("lookup"), drafter("block_from_taps"), drafter("chain_from_taps")):
        layout = KVLayout(target=groups, footprint=footprint)
        alignment = layout.alignment
        assert alignment == max(page_tokens, alignment_page)
        for retention, apart in (
            (DENSE, alignment),
            (TAIL, 1 << 30),
            (Retention(every=70), -(-70 // alignment) * alignment),
        ):
            mask = RetentionMask(layout, retention)
            marks = mask.marks(3 * alignment + 1, 5 * alignment - 1)
            assert marks == (3 * alignment, 4 * alignment)
            stop = 9 * alignment // page_tokens
            boundaries = [b for b in range(alignment, 40 * alignment, alignment) if b % apart == 0 or b in marks]
            kept = [
                number
                for number in range(stop)
                if worth_keeping(
                    window,
                    Interval(number * page_tokens, (number + 1) * page_tokens),
                    boundaries,
                    footprint.token_reach,
                )
            ]
            runs = list(mask.runs(1, 0, stop, marks))
            assert [number for first, last in runs for number in range(first, last)] == kept, retention
            assert [number for number in range(stop) if mask.keeps(1, number, marks)] == kept
            assert mask.keeps_all[0]
            if mask.keeps_all[1]:
                assert len(kept) == stop


@pytest.mark.parametrize("retention", [DENSE, TAIL, Retention(every=96)])
@pytest.mark.parametrize("window", WINDOWS)
def test_a_page_is_freed_at_the_first_end_that_does_not_hold_it(window: int, retention: Retention) -> None:
    mask = RetentionMask(KVLayout(target=(full(page=32), sliding(window, page=8))), retention)
    for end in range(8, 200, 8):
        for margin in (0, 2):
            first = next(c for c in range(end + window + 200) if mask.held_from(1, c, margin) >= end)
            assert mask.freed_at(1, end, margin) == first
    assert mask.freed_at(0, 8, 0) is None


def test_settings_are_names_or_tokens() -> None:
    assert Retention.of("dense") == DENSE
    assert Retention.of("tail") == TAIL
    assert Retention.of(512) == Retention.of("512") == Retention(every=512)
    assert Retention.of(TAIL) is TAIL
    assert [Retention.of(given).label for given in ("dense", "tail", 512)] == [
        "dense",
        "tail",
        "every 512 tokens, and ends",
    ]
    for wrong in ("dens", "", 0, -4, True, None, 2.5, "-3", "1e3"):
        with pytest.raises(ConfigError, match="dense, tail, or an interval in tokens"):
            Retention.of(wrong)


# ---- hits under each policy ----------------------------------------------------------------------------


def mixed(window: int, footprint: KVFootprint, retention: object, **more: object) -> tuple[Hand, Watch]:
    """Pages of 32 beside pages of 8: hits are kept for multiples of 32."""
    hand, watch = watched(
        full(page=32),
        sliding(window, page=8),
        footprint=footprint,
        pages=300,
        retention=Retention.of(retention),
        **more,
    )
    assert hand.kv.layout.alignment == 32
    return hand, watch


POLICIES = ("dense", "tail", 96)


@pytest.mark.parametrize("retention", POLICIES)
@pytest.mark.parametrize("window", WINDOWS)
def test_a_fully_cached_prompt_recomputes_one_token_at_every_aligned_length(window: int, retention: object) -> None:
    for length in range(32, 513, 32):
        for name, footprint in DRAFTERS.items():
            hand, watch = mixed(window, footprint, retention)
            reach = footprint.token_reach
            first = hand.prefill(ids(length))
            # It goes on writing, so that the end of its prompt leaves every window.
            hand.decode(first, ids(130, seed=5)[:70])
            hand.kv.close(first)
            hand.settle()
            cached = hand.admit(ids(length))
            assert cached.hit == length - 1, (length, name)
            going_on = hand.admit(ids(length) + ids(20, seed=1))
            assert going_on.hit == length, (length, name)
            hit = watch.hits[going_on.id]
            assert hit.tap_rows == reach
            for run in hit.draft:
                assert run.end == length - reach
                assert not run.empty


@pytest.mark.parametrize("retention", POLICIES)
@pytest.mark.parametrize("window", WINDOWS)
def test_the_end_of_a_text_is_hit_by_its_continuation(window: int, retention: object) -> None:
    """The next turn of a conversation: the prompt, the answer, and more."""
    for generated in (1, 30, 31, 32, 33, 63, 70):
        hits = set()
        for footprint in DRAFTERS.values():
            hand, _watch = mixed(window, footprint, retention)
            sequence = hand.prefill(ids(64))
            hand.decode(sequence, ids(generated, seed=2))
            known, committed = list(sequence.tokens), sequence.committed
            hand.kv.close(sequence)
            hand.settle()
            hits.add(hand.admit([*known, *ids(9, seed=3)]).hit)
        assert hits == {committed // 32 * 32}, generated


@pytest.mark.parametrize("footprint", DRAFTERS.values(), ids=DRAFTERS)
def test_what_two_prompts_share_is_kept_for_the_third(footprint: KVFootprint) -> None:
    hand, _watch = mixed(8, footprint, "tail")
    system = ids(150)
    hits = []
    for number in range(1, 5):
        prompt = [*system, *ids(60, seed=number)]
        sequence = hand.prefill(prompt)
        hits.append(sequence.hit)
        hand.kv.close(sequence)
        hand.settle()
    # The second prompt shows that the prefix is shared, and keeps the boundary before 150.
    assert hits == [0, 0, 128, 128]


@pytest.mark.parametrize("window", WINDOWS)
def test_ends_alone_are_kept_of_a_long_text(window: int) -> None:
    hand, watch = mixed(window, drafter("chain_from_taps"), "tail")
    sequence = hand.prefill(ids(300))
    hand.decode(sequence, ids(100, seed=2))
    kept = {n for b in (288,) for n in range(max(0, b - window - 1) // 8, b // 8)}
    assert set(watch.numbers(sequence, 1)) == kept
    hand.kv.close(sequence)
    end = (300 + 100) // 32 * 32
    assert set(watch.numbers(sequence, 1)) == kept | set(range(max(0, end - window - 1) // 8, end // 8))
    hand.settle()
    hand.kv.check_integrity()


@pytest.mark.parametrize("generated", [1, 5])
def test_an_end_is_kept_of_what_arrived_and_not_of_the_page_that_arrived_in_part(generated: int) -> None:
    """A peer sends what lies under the window, from the middle of a page on."""
    hand, watch = mixed(20, drafter("nothing"), "tail")
    sequence = hand.open(ids(65), total=100)
    loads = hand.kv.admit(sequence, remote={g: Interval(0, 64) for g in (0, 1)}).loads
    hand.settle()
    for load in loads:
        hand.kv.import_interval(sequence, load)
    assert hand.kv.finish_loading(sequence) == 64
    assert sequence.groups[1].low == 64 - 20 + 1 - 2 == 43
    hand.decode(sequence, ids(generated, seed=2))
    hand.kv.close(sequence)
    # Positions 40 to 42 are in page 5 and nowhere.
    assert set(watch.numbers(sequence, 1)) == {6, 7}
    hand.settle()
    hand.kv.check_integrity()


def test_a_drafter_that_catches_up_keeps_the_window_at_its_own_end() -> None:
    """The target is hit up to 64, the drafter has nothing of it yet and is fed in parts."""
    hand, _watch = watched(full(page=8), footprint=drafter("chain_from_tokens", sliding(6, "draft", page=8)))
    hand.serve(ids(64), may_draft=False)
    sequence = hand.admit(ids(70), k=2)
    sequence.tokens.append(7)
    for fed_to in (16, 40):
        v = len(sequence.tokens) - 1
        hand.kv.reserve(sequence, v, hand.kv.layout.footprint.reserve_end(v=v, k=2))
        plan = hand.plan()
        hand.kv.commit(sequence, v, fed_to=fed_to)
        hand.done(plan)
        sequence.tokens.append(8)
        assert min(held_pages(hand.kv, sequence, 1)) <= (fed_to - 6 + 1) // 8
    hand.advance(sequence, len(sequence.tokens) - 1, k=2)
    assert min(held_pages(hand.kv, sequence, 1)) == (72 - 6 + 1) // 8


def test_a_sequence_that_fails_leaves_no_end() -> None:
    hand, watch = mixed(8, drafter("nothing"), "tail")
    sequence = hand.prefill(ids(100))
    hand.decode(sequence, ids(60, seed=2))
    before = watch.numbers(sequence, 1)
    hand.kv.close(sequence, keep_end=False)
    assert watch.numbers(sequence, 1) == before
    hand.settle()
    hand.kv.check_integrity()


@pytest.mark.parametrize("retention", POLICIES)
@pytest.mark.parametrize("window", WINDOWS)
def test_a_running_sequence_holds_its_window_and_little_more(window: int, retention: object) -> None:
    for footprint in DRAFTERS.values():
        hand, _watch = mixed(window, footprint, retention)
        sequence = hand.prefill(ids(64), k=3, total=300)
        most = 0
        for token in range(150):
            hand.decode(sequence, [token], k=3)
            most = max(most, len(held_pages(hand.kv, sequence, 1)))
        # A window, one page at the ragged front, what drafts ask for, and behind the window what an end needs.
        behind = 0 if retention == "dense" else 31 + 2
        assert most <= -(-(window - 1 + behind + 4) // 8) + 1
        hand.kv.close(sequence)


@pytest.mark.parametrize("seed", range(4))
def test_stretches_of_nothing_are_passed_over_and_nothing_else(seed: int) -> None:
    """A sliding group's search skips what is not there; every page that it could use stops it."""
    rng = Random(seed)
    hand, _watch = mixed(rng.choice((5, 40)), drafter("nothing"), "tail")
    stem = list(ids(900))
    for _ in range(6):
        parted = rng.randrange(900)
        hand.serve([*stem[:parted], *ids(rng.randrange(1, 40), seed=rng.randrange(1, 90))])
    sequence = hand.open(stem)
    _hit, views = hand.kv.search(sequence, 899, draft=False)
    for page in range(112):
        expected = max((number for number in range(page + 1) if views[1].find(number).slots), default=-1)
        _again, fresh = hand.kv.search(sequence, 0, draft=False)
        assert fresh[1].last_found(page) == expected


@pytest.mark.parametrize("retention", POLICIES)
@pytest.mark.parametrize("window", [1, 6, 20])
def test_where_the_target_can_be_hit_anywhere_a_drafter_keeps_its_window_everywhere(
    window: int, retention: object
) -> None:
    """The target's pages are longer than the drafter's: hits end inside them, and between boundaries."""
    hand, watch = watched(
        full(page=16),
        footprint=drafter("block_from_taps", sliding(window, "draft", page=8)),
        pages=200,
        retention=Retention.of(retention),
    )
    hand.serve(ids(120))
    for shared in range(1, 112):
        sequence = hand.admit(ids(shared) + ids(3, seed=shared + 1))
        assert sequence.hit == shared
        (run,) = watch.hits[sequence.id].draft
        assert run.end == shared
        assert run.start <= max(0, shared - window + 1)
        hand.kv.close(sequence)
        hand.settle()


@pytest.mark.parametrize("retention", POLICIES)
@pytest.mark.parametrize("archetype", ["chain_from_taps", "block_from_taps", "chain_from_tokens"])
@pytest.mark.parametrize(("window", "draft_window"), [(200, 8), (40, 8), (40, 60), (20, 3)])
def test_wherever_the_target_hits_a_drafter_finds_its_whole_window(
    window: int, draft_window: int, archetype: str, retention: object
) -> None:
    """The target's pages for an end serve hits before it too: in its first window, anywhere.

    At the earliest of these hits the row that would feed a reaching drafter's last slot finds no window to read.
    """
    footprint = drafter(archetype, sliding(draft_window, "draft", page=4))
    hand, _watch = mixed(window, footprint, retention)
    text = hand.prefill(ids(100))
    hand.decode(text, ids(70, seed=5))
    known = list(text.tokens)
    hand.kv.close(text)
    hand.settle()
    found = 0
    for shared in range(1, len(known)):
        hit, views = hand.kv.search(hand.open([*known[:shared], OTHER, OTHER]), shared, draft=True)
        if hit.end == 0 or not views[1].holds(views[1].spec.kind.needed(hit.end, footprint.token_reach)):
            continue
        found += 1
        assert hit.end - footprint.token_reach <= hit.draft[0].end <= hit.end
        assert hit.draft[0].start <= views[2].spec.kind.needed(hit.draft[0].end).start, hit
    assert found > 20
