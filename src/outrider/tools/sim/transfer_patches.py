"""The bugs of hand-offs that `transfer_mutations` puts back: each takes the original and returns a wrong version of it.

They know the insides of what they patch, loosely typed on purpose: they are bugs, not features.
"""

from __future__ import annotations

from typing import Any

from outrider.kv.intervals import SlotRun, page_count
from outrider.transfer.hand_offs import Phase
from outrider.transfer.leases import EndedLease
from outrider.transfer.messages import Confirmed, Release


def trim_to_last_pages(original: Any) -> Any:
    def plan_pull(layout: Any, identity: Any, load: Any, offer: Any, table: Any) -> tuple[SlotRun, ...]:
        runs = original(layout, identity, load, offer, table)
        size = layout.groups[load.group].page_tokens
        offered = next(g for s, g in offer.groups.items() if s.name == layout.groups[load.group].name)
        if offered.page_tokens != size:
            return tuple(runs)
        # "A surplus on the other side is a cached prefix": keep its last pages, as many as are wanted here.
        first = load.interval.start // size
        wanted = page_count(load.interval.end, size) - first
        last_pages = offered.pages[len(offered.pages) - wanted :]
        return tuple(run._replace(source_page=last_pages[(run.start // size) - first]) for run in runs)

    return plan_pull


def identity_left_out(original: Any) -> Any:
    return property(lambda self: "")


def failure_counts_as_arrival(original: Any) -> Any:
    return lambda self, request_id, load: self.load_arrived(request_id, load)


def lease_always_held(original: Any) -> Any:
    def confirmed(self: Any, hand_off: Any, message: Any) -> None:
        said = {"lease": message.lease, "question": message.question, "digests": message.digests}
        original(self, hand_off, Confirmed(held=True, **said))

    return confirmed


def renew_nothing(original: Any) -> Any:
    return lambda self, now_s: None


def expire_after_release(original: Any) -> Any:
    """The lease stays in the book for a while after its pages were given back."""

    def expire(self: Any, now_s: float) -> None:
        for lease, found in list(self._leases.items()):
            if found.end_s + self.duration_s <= now_s:
                del self._leases[lease]
            elif found.end_s <= now_s and found.sequence:
                self._ended.append(EndedLease(found.sequence, True))
                found.sequence = ""

    return expire


def restore_before_quiet(original: Any) -> Any:
    def give_back(self: Any) -> None:
        for aside in self._aside:
            aside.peer_reads.clear()
        original(self)

    return give_back


def confirm_while_reading(original: Any) -> Any:
    def maybe_confirm(self: Any, hand_off: Any) -> None:
        if hand_off.phase is Phase.READING:
            hand_off.landed = [load for load in hand_off.pulls if load not in hand_off.failed]
            self._enter(hand_off, Phase.CONFIRMING, self.limits.answer_s)
            self._send_confirm(hand_off)

    return maybe_confirm


def any_prompt_will_do(original: Any) -> Any:
    return lambda self, binding, time_of_day_s: original(self, self.binding, time_of_day_s)


def release_at_once(original: Any) -> Any:
    def release(self: Any, hand_off: Any) -> None:
        self._hand_offs.forget(hand_off)
        self._link.send(hand_off.peer, Release(lease=hand_off.ticket.lease, reader=self.engine))

    return release


def reads_end_with_their_deadline(original: Any) -> Any:
    def end_reads(self: Any, hand_off: Any) -> None:
        original(self, hand_off)
        for number in hand_off.open:
            self._quarantine.read_ended(number)

    return end_reads


def any_bytes_will_do(original: Any) -> Any:
    return lambda hand_off, digests, checks: None


def all_or_nothing(original: Any) -> Any:
    def settle(self: Any, hand_off: Any, *, held: bool) -> None:
        original(self, hand_off, held=held and not hand_off.failed)

    return settle


def loading_pages_given_back_at_once(original: Any) -> Any:
    def abandon(self: Any, plan: Any) -> list[str]:
        ended = list(original(self, plan))
        for sequence, pages in self.roster.given_up:
            if sequence in ended:
                self.kv.restore_quarantined(pages)
        self.roster.given_up = [each._replace(quarantined=[]) for each in self.roster.given_up]
        return ended

    return abandon


def nothing_said(original: Any) -> Any:
    return lambda self, sequence_id: None


def restarted_peer_trusted(original: Any) -> Any:
    def welcome(self: Any, endpoint: str, message: Any) -> Any:
        peer = self._peers.get(endpoint)
        if peer is not None and peer.engine is not None:
            peer.engine = message.engine
        return original(self, endpoint, message)

    return welcome


def claim_by_anyone(original: Any) -> Any:
    def claim(self: Any, lease: bytes, reader: str, now_s: float) -> Any:
        found = self._leases.get(lease)
        if found is not None:
            found.reader = None
        return original(self, lease, reader, now_s)

    return claim


def no_quarantine(original: Any) -> Any:
    def abandon_loading(self: Any, sequence: Any) -> list[tuple[int, list[int]]]:
        self.holdings.return_all(sequence)
        return []

    return abandon_loading
