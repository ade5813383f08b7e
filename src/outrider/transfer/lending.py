"""The prefill worker's side of hand-offs: what it holds for decode workers, and for how long."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from outrider.scheduler import Role, Scheduler, State
from outrider.transfer.desk import Desk, Digest
from outrider.transfer.leases import LeaseBook
from outrider.transfer.messages import PROTOCOL
from outrider.transfer.offers import Offer, OfferedGroup, layout_digest, signatures
from outrider.transfer.records import FirstToken, TransferCounters, TransferLimits
from outrider.transfer.tickets import ClusterKey, Ticket


class Lender:
    def __init__(
        self,
        scheduler: Scheduler,
        *,
        engine: str,
        key: ClusterKey,
        limits: TransferLimits,
        clock: Callable[[], float],
        time_of_day: Callable[[], float],
        digest_slots: Digest | None = None,
        on_ended: Callable[[], None] | None = None,
    ) -> None:
        """`engine`: an id that is new at each start. `clock`: the one that leases run by."""
        self.engine = engine
        self.limits = limits
        self.counters = TransferCounters()
        """Shared with the driver of the same worker."""
        self._scheduler = scheduler
        self._kv = scheduler.kv
        self._layout = scheduler.kv.layout
        identity = scheduler.kv.config.identity
        self._signatures = signatures(self._layout, identity)
        self._key = key
        self._clock = clock
        self._time_of_day = time_of_day
        self.leases = LeaseBook(limits.lease_s, on_ended=on_ended)
        self.desk = Desk(
            engine=engine,
            digest=layout_digest(self._layout, identity),
            signatures=self._signatures,
            leases=self.leases,
            clock=clock,
            digest_slots=digest_slots,
            hands_over=scheduler.config.role is not Role.DECODE,
        )
        """What answers peers; a link calls it."""
        self._held_pages: dict[str, list[int]] = {}
        """Number of pages of each arena that a sequence holds for peers."""

    def hand_over(
        self,
        sequence: str,
        *,
        endpoint: str,
        binding: bytes,
        first: FirstToken,
    ) -> str | None:
        """Promise a held sequence's KV to whichever worker brings the ticket that is returned.

        Returns None, and lets the sequence go, if this worker holds as much for others as it may. `endpoint`: where
        peers reach this worker.
        """
        request = self._scheduler.requests[sequence]
        assert request.state is State.HELD, "only a sequence that was computed and is held can be handed over"
        pages = [0] * len(self._layout.arena_page_bytes)
        for group, state in enumerate(request.kv.groups):
            pages[self._layout.arena_of[group]] += state.num_held
        if not self._may_hold(pages):
            self.counters.hand_overs_refused += 1
            self._scheduler.release_held(sequence)
            return None
        groups = {
            self._signatures[group]: OfferedGroup(
                interval, tuple(request.kv.groups[group].pages), self._layout.groups[group].page_tokens
            )
            for group, interval in self._kv.export_intervals(request.kv).items()
        }
        offer = Offer(
            engine=self.engine,
            binding=binding,
            num_tokens=request.prompt_len,
            first_token=first.token,
            seed=first.seed,
            logprobs=first.logprobs,
            drafts=first.drafts,
            drafts_worth_asking=first.drafts_worth_asking,
            groups=groups,
        )
        lease = self.leases.grant(sequence, offer, self._clock())
        self._held_pages[sequence] = pages
        self.counters.handed_over += 1
        return self._key.seal(
            Ticket(
                version=PROTOCOL,
                engine=self.engine,
                endpoint=endpoint,
                lease=lease,
                binding=binding,
                expires_s=self._time_of_day() + self.limits.lease_s,
                settings=first.settings,
            )
        )

    def _may_hold(self, pages: Sequence[int]) -> bool:
        for arena, more in enumerate(pages):
            held = sum(each[arena] for each in self._held_pages.values())
            if held + more > self.limits.held_share * (self._kv.pool.arenas[arena].num_pages - 1):
                return False
        return True

    @property
    def held_pages(self) -> int:
        """Number of pages that are held for peers."""
        return sum(sum(pages) for pages in self._held_pages.values())

    def withdraw(self, sequence: str) -> None:
        """End the leases of a sequence whose pages are gone. Peers must not be told any more that they hold."""
        self.leases.withdraw(sequence)
        self._held_pages.pop(sequence, None)

    def end_leases(self, now_s: float) -> None:
        """Give back the pages of leases that have ended. They left the book first: no peer is told that they hold."""
        self.leases.expire(now_s)
        for ended in self.leases.take_ended():
            self.counters.leases_expired += ended.expired
            self._held_pages.pop(ended.sequence, None)
            self._scheduler.release_held(ended.sequence)
