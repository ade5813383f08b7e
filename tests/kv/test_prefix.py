"""Keys: equal exactly when the bytes are. The index: the closest page, as by comparing with all of them."""

from __future__ import annotations

from array import array
from dataclasses import replace
from hashlib import blake2b
from random import Random

import pytest
from tests.kv.fakes import drafter, full, ids, make_manager, sliding

from outrider.kv import CacheIdentity, KVLayout, Sliding, prefix
from outrider.kv.footprint import KVFootprint
from outrider.kv.prefix import Chain, GroupIndex, KnownRuns, Media, PageRecords, group_tag

ROOT = CacheIdentity().root()


def bases(tokens: array[int], *, grain: int = 4, root: bytes = ROOT, media: tuple[Media, ...] = ()) -> list[bytes]:
    chain = Chain(root, grain, media)
    chain.extend(tokens, len(tokens))
    return chain.bases


def common(left: list[bytes], right: list[bytes]) -> int:
    """How many whole blocks share their base."""
    count = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        count += 1
    return count - 1


# ---- the chain -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", range(24))
def test_a_changed_token_changes_its_block_and_all_after_it(place: int) -> None:
    tokens, other = ids(24), ids(24)
    other[place] += 1
    assert common(bases(tokens), bases(other)) == place // 4
    assert len(set(bases(tokens) + bases(other))) == 7 + 6 - place // 4


def test_extending_bit_by_bit_equals_extending_at_once() -> None:
    rng, tokens = Random(0), ids(64)
    media = (Media(10, 17, b"m" * 32),)
    chain, end = Chain(ROOT, 4, media), 0
    while end < 64:
        end = min(64, end + rng.randint(0, 7))
        chain.extend(tokens, end)
        assert len(chain.bases) == 1 + end // 4
    assert chain.bases == bases(tokens, media=media)


