"""The state machine of hand-offs, message by message, without a model: what is asked, waited for, given up and given
back."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace as with_fields
from tests.kv.fakes import ids, reference_text
from tests.transfer.scripted import LIMITS, Clock, ScriptedWorker, talk

from outrider.kv import Interval
from outrider.kv.ledger import Load
from outrider.scheduler import LoadFailure, RequestSpec, Role, State
from outrider.transfer.comparison import take_back_what_differs
from outrider.transfer.link import Quiet, Received
from outrider.transfer.messages import Confirm, Confirmed, Fetch, Hello, Offered, Refused, Release, Renew
from outrider.transfer.offers import layout_digest, prompt_binding
from outrider.transfer.peers import IDLE_PEER_S
from outrider.transfer.quarantine import Quarantine
from outrider.transfer.tickets import Ticket


class Pair:
    """A prefill worker and a decode worker that know nothing of each other yet."""

    def __init__(self, *, prefill: dict[str, Any] | None = None, **decode: Any) -> None:
        self.clock = Clock()
        self.prefill = ScriptedWorker("P", Role.PREFILL, self.clock, **(prefill or {}))
        self.decode = ScriptedWorker("D", Role.DECODE, self.clock, **decode)

    def reading(self, name: str = "a") -> None:
        """Bring a request to where its KV is being read."""
        self.decode.fetch(name, self.prefill.hand_over(name))
        talk(self.prefill, self.decode)
        self.decode.step()
        assert self.decode.scheduler.requests[name].state is State.LOADING
        assert self.decode.link.reads

    def pass_time(self, seconds: float) -> None:
        self.clock.now_s += seconds
        self.decode.driver.advance()

    def finish(self, name: str = "a", length: int = 40, max_tokens: int = 12) -> None:
        """Let the request run to its end; its text must be the target's own."""
        for _ in range(60):
            talk(self.prefill, self.decode)
            self.decode.link.land()
            self.decode.step()
            if name in self.decode.engine.finished:
                break
        assert self.decode.engine.text[name] == reference_text(ids(length), max_tokens)
        talk(self.prefill, self.decode)
        self.prefill.driver.advance()

    def assert_empty(self) -> None:
        self.prefill.assert_empty()
        self.decode.assert_empty()


def test_a_hand_off_from_the_ticket_to_the_last_token() -> None:
    pair = Pair()
    pair.reading()
    pair.finish()
    (settled,) = pair.decode.driver.take_settled()
    assert (settled.cached_tokens, settled.transferred_tokens, settled.reason) == (0, 40, "")
    assert pair.prefill.driver.counters.leases_expired == 0
    pair.assert_empty()


def test_nothing_is_confirmed_before_the_last_byte_nor_used_before_the_confirmation() -> None:
    pair = Pair()
    pair.reading()
    link, request = pair.decode.link, pair.decode.scheduler.requests["a"]
    link.take_sent()
    *others, last = link.reads
    link.land(*others)
    pair.decode.step()
    assert link.take_sent(Confirm) == []
    link.land(last)
    pair.decode.driver.advance()
    assert len([message for _peer, message in link.sent if isinstance(message, Confirm)]) == 1
    pair.decode.step()
    assert request.state is State.LOADING
    assert pair.prefill.answers(pair.decode)
    pair.decode.step()
    assert request.state is State.DECODING
    pair.finish()
    pair.assert_empty()


def test_an_answer_of_another_worker_than_was_asked_is_not_taken() -> None:
    pair = Pair()
    pair.reading()
    link, request = pair.decode.link, pair.decode.scheduler.requests["a"]
    link.take_sent()
    link.land()
    pair.decode.driver.advance()
    (question,) = link.take_sent(Confirm)
    assert isinstance(question, Confirm)
    link.events.append(Received("Q", Confirmed(lease=question.lease, question=question.question, held=True)))
    pair.decode.step()
    assert request.state is State.LOADING
    # The question is asked again, and answered by the worker that it is for.
    pair.pass_time(LIMITS.answer_s + 0.1)
    pair.finish()
    pair.assert_empty()


