"""The hand-off: who may send to whom, and what becomes of an offer that makes no sense."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace
from tests.kv.fakes import drafter, full, sliding

from outrider.errors import TransferError
from outrider.kv import Interval, KVLayout
from outrider.kv.ledger import Load
from outrider.kv.prefix import CacheIdentity, Media
from outrider.transfer.messages import Offered, OfferedPages, ScoredToken, decode, encode
from outrider.transfer.offers import (
    Offer,
    OfferedGroup,
    from_wire,
    layout_digest,
    offered_intervals,
    plan_pull,
    prompt_binding,
    shared_groups,
    signatures,
    to_wire,
)

HERE = CacheIdentity(weights="llama", dtype="bfloat16", layout="paged")
LAYOUT = KVLayout(target=(full(page=8), sliding(6, page=8)), footprint=drafter("chain_from_taps"))


def offer(**fields: Any) -> Offer:
    whole = OfferedGroup(Interval(0, 20), (1, 2, 3), 8)
    given: dict[str, Any] = {
        "engine": "prefill.1",
        "binding": prompt_binding(range(20)),
        "num_tokens": 20,
        "first_token": 7,
        "groups": dict.fromkeys(signatures(LAYOUT, HERE), whole),
    }
    return Offer(**(given | fields))


def group(*parts: Any) -> Callable[[], Offer]:
    return lambda: offer(groups={signatures(LAYOUT, HERE)[0]: OfferedGroup(*parts)})


def test_a_peer_with_the_same_model_sends_every_group_whatever_its_page_size() -> None:
    there = KVLayout(target=(full(page=4), sliding(6, page=16)), footprint=drafter("chain_from_taps", page=2))
    assert shared_groups(LAYOUT, HERE, signatures(there, HERE)) == {0, 1, 2}
    assert offered_intervals(LAYOUT, HERE, offer()) == dict.fromkeys(range(3), Interval(0, 20))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("weights", "llama, fine-tuned"),
        ("dtype", "float8"),
        ("layout", "interleaved"),
        ("tensor_parallel_rank", 1),
        ("tensor_parallel_size", 2),
    ],
)
def test_a_peer_with_other_weights_dtype_or_layout_is_refused_at_the_handshake(field: str, value: Any) -> None:
    fields = {"weights": "llama", "dtype": "bfloat16", "layout": "paged"} | {field: value}
    there = CacheIdentity(**fields)
    with pytest.raises(TransferError, match=r"another model.*run the same weights") as refused:
        shared_groups(LAYOUT, HERE, signatures(LAYOUT, there))
    assert str(value) in str(refused.value)
    with pytest.raises(TransferError, match="another model"):
        offered_intervals(LAYOUT, there, offer())
    load = Load(0, Interval(0, 8), None)
    with pytest.raises(TransferError, match="the peer holds nothing"):
        plan_pull(LAYOUT, there, load, offer(), [1, 2, 3])


def test_labels_differ_whatever_the_names_hold() -> None:
    tricky = [CacheIdentity(weights="a', dtype 'b"), CacheIdentity(weights="a", dtype="b"), CacheIdentity()]
    assert len({identity.label for identity in tricky}) == 3


def test_a_peer_without_the_drafter_sends_the_target_alone() -> None:
    there = KVLayout(target=LAYOUT.target)
    assert shared_groups(LAYOUT, HERE, signatures(there, HERE)) == {0, 1}


def test_a_peer_with_some_of_the_drafters_groups_sends_the_target_alone() -> None:
    groups = (full("draft a", page=8), full("draft b", page=8))
    here = KVLayout(target=LAYOUT.target, footprint=drafter("chain_from_taps", *groups))
    offered = signatures(here, HERE)
    assert shared_groups(here, HERE, offered) == {0, 1, 2, 3}
    assert shared_groups(here, HERE, offered[:-1]) == {0, 1}


def test_a_peer_with_another_target_layout_is_refused() -> None:
    there = KVLayout(target=(full(page=8), sliding(7, page=8)))
    with pytest.raises(TransferError, match=r"differs in group\(s\) sliding"):
        shared_groups(LAYOUT, HERE, signatures(there, HERE))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (group(Interval(0, 20), (1, 2), 8), r"takes 3 page\(s\), but it lists 2.*new offer"),
        (group(Interval(0, 20), (1, 2, 3), 0), "page_tokens must be a whole number of at least 1, got 0"),
        (group(Interval(0, 20), (1, 2, 3), 8.0), "page_tokens.*8.0"),
        (group(Interval(0, 20), (1, 0, 3), 8), "a page there that it does not hold"),
        (group(Interval(0, 20), (1, -2, 3), 8), "tuple of page numbers"),
        (group(Interval(-4, 20), (1, 2, 3), 8), "must not start before 0"),
        (group(Interval(9, 4), (1, 2, 3), 8), r"got \[9, 4\)"),
        (group(Interval(0, 99), (1,) * 20, 8), "only 20 tokens are offered"),
        (group((0, 20), (1, 2, 3), 8), "must be an Interval"),
        (lambda: offer(groups=None), "groups must map"),
        (lambda: offer(groups={"full": OfferedGroup(Interval(0, 8), (1,), 8)}), "no group of an offer"),
        (lambda: offer(groups={signatures(LAYOUT, HERE)[0]: (0, 8)}), "no group of an offer"),
        (lambda: offer(first_token=-2), "first token must be a token id"),
        (lambda: offer(drafts=(1, -2)), "drafts must be a tuple of token ids"),
        (lambda: offer(num_tokens=0), "num_tokens must be a whole number of at least 1"),
        (lambda: offer(engine=""), "names its engine"),
        (lambda: offer(binding=b"short"), "the binding must be 16 bytes"),
    ],
)
def test_an_offer_that_makes_no_sense_is_a_transfer_error(make: Callable[[], Offer], says: str) -> None:
    with pytest.raises(TransferError, match=says) as refused:
        make()
    assert "\n" not in str(refused.value)


def scored(**fields: Any) -> ScoredToken:
    given: dict[str, Any] = {"token": 7, "logprob": -0.5, "rank": 1, "top": ((9, -1.0),)}
    return ScoredToken(**(given | fields))


def test_an_offer_may_name_every_token_of_the_vocabulary() -> None:
    offer(first_token=9, drafts=(0, 9), logprobs=scored()).check_tokens(10)


@pytest.mark.parametrize(
    "fields",
    [
        {"first_token": 10},
        {"drafts": (1, 10)},
        {"logprobs": scored(token=10)},
        {"logprobs": scored(top=((10, -1.0),))},
        {"logprobs": scored(logprob=float("nan"))},
        {"logprobs": scored(top=((9, float("nan")),))},
    ],
    ids=str,
)
def test_an_offer_of_a_token_outside_the_vocabulary_or_without_a_probability_is_refused(fields: dict[str, Any]) -> None:
    made = offer(**fields)
    with pytest.raises(TransferError):
        made.check_tokens(10)


def test_pages_outside_the_interval_may_be_anything() -> None:
    held = OfferedGroup(Interval(9, 20), (0, 5, 6, 7, 8), 8)
    made = offer(groups={signatures(LAYOUT, HERE)[1]: held})
    runs = plan_pull(LAYOUT, HERE, Load(1, Interval(9, 20), None), made, [0, 3, 4])
    assert [(run.source_page, run.destination_page, run.slots) for run in runs] == [(5, 3, 7), (6, 4, 4)]


def test_a_load_past_what_is_offered_is_refused() -> None:
    with pytest.raises(TransferError, match=r"wanted \[0, 24\), the peer holds \[0, 20\)"):
        plan_pull(LAYOUT, HERE, Load(0, Interval(0, 24), None), offer(), [1, 2, 3])


def test_an_offer_arrives_as_it_was_made() -> None:
    names = signatures(LAYOUT, HERE)
    score = ScoredToken(token=7, logprob=-0.5, rank=1, top=((7, -0.5), (3, -2.0)))
    made = offer(seed=2**63, logprobs=score, drafts=(4, 5), drafts_worth_asking=1)
    frame = encode(to_wire(made, b"l" * 16, names))
    message = decode(frame)
    assert isinstance(message, Offered)
    # The other side may number its groups differently.
    assert from_wire(message, names) == made


def test_an_offer_of_a_group_that_was_not_announced_is_refused() -> None:
    names = signatures(LAYOUT, HERE)
    with pytest.raises(TransferError):
        from_wire(to_wire(offer(), b"l" * 16, names), names[:1])


def test_an_offer_past_the_end_of_the_prompt_is_refused_before_its_pages_are_listed() -> None:
    names = signatures(LAYOUT, HERE)
    pages = OfferedPages(group=0, start=1 << 60, end=(1 << 60) + 1, page_tokens=1, pages=[1])
    message = replace(to_wire(offer(), b"l" * 16, names), groups=[pages])
    with pytest.raises(TransferError, match="of 20 tokens"):
        from_wire(message, names)


PROMPT = [1, 2, 3, 300]


@pytest.mark.parametrize(
    ("tokens", "others"),
    [
        ([1, 2, 3], {}),
        ([1, 2, 300, 3], {}),
        (PROMPT, {"adapter": "formal"}),
        (PROMPT, {"salt": "formal"}),
        (PROMPT, {"media": [Media(0, 2, b"cat")]}),
        (PROMPT, {"media": [Media(0, 2, b"dog")]}),
        (PROMPT, {"media": [Media(1, 2, b"cat")]}),
    ],
)
def test_a_binding_names_all_that_a_prompt_is_made_of(tokens: list[int], others: dict[str, Any]) -> None:
    assert prompt_binding(tokens, **others) != prompt_binding(PROMPT)
    assert prompt_binding(tokens, **others) == prompt_binding(tuple(tokens), **others)


def test_bindings_of_all_such_prompts_differ() -> None:
    salts = [{}, {"adapter": "ab"}, {"salt": "ab"}, {"adapter": "a", "salt": "b"}, {"media": [Media(0, 2, b"ab")]}]
    assert len({prompt_binding(PROMPT, **others) for others in salts}) == len(salts)


def test_only_the_target_and_the_protocol_decide_whether_two_workers_talk(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = KVLayout(target=LAYOUT.target)
    assert layout_digest(plain, HERE) == layout_digest(LAYOUT, HERE)
    assert layout_digest(KVLayout(target=(full(page=4), sliding(6, page=4))), HERE) == layout_digest(plain, HERE)
    assert layout_digest(KVLayout(target=(full(page=8), sliding(7, page=8))), HERE) != layout_digest(plain, HERE)
    assert layout_digest(plain, CacheIdentity(weights="another")) != layout_digest(plain, HERE)
    before = layout_digest(plain, HERE)
    monkeypatch.setattr("outrider.transfer.offers.PROTOCOL", 99)
    assert layout_digest(plain, HERE) != before