@pytest.mark.parametrize("seed", range(4))
def test_runs_hashed_before_give_the_same_bases_and_keys(seed: int) -> None:
    """Sequences that share prefixes of any length, extended bit by bit, forgotten, and keyed for several groups."""
    rng, known, stem = Random(seed), KnownRuns(), ids(300)
    for _ in range(20):
        shared = rng.randrange(300)
        tokens = stem[:shared] + ids(300 - shared, seed=rng.randrange(1000))
        chain, plain = Chain(ROOT, 2, known_runs=known), Chain(ROOT, 2)
        for _ in range(6):
            end = rng.randrange(301)
            for each in (chain, plain):
                each.extend(tokens, end)
            if rng.random() < 0.3:
                chain.forget()
        for each in (chain, plain):
            each.extend(tokens, 300)
        assert chain.bases == plain.bases
        for size, reach in ((2, 0), (2, 1), (4, 2), (6, 1), (64, 3)):
            pages = (300 - reach) // size
            first = rng.randrange(pages)
            stop = rng.randrange(first, pages) + 1
            keys = [
                plain.bases[(page + 1) * size // 2] + plain.successors(tokens, (page + 1) * size, reach)
                for page in range(first, stop)
            ]
            assert chain.keys(tokens, size, reach, first, stop) == keys
            assert plain.keys(tokens, size, reach, first, stop) == keys


def test_a_prefix_that_is_asked_for_again_stays_known_and_others_are_forgotten(monkeypatch) -> None:
    monkeypatch.setattr(prefix, "MOST_YOUNG_RUNS", 8)
    known, shared = KnownRuns(), ids(32)
    for seed in range(100):
        tokens = shared + ids(96, seed=seed)
        chain = Chain(ROOT, 2, known_runs=known)
        chain.extend(tokens, 128)
        assert chain.bases == bases(tokens, grain=2)
        assert known.get(ROOT + shared.tobytes()) is not None
        assert len(known) <= 16


IDENTITY = CacheIdentity()
ROOTS = {
    "plain": IDENTITY.root(),
    "salt": IDENTITY.root(salt="tenant"),
    "other salt": IDENTITY.root(salt="tenant2"),
    "adapter": IDENTITY.root(adapter="tenant"),
    "both": IDENTITY.root(adapter="tenant", salt="tenant"),
    "split": IDENTITY.root(adapter="tenant2"),
    "ab,c": IDENTITY.root(adapter="ab", salt="c"),
    "a,bc": IDENTITY.root(adapter="a", salt="bc"),
    "weights": replace(IDENTITY, weights="w").root(),
    "dtype": replace(IDENTITY, dtype="bfloat16").root(),
    "layout": replace(IDENTITY, layout="w").root(),
    "rank": replace(IDENTITY, tensor_parallel_rank=1).root(),
    "size": replace(IDENTITY, tensor_parallel_size=2).root(),
    "rank and size": replace(IDENTITY, tensor_parallel_rank=1, tensor_parallel_size=2).root(),
}


def test_no_two_identities_share_a_key_for_the_same_tokens() -> None:
    chains = {name: bases(ids(16), root=root) for name, root in ROOTS.items()}
    every = [base for chain in chains.values() for base in chain]
    assert len(set(every)) == len(every)


@pytest.mark.parametrize("other", [{"salt": "b"}, {"adapter": "x"}, {"salt": "a", "adapter": "x"}])
def test_another_tenant_or_adapter_gets_no_hit(other: dict[str, str]) -> None:
    kv = make_manager(full(page=4))
    first = kv.open("first", ids(16), total_tokens=20, salt="a")
    kv.admit(first)
    kv.reserve(first, 16, 0)
    kv.commit(first, 16)
    same = kv.open("same", ids(16), total_tokens=20, salt="a")
    assert kv.admit(same).hit == 15
    stranger = kv.open("stranger", ids(16), total_tokens=20, **other)
    assert kv.admit(stranger).hit == 0


# ---- media ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("here", "there", "shared_blocks"),
    [
        (Media(0, 12, b"c" * 32), Media(4, 16, b"c" * 32), 0),
        (Media(4, 16, b"c" * 32), Media(5, 17, b"c" * 32), 1),
        (Media(4, 16, b"c" * 32), Media(4, 15, b"c" * 32), 3),
        (Media(4, 16, b"c" * 32), Media(4, 20, b"c" * 32), 4),
    ],
    ids=["another block", "shifted inside its first block", "ends earlier", "ends later"],
)
def test_media_at_another_place_differs_from_its_first_block_on(here: Media, there: Media, shared_blocks: int) -> None:
    """A text may spell the placeholder's id, so equal ids do not show where the media lies."""
    tokens = array("I", [9] * 24)
    assert common(bases(tokens, media=(here,)), bases(tokens, media=(there,))) == shared_blocks


def test_a_page_with_media_is_never_shared_in_part() -> None:
    """Placeholder ids look alike, so equal ids say nothing about equal content."""
    kv = make_manager(full(page=8))
    image = (Media(10, 14, b"c" * 32),)
    first = kv.open("first", ids(24), total_tokens=32, media=image)
    kv.admit(first)
    kv.reserve(first, 24, 0)
    kv.commit(first, 24)
    again = kv.open("again", ids(24), total_tokens=32, media=image)
    assert kv.admit(again).hit == 23
    other = kv.open("other", ids(24), total_tokens=32, media=(Media(10, 14, b"d" * 32),))
    assert kv.admit(other).hit == 8
    without = kv.open("without", ids(24), total_tokens=32)
    assert kv.admit(without).hit == 8
    short = kv.open("short", ids(13), total_tokens=32, media=image)
    assert kv.admit(short).hit == 8


# ---- groups and grain ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("sizes", "grain"), [((16,), 16), ((16, 8), 8), ((12, 8), 4), ((32, 8, 24), 8), ((3, 5), 1)])
def test_grain_is_the_greatest_common_divisor_of_all_page_sizes(sizes: tuple[int, ...], grain: int) -> None:
    target = tuple(full(f"g{size}", page=size) for size in sizes)
    assert KVLayout(target=target).grain == grain
    with_drafter = KVLayout(target=target[:1], footprint=drafter("chain_from_taps", *target[1:], page=sizes[0]))
    assert with_drafter.grain == grain