@pytest.mark.parametrize("change", [{"binding": bytes(16)}, {"num_tokens": 41}, {"engine": "P.0"}], ids=str)
def test_an_offer_for_another_prompt_or_of_another_process_is_not_read(change: dict[str, Any]) -> None:
    pair = Pair()
    ticket = pair.prefill.hand_over("a")
    pair.decode.fetch("a", ticket)
    pair.decode.driver.advance()
    pair.prefill.answers(pair.decode)
    pair.decode.driver.advance()
    offered = pair.prefill.lender.desk.answer(Fetch(lease=ticket.lease, reader="D.1"), bytes)
    assert isinstance(offered, Offered)
    pair.decode.link.take_sent()
    pair.decode.link.events.append(Received("P", with_fields(offered, **change)))
    pair.decode.step()
    assert pair.decode.link.started == 0
    assert pair.decode.driver.counters.fetch_failures == 1
    pair.finish()


@pytest.mark.parametrize("late", ["refused lease", "refused greeting", "offer"])
def test_an_answer_that_comes_when_the_kv_is_being_read_changes_nothing(late: str) -> None:
    pair = Pair()
    ticket = pair.prefill.hand_over("a")
    pair.decode.fetch("a", ticket)
    talk(pair.prefill, pair.decode)
    pair.decode.step()
    offered = pair.prefill.lender.desk.answer(Fetch(lease=ticket.lease, reader="D.1"), bytes)
    assert offered is not None
    refused = Refused(lease=ticket.lease if late == "refused lease" else b"", reason="late")
    pair.decode.link.events.append(Received("P", offered if late == "offer" else refused))
    pair.decode.driver.advance()
    assert pair.decode.link.forgotten == []
    pair.finish()
    (settled,) = pair.decode.driver.take_settled()
    assert settled.transferred_tokens == 40
    assert pair.decode.driver.counters.fetch_failures == 0
    pair.assert_empty()


def test_kv_that_was_read_after_the_lease_had_ended_is_computed_again() -> None:
    pair = Pair()
    pair.reading()
    pair.clock.now_s += 31.0
    # Its renewals did not arrive. The lease ends before the last byte is read.
    pair.decode.link.take_sent()
    pair.prefill.driver.advance()
    assert pair.prefill.driver.counters.leases_expired == 1
    pair.decode.link.land()
    pair.finish()
    (settled,) = pair.decode.driver.take_settled()
    assert "lease ended" in settled.reason
    assert settled.transferred_tokens == settled.bytes == 0
    pair.assert_empty()


def test_a_confirmation_that_was_late_is_not_taken_for_that_of_a_later_hand_off() -> None:
    """A request is confirmed twice; it ends, and its release is lost. A second one brings the same ticket, and what it
    reads is not the prompt's any more."""
    pair = Pair()
    ticket = pair.prefill.hand_over("a")
    link = pair.decode.link
    pair.decode.fetch("a", ticket)
    talk(pair.prefill, pair.decode)
    pair.decode.step()
    link.land()
    pair.pass_time(1.0)
    pair.pass_time(LIMITS.answer_s + 0.1)
    assert pair.prefill.answers(pair.decode)
    late = [event for event in link.events if isinstance(event, Received) and isinstance(event.message, Confirmed)]
    assert len(late) == 2
    link.events.remove(late[1])
    pair.decode.step()
    assert pair.decode.scheduler.requests["a"].state is State.DECODING
    assert link.take_sent(Release)
    pair.decode.scheduler.abort("a")
    pair.decode.driver.advance()
    pair.decode.kv.reset_cache()

    pair.decode.fetch("b", ticket)
    talk(pair.prefill, pair.decode)
    pair.decode.step()
    assert link.reads
    # Its renewals are lost, and the lease ends before the last byte is read.
    pair.clock.now_s += LIMITS.lease_s + 1.0
    pair.prefill.driver.advance()
    link.land()
    link.events.append(late[1])
    pair.decode.driver.advance()
    pair.finish("b")
    assert "lease ended" in pair.decode.driver.take_settled()[-1].reason
    pair.assert_empty()


