"""What a worker answers to a greeting, and what a greeter learns from a refusal."""

from outrider.transfer.desk import Desk
from outrider.transfer.leases import LeaseBook
from outrider.transfer.messages import Hello, Refused, Welcome, decode, encode
from outrider.transfer.offers import GroupSignature

DIGEST, OTHER = b"the same layout!", b"other layout ..."
SIGNATURE = GroupSignature("target.full", "full", 512, 0, "target", "weights 'w', dtype 'd', layout 'l', part 0 of 1")


def desk(*, hands_over: bool = True) -> Desk:
    book = LeaseBook(30.0)
    return Desk(
        engine="p", digest=DIGEST, signatures=[SIGNATURE], leases=book, clock=lambda: 0.0, hands_over=hands_over
    )


def test_a_greeting_is_welcomed_with_what_a_reader_must_know() -> None:
    answer = desk().answer(Hello(digest=DIGEST, reader="d"), lambda: b"how to read")
    assert answer == Welcome(engine="p", signatures=[SIGNATURE.wire], introduction=b"how to read")


def test_a_refusal_says_what_this_worker_has() -> None:
    answer = desk().answer(Hello(digest=OTHER, reader="d"), lambda: b"how to read")
    assert isinstance(answer, Refused)
    assert "weights 'w'" in answer.reason
    sent = decode(encode(answer))
    assert isinstance(sent, Refused)
    assert [GroupSignature.of(each) for each in sent.signatures] == [SIGNATURE]


def test_a_worker_that_hands_nothing_over_refuses_at_once() -> None:
    answer = desk(hands_over=False).answer(Hello(digest=DIGEST, reader="d"), lambda: b"how to read")
    assert isinstance(answer, Refused)
    assert "kv_role kv_consumer" in answer.reason