def test_groups_with_other_page_sizes_find_their_own_pages() -> None:
    kv = make_manager(full("a", page=12), full("b", page=8), pages=32)
    first = kv.open("first", ids(48), total_tokens=64)
    kv.admit(first)
    kv.reserve(first, 48, 0)
    kv.commit(first, 48)
    assert [len(index) for index in kv.pool.indexes] == [4, 6]
    for shared in range(1, 48):
        other = kv.open(f"o{shared}", ids(shared) + ids(9, seed=3), total_tokens=64)
        assert kv.admit(other).hit == shared
        kv.close(other)


def test_tags_tell_every_group_from_every_other() -> None:
    def owner(**more: object) -> KVFootprint:
        return replace(drafter("chain_from_taps"), **more)

    tags = [
        group_tag(full("g"), reach=0, owner=None),
        group_tag(full("h"), reach=0, owner=None),
        group_tag(full("g", page=16), reach=0, owner=None),
        group_tag(full("g", slot_bytes=2), reach=0, owner=None),
        group_tag(sliding(8, "g"), reach=0, owner=None),
        group_tag(sliding(9, "g"), reach=0, owner=None),
        group_tag(full("g"), reach=1, owner=None),
        group_tag(full("g"), reach=1, owner=owner()),
        group_tag(full("g"), reach=1, owner=owner(fingerprint="f")),
        group_tag(full("g"), reach=1, owner=owner(fingerprint="f2")),
        group_tag(full("g"), reach=1, owner=owner(taps=(12,))),
        group_tag(full("g"), reach=1, owner=owner(taps=(1, 2, 3))),
        group_tag(full("g"), reach=1, owner=owner(taps=(2, 1))),
    ]
    assert len(set(tags)) == len(tags)
    assert group_tag(full("g"), reach=0, owner=None) == tags[0]
    assert Sliding(8).label != Sliding(80).label


# ---- the index -----------------------------------------------------------------------------------------


def brute_force_closest(entries: dict[int, tuple[bytes, bytes]], parent: bytes, content: bytes) -> int:
    """The most tokens that any page after this parent has in common with `content`."""
    best = 0
    for known, above in entries.values():
        if above == parent and known:
            agree = 0
            while agree < min(len(known), len(content)) // 4 and (
                known[4 * agree : 4 * agree + 4] == content[4 * agree : 4 * agree + 4]
            ):
                agree += 1
            best = max(best, agree)
    return best


PARENT = b"p" * 32
"""Bases are digests, so a parent always has this length."""


def digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=32).digest()


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("alphabet", [(1, 2), (0, 255, 256, 65536, 2**32 - 1), tuple(range(50))])
def test_closest_page_equals_a_comparison_with_every_sibling(seed: int, alphabet: tuple[int, ...]) -> None:
    rng = Random(seed)
    index, entries = GroupIndex(PageRecords(200)), {}
    parents = [PARENT, b"q" * 32]

    def some_tokens(count: int) -> bytes:
        return array("I", rng.choices(alphabet, k=count)).tobytes()

    known_keys: set[bytes] = set()
    for page in range(1, 160):
        content, parent = some_tokens(6), rng.choice(parents)
        key = parent + content
        if key not in known_keys:
            known_keys.add(key)
            with_media = rng.random() < 0.1
            tokens, reach = content[:20], content[20:]
            index.insert([(page, digest(parent + tokens) + reach, parent, b"" if with_media else tokens)])
            entries[page] = (b"" if with_media else content, parent)
        if entries and rng.random() < 0.4:
            gone = rng.choice(list(entries))
            index.remove([gone])
            content, parent = entries.pop(gone)
            known_keys.discard(parent + content)
        wanted, parent = some_tokens(rng.randint(0, 8)), rng.choice([*parents, b"r" * 32])
        found, agree = index.closest(parent, wanted)
        assert agree == brute_force_closest(entries, parent, wanted)
        if agree:
            content, above = entries[found]
            assert above == parent
            assert content[: 4 * agree] == wanted[: 4 * agree]
    assert len(index) == len(entries)