@pytest.mark.parametrize("policy", list(LoadFailure))
@pytest.mark.parametrize("lost", [Hello, Fetch])
def test_a_question_without_an_answer_is_asked_once_more_and_then_given_up(lost: type, policy: LoadFailure) -> None:
    pair = Pair(load_failure=policy)
    ticket = pair.prefill.hand_over("a")
    if lost is Fetch:
        pair.decode.fetch("before", replace_lease(ticket))
        talk(pair.prefill, pair.decode)
        pair.decode.step()
    pair.decode.fetch("a", ticket)
    assert len(pair.decode.link.take_sent(lost)) == 1
    pair.pass_time(LIMITS.answer_s - 0.1)
    assert pair.decode.link.take_sent(lost) == []
    pair.pass_time(0.2)
    assert len(pair.decode.link.take_sent(lost)) == 1
    pair.pass_time(LIMITS.answer_s - 0.5)
    assert pair.decode.scheduler.requests["a"].state is State.FETCHING
    pair.pass_time(0.6)
    failed = policy is LoadFailure.FAIL
    assert ("a" in pair.decode.scheduler.requests) != failed
    if not failed:
        assert pair.decode.scheduler.requests["a"].state is State.WAITING


def replace_lease(ticket: Ticket) -> Ticket:
    """A ticket for a lease that does not exist: the peer is met, and refuses it."""
    return with_fields(ticket, lease=bytes(16))


def test_a_read_that_was_given_up_is_fenced_when_its_time_is_up_and_its_pages_wait() -> None:
    """The client leaves, and then the prefill worker stops: the pages must not be lost for ever."""
    pair = Pair()
    pair.reading()
    pair.decode.scheduler.abort("a")
    pair.decode.driver.advance()
    held = sum(arena.num_available for arena in pair.decode.kv.pool.arenas)
    pair.pass_time(LIMITS.read_s - 1.0)
    assert pair.decode.link.fenced == []
    deadline_s = pair.decode.driver.next_deadline_s
    assert deadline_s is not None
    pair.pass_time(deadline_s - pair.clock.now_s + 0.1)
    pair.pass_time(2.0)
    assert pair.decode.link.fenced == ["P"]
    assert sum(arena.num_available for arena in pair.decode.kv.pool.arenas) == held
    pair.decode.link.fall_quiet("P")
    pair.decode.driver.advance()
    pair.prefill.answers(pair.decode)
    pair.prefill.driver.advance()
    pair.assert_empty()


def test_a_read_that_was_given_up_releases_the_lease_only_when_it_has_ended() -> None:
    pair = Pair()
    pair.reading()
    pair.decode.link.take_sent()
    pair.decode.scheduler.abort("a")
    pair.decode.driver.advance()
    assert pair.decode.link.take_sent(Release) == []
    pair.decode.link.land()
    pair.decode.driver.advance()
    assert len([message for _peer, message in pair.decode.link.sent if isinstance(message, Release)]) == 1
    talk(pair.prefill, pair.decode)
    pair.prefill.driver.advance()
    pair.assert_empty()


def test_a_peer_that_stops_while_it_sends_is_fenced_and_the_prompt_computed() -> None:
    pair = Pair()
    pair.reading()
    pair.pass_time(LIMITS.read_s + 0.1)
    assert pair.decode.link.fenced == ["P"]
    assert pair.decode.scheduler.requests["a"].state is State.WAITING
    assert not pair.decode.driver.is_idle, "its pages are in quarantine until the link is quiet"
    pair.decode.link.fall_quiet("P")
    pair.finish()
    pair.assert_empty()


