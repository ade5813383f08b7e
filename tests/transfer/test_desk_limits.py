"""What a prefill worker answers to peers that ask for too much."""

from __future__ import annotations

import pytest
from tests.kv.fakes import full

from outrider.kv import Interval, KVLayout
from outrider.kv.prefix import CacheIdentity
from outrider.transfer.desk import Desk
from outrider.transfer.leases import LeaseBook
from outrider.transfer.messages import Confirm, Confirmed
from outrider.transfer.offers import BINDING_BYTES, Offer, OfferedGroup, signatures

IDENTITY = CacheIdentity()
NAMES = signatures(KVLayout(target=(full(page=8),)), IDENTITY)


@pytest.mark.parametrize(
    ("digests_of", "held"),
    [
        ([(0, 0, 20)], True),
        ([(0, 0, 8), (0, 8, 20)], True),
        ([(0, 0, 20)] * 2, False),
        ([(0, 4, 4)] * 1000, False),
        ([(0, 9, 4)], False),
        ([(0, -4, 8)], False),
        ([(0, 0, 21)], False),
        ([(1, 0, 8)], False),
        ([(-1, 0, 8)], False),
    ],
)
def test_digests_are_taken_of_each_slot_at_most_once(digests_of: list[tuple[int, int, int]], held: bool) -> None:
    taken: list[Interval] = []

    def digest(_group: int, _held: OfferedGroup, interval: Interval) -> bytes:
        taken.append(interval)
        return b"digest"

    book = LeaseBook(60.0)
    groups = {NAMES[0]: OfferedGroup(Interval(0, 20), (1, 2, 3), 8)}
    offer = Offer(engine="P", binding=bytes(BINDING_BYTES), num_tokens=20, first_token=1, groups=groups)
    lease = book.grant("a", offer, 0.0)
    book.claim(lease, "D", 0.0)
    desk = Desk(engine="P", digest=b"", signatures=NAMES, leases=book, clock=lambda: 0.0, digest_slots=digest)
    answer = desk.answer(Confirm(lease=lease, reader="D", question=7, digests_of=digests_of), lambda: b"")
    assert isinstance(answer, Confirmed)
    assert (answer.question, answer.held) == (7, held)
    assert sum(interval.size for interval in taken) <= 20


def test_pages_that_are_given_back_while_they_are_digested_are_not_confirmed() -> None:
    book = LeaseBook(60.0)
    groups = {NAMES[0]: OfferedGroup(Interval(0, 20), (1, 2, 3), 8)}
    offer = Offer(engine="P", binding=bytes(BINDING_BYTES), num_tokens=20, first_token=1, groups=groups)
    lease = book.grant("a", offer, 0.0)
    book.claim(lease, "D", 0.0)

    def digest(_group: int, _held: OfferedGroup, _interval: Interval) -> bytes:
        book.withdraw("a")
        return b"digest"

    desk = Desk(engine="P", digest=b"", signatures=NAMES, leases=book, clock=lambda: 0.0, digest_slots=digest)
    answer = desk.answer(Confirm(lease=lease, reader="D", question=1, digests_of=[(0, 0, 20)]), lambda: b"")
    assert answer == Confirmed(lease=lease, question=1, held=False)
