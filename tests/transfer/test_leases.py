"""A lease is one reader's promise: it ends once, and the pages under it are given back after it has."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from outrider.transfer.leases import LeaseBook
from outrider.transfer.offers import Offer, prompt_binding

OFFER = Offer(engine="prefill.1", binding=prompt_binding([1]), num_tokens=1, first_token=2, groups={})


def book(duration_s: float = 10.0, on_ended: Callable[[], None] | None = None) -> LeaseBook:
    return LeaseBook(duration_s, on_ended=on_ended)


def test_a_lease_that_ran_out_is_not_held_any_more() -> None:
    leases = book()
    first, second = leases.grant("a", OFFER, 0.0), leases.grant("b", OFFER, 5.0)
    leases.claim(second, "reader", 5.0)
    leases.expire(9.0)
    assert leases.take_ended() == []
    leases.expire(14.0)
    assert leases.take_ended() == [("a", True)]
    assert leases.held(first, "reader") is None
    assert leases.held(second, "reader") is OFFER
    leases.release(second, "reader")
    leases.release(second, "reader")
    assert leases.take_ended() == [("b", False)]


def test_a_lease_has_one_reader() -> None:
    leases = book()
    lease = leases.grant("a", OFFER, 0.0)
    assert leases.held(lease, "first") is None
    assert leases.claim(lease, "first", 0.0) is OFFER
    assert leases.claim(lease, "first", 0.0) is OFFER
    assert "another worker" in str(leases.claim(lease, "second", 0.0))
    leases.renew(lease, "second", 8.0)
    leases.release(lease, "second")
    assert leases.held(lease, "second") is None
    assert leases.held(lease, "first") is OFFER
    leases.expire(10.0)
    assert leases.take_ended() == [("a", True)]


def test_a_claim_and_a_renewal_prolong_a_lease() -> None:
    leases = book()
    lease = leases.grant("a", OFFER, 0.0)
    leases.claim(lease, "reader", 9.0)
    leases.expire(18.0)
    leases.renew(lease, "reader", 18.0)
    leases.expire(27.9)
    assert leases.held(lease, "reader") is OFFER
    assert leases.next_end_s == pytest.approx(28.0)
    leases.expire(28.0)
    assert leases.held(lease, "reader") is None
    assert "no such lease" in str(leases.claim(lease, "reader", 28.0))


def test_the_engine_is_told_at_once_when_a_reader_releases() -> None:
    told: list[bool] = []
    leases = book(on_ended=lambda: told.append(True))
    lease = leases.grant("a", OFFER, 0.0)
    leases.release(bytes(16), "reader")
    assert not told
    # An unclaimed lease may be released by the worker that declines its ticket.
    leases.release(lease, "reader")
    assert told == [True]


def test_a_withdrawn_lease_is_gone_without_a_report() -> None:
    leases = book()
    lease = leases.grant("a", OFFER, 0.0)
    leases.claim(lease, "reader", 0.0)
    leases.withdraw("a")
    assert leases.held(lease, "reader") is None
    assert leases.take_ended() == []
    assert len(leases) == leases.num_claimed == 0


def test_lease_ids_are_not_guessable() -> None:
    leases = book()
    ids = {leases.grant("a", OFFER, 0.0) for _ in range(100)}
    assert len(ids) == 100
    assert {len(lease) for lease in ids} == {16}