def test_nothing_is_read_from_a_peer_that_is_cut_off_until_it_was_met_again() -> None:
    """A second request has its offer when the peer is cut off for the first one's sake."""
    pair = Pair()
    pair.reading("a")
    pair.decode.fetch("b", pair.prefill.hand_over("b"))
    talk(pair.prefill, pair.decode)
    pair.pass_time(LIMITS.read_s + 0.1)
    assert pair.decode.link.fenced == ["P"]
    started = pair.decode.link.started
    pair.decode.step()
    assert pair.decode.link.started == started
    assert "connection" in next(s.reason for s in pair.decode.driver.take_settled() if s.sequence == "b")
    pair.decode.link.fall_quiet("P")
    pair.finish("a")
    pair.finish("b")
    pair.assert_empty()


def test_a_peer_that_was_restarted_is_met_again_and_nothing_promised_before_is_read_from_it() -> None:
    pair = Pair()
    pair.reading("before")
    pair.finish("before")
    pair.decode.kv.reset_cache()
    pair.decode.fetch("old", pair.prefill.hand_over("old"))
    talk(pair.prefill, pair.decode)
    # Another process with an id of its own listens at the same endpoint.
    pair.prefill = ScriptedWorker("Q", Role.PREFILL, pair.clock)
    pair.prefill.link.endpoint = "P"
    pair.decode.fetch("new", pair.prefill.hand_over("new"))
    talk(pair.prefill, pair.decode)
    assert pair.decode.link.fenced == ["P"]
    pair.decode.link.fall_quiet("P")
    talk(pair.prefill, pair.decode)
    started = pair.decode.link.started
    pair.decode.step()
    reads = pair.decode.link.started - started
    assert reads == len(pair.decode.kv.layout.groups), "only those of the request whose KV the new process holds"
    pair.finish("new")
    pair.finish("old")
    settled = {each.sequence: each for each in pair.decode.driver.take_settled()}
    assert "connection" in settled["old"].reason
    assert (settled["new"].reason, settled["new"].transferred_tokens) == ("", 40)
    pair.assert_empty()


def test_a_question_to_a_peer_that_is_cut_off_is_asked_once_it_is_quiet() -> None:
    pair = Pair()
    pair.reading("a")
    pair.pass_time(LIMITS.read_s + 0.1)
    pair.decode.link.take_sent()
    pair.decode.fetch("b", pair.prefill.hand_over("b"))
    assert pair.decode.link.take_sent() == []
    # An answer to an earlier greeting comes late.
    greeting = Hello(digest=layout_digest(pair.decode.kv.layout, pair.decode.kv.config.identity), reader="D.1")
    welcome = pair.prefill.lender.desk.answer(greeting, pair.prefill.link.introduction)
    assert welcome is not None
    pair.decode.link.events.append(Received("P", welcome))
    pair.decode.driver.advance()
    assert pair.decode.link.take_sent() == []
    pair.decode.link.fall_quiet("P")
    pair.decode.driver.advance()
    assert [message for _peer, message in pair.decode.link.sent if isinstance(message, Hello)]
    talk(pair.prefill, pair.decode)
    pair.finish("b")
    assert pair.decode.driver.counters.transferred_tokens > 0
    pair.finish("a")
    pair.clock.now_s += LIMITS.lease_s
    pair.prefill.driver.advance()
    pair.assert_empty()


def test_draft_kv_that_does_not_arrive_in_time_costs_no_more_than_itself() -> None:
    pair = Pair()
    pair.reading()
    link, target = pair.decode.link, pair.decode.kv.layout.target_groups
    link.land(*[number for number, read in link.reads.items() if read.group in target])
    assert link.reads
    pair.pass_time(LIMITS.read_s + 0.1)
    assert link.fenced == ["P"]
    assert pair.decode.scheduler.requests["a"].state is State.LOADING
    link.fall_quiet("P")
    pair.finish()
    (settled,) = pair.decode.driver.take_settled()
    assert settled.transferred_tokens == 40
    pair.assert_empty()


def test_a_worker_holds_no_more_than_its_share_for_others() -> None:
    clock = Clock()
    worker = ScriptedWorker("P", Role.PREFILL, clock)
    worker.hand_over("a")
    pages = [arena.num_pages - 1 for arena in worker.kv.pool.arenas]
    held = [total - arena.num_available for total, arena in zip(pages, worker.kv.pool.arenas, strict=True)]
    assert sum(held) == worker.lender.held_pages
    share = max(count / total for count, total in zip(held, pages, strict=True))
    for held_share, fits in ((share, True), (share * 0.99, False)):
        worker = ScriptedWorker("P", Role.PREFILL, clock, limits=replace(LIMITS, held_share=held_share))
        if fits:
            worker.hand_over("a")
        with pytest.raises(AssertionError):
            worker.hand_over("b")
        assert worker.driver.counters.hand_overs_refused == 1
        clock.now_s += LIMITS.lease_s
        worker.driver.advance()
        worker.assert_empty()


def test_leases_that_are_shorter_than_ones_own_are_prolonged_in_time() -> None:
    pair = Pair(prefill={"limits": replace(LIMITS, lease_s=3.0)})
    pair.decode.driver.advance()
    pair.decode.fetch("a", pair.prefill.hand_over("a"))
    talk(pair.prefill, pair.decode)
    pair.decode.link.take_sent()
    pair.pass_time(0.4)
    assert pair.decode.link.take_sent(Renew) == []
    pair.pass_time(0.2)
    assert len([message for _peer, message in pair.decode.link.sent if isinstance(message, Renew)]) == 1
    pair.finish()
    pair.assert_empty()


def test_a_lease_whose_pages_were_given_up_is_withdrawn() -> None:
    pair = Pair()
    pair.reading()
    pair.prefill.scheduler.abort("a")
    pair.prefill.driver.advance()
    assert len(pair.prefill.lender.leases) == 0
    pair.decode.link.land()
    pair.finish()
    assert "lease ended" in pair.decode.driver.take_settled()[0].reason
    pair.assert_empty()


def test_every_hand_off_without_draft_kv_is_counted() -> None:
    pair = Pair(prefill={"method": "none"})
    for name in ("a", "b"):
        pair.reading(name)
        pair.finish(name)
        pair.decode.kv.reset_cache()
    assert pair.decode.driver.counters.draft_groups_missing == 2
    pair.assert_empty()


def test_a_ticket_serves_one_request_at_a_time() -> None:
    pair = Pair()
    ticket = pair.prefill.hand_over("a")
    pair.decode.fetch("a", ticket)
    pair.decode.fetch("b", ticket)
    answers = pair.decode.driver.advance()
    assert [(answer.sequence, answer.offer, "in use" in answer.reason) for answer in answers] == [("b", None, True)]
    pair.finish("a")
    pair.assert_empty()


def test_a_ticket_that_is_declined_with_another_prompt_takes_nothing_away() -> None:
    pair = Pair()
    ticket = pair.prefill.hand_over("a")
    pair.decode.driver.decline(ticket, binding=prompt_binding(ids(40, seed=1)))
    assert pair.decode.link.sent == []
    pair.decode.driver.decline(ticket, binding=ticket.binding)
    assert pair.decode.link.take_sent() == [Release(lease=ticket.lease, reader="D.1")]


def test_a_ticket_that_is_declined_while_a_request_uses_it_takes_nothing_away() -> None:
    pair = Pair()
    ticket = pair.prefill.hand_over("a")
    pair.decode.fetch("a", ticket)
    pair.decode.link.take_sent(Hello)
    pair.decode.driver.decline(ticket, binding=ticket.binding)
    assert pair.decode.link.sent == []


def test_a_peer_of_other_weights_is_refused_before_anything_is_read() -> None:
    pair = Pair(prefill={"weights": "mistral"})
    pair.decode.fetch("a", pair.prefill.hand_over("a"))
    talk(pair.prefill, pair.decode)
    pair.decode.step()
    assert pair.decode.link.started == 0
    assert pair.decode.driver.counters.fetch_failures == 1
    pair.finish()


def test_a_peer_that_is_not_used_any_more_is_forgotten_and_met_again() -> None:
    pair = Pair()
    pair.reading("a")
    pair.finish("a")
    pair.pass_time(IDLE_PEER_S - 1.0)
    assert pair.decode.link.forgotten == []
    pair.decode.kv.reset_cache()
    # A hand-off that uses the peer keeps it, however long it takes to end.
    pair.reading("b")
    pair.pass_time(1.0)
    assert pair.decode.link.forgotten == []
    pair.finish("b")
    pair.pass_time(IDLE_PEER_S)
    assert pair.decode.link.forgotten == ["P"]
    pair.decode.kv.reset_cache()
    pair.reading("c")
    pair.finish("c")
    pair.assert_empty()


@pytest.mark.parametrize("first", ["read", "load"])
def test_pages_wait_until_both_peers_and_tiers_have_stopped_writing_to_them(first: str) -> None:
    restored: list[Any] = []
    quarantine = Quarantine(restored.append)
    # Reads and loads are numbered apart.
    quarantine.add([(0, [3, 4])], peer_reads={1}, tier_loads={1})
    ends = [quarantine.read_ended, quarantine.load_ended]
    for end in ends if first == "read" else reversed(ends):
        assert restored == []
        quarantine.give_back()
        assert restored == []
        end(1)
    quarantine.give_back()
    assert restored == [[(0, [3, 4])]]
    assert len(quarantine) == 0


def test_an_idle_driver_has_no_deadline() -> None:
    pair = Pair()
    assert pair.decode.driver.next_deadline_s is None
    pair.decode.fetch("a", pair.prefill.hand_over("a"))
    assert pair.decode.driver.next_deadline_s == LIMITS.answer_s
    pair.finish()
    assert pair.decode.driver.next_deadline_s is None


def test_a_driver_wakes_up_to_prolong_the_leases_that_it_waits_under_and_to_end_its_own() -> None:
    pair = Pair()
    pair.decode.driver.advance()
    pair.decode.fetch("a", pair.prefill.hand_over("a"))
    assert pair.prefill.driver.next_deadline_s == LIMITS.lease_s
    talk(pair.prefill, pair.decode)
    deadline_s = pair.decode.driver.next_deadline_s
    assert deadline_s is not None
    assert deadline_s <= LIMITS.renew_s
    pair.pass_time(deadline_s)
    assert pair.decode.link.take_sent(Renew)


def test_a_repeated_offer_does_not_release_what_is_being_read_for_a_request_that_was_given_up() -> None:
    pair = Pair()
    ticket = pair.prefill.hand_over("a")
    pair.decode.fetch("a", ticket)
    talk(pair.prefill, pair.decode)
    pair.decode.step()
    offered = pair.prefill.lender.desk.answer(Fetch(lease=ticket.lease, reader=pair.decode.driver.engine), bytes)
    assert offered is not None
    pair.decode.scheduler.abort("a")
    pair.decode.driver.advance()
    pair.decode.link.events.append(Received("P", offered))
    pair.decode.link.take_sent()
    pair.decode.driver.advance()
    assert pair.decode.link.take_sent(Release) == []
    pair.decode.link.land()
    pair.decode.driver.advance()
    talk(pair.prefill, pair.decode)
    pair.prefill.driver.advance()
    pair.assert_empty()


def test_two_workers_that_hold_for_each_other_what_each_waits_for_do_not_wait_for_ever() -> None:
    """Each holds pages for a request of the other, which needs all of its own pages."""
    clock = Clock()
    workers = [ScriptedWorker(name, Role.BOTH, clock, method="none", pages=30) for name in ("A", "B")]
    tickets = [worker.hand_over("held", 120) for worker in workers]
    for worker, ticket in zip(workers, reversed(tickets), strict=True):
        worker.kv.reset_cache()
        worker.fetch("waits", ticket, 120)
    for _ in range(200):
        for worker, other in (workers, workers[::-1]):
            worker.step()
            other.answers(worker)
            worker.link.land()
        clock.now_s += 1.0
    for worker in workers:
        assert worker.engine.text["waits"] == reference_text(ids(120), 12)
        worker.driver.advance()
        worker.assert_empty()


def test_a_worker_that_holds_nothing_for_others_waits_for_pages_as_long_as_it_takes() -> None:
    pair = Pair(pages=30, method="none")
    pair.decode.scheduler.add(RequestSpec(id="long", prompt=ids(120, seed=1), max_tokens=16))
    pair.decode.step()
    pair.decode.fetch("a", pair.prefill.hand_over("a", 120), 120)
    for _ in range(12):
        talk(pair.prefill, pair.decode)
        pair.clock.now_s += LIMITS.renew_s
        pair.decode.step()
        pair.prefill.driver.advance()
    assert pair.decode.scheduler.requests["a"].state is State.WAITING
    pair.finish(length=120)
    assert pair.decode.driver.counters.fetch_failures == 0
    pair.assert_empty()


def test_a_ticket_that_serves_a_second_request_is_released_when_nothing_is_read_under_it_any_more() -> None:
    """The first request was given up; its reads, which have not ended, still need the pages."""
    pair = Pair()
    ticket = pair.prefill.hand_over("a")
    pair.decode.fetch("a", ticket)
    talk(pair.prefill, pair.decode)
    pair.decode.step()
    first = list(pair.decode.link.reads)
    pair.decode.scheduler.abort("a")
    pair.decode.fetch("b", ticket)
    talk(pair.prefill, pair.decode)
    pair.decode.step()
    second = [number for number in pair.decode.link.reads if number not in first]
    assert second
    pair.decode.link.take_sent()
    pair.decode.link.land(*first[:-1], *second)
    pair.decode.driver.advance()
    pair.prefill.answers(pair.decode)
    pair.decode.driver.advance()
    assert pair.decode.link.take_sent(Release) == []
    pair.decode.link.land(first[-1])
    pair.decode.driver.advance()
    assert [message for _peer, message in pair.decode.link.sent if isinstance(message, Release)]
    pair.finish("b")
    pair.assert_empty()


def test_bytes_are_compared_even_if_their_peer_was_cut_off_after_they_had_landed() -> None:
    pair = Pair()
    pair.decode.driver.checks = SimpleNamespace(compares_bytes=True)
    pair.reading()
    pair.decode.link.take_sent()
    pair.decode.link.land()
    pair.decode.driver.advance()
    (first,) = pair.decode.link.take_sent(Confirm)
    pair.decode.link.events.append(Quiet("P"))
    pair.pass_time(LIMITS.answer_s + 0.1)
    (second,) = pair.decode.link.take_sent(Confirm)
    assert isinstance(first, Confirm)
    assert first.digests_of
    assert second == first


def test_bytes_that_differ_from_the_senders_count_as_failed() -> None:
    intact, changed = (Load(group, Interval(0, 8), None) for group in (0, 1))
    differing: list[Load] = []
    checks: Any = SimpleNamespace(
        digest=lambda _sequence, _load: b"sent",
        differs=lambda _sequence, load, _sender: differing.append(load),
    )
    hand_off: Any = SimpleNamespace(
        sequence="a", offer=SimpleNamespace(engine="P.1"), landed=[intact, changed], failed=[], reason=""
    )
    take_back_what_differs(hand_off, [b"sent", b"held"], checks)
    assert (hand_off.landed, hand_off.failed, differing) == ([intact], [changed], [changed])
    assert hand_off.reason
