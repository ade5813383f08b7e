"""Requests whose prompt's KV comes from a prefill worker or a tier: answers, loads, and what follows from them.

    fetching ──▶ waiting ──▶ loading ──▶ settling ──▶ prefilling, or decoding with the drafts that came along
        │           ▲           │            │
        └───────────┴───────────┴────────────┴──▶ failed, where the policy says so

Without an answer, or with loads that failed or were lost, the request is computed here as far as its KV is missing.
"""

from __future__ import annotations

from collections.abc import Mapping

from outrider.kv.intervals import Interval
from outrider.kv.ledger import Load, LoadState
from outrider.kv.manager import KVManager
from outrider.kv.prefix import Tier
from outrider.scheduler.config import LoadFailure, SchedulerConfig
from outrider.scheduler.plan import Update
from outrider.scheduler.request import Request, State
from outrider.scheduler.roster import Roster


class IncomingKV:
    def __init__(self, config: SchedulerConfig, kv: KVManager, roster: Roster) -> None:
        self.new_loads: list[tuple[str, tuple[Load, ...]]] = []
        """Loads of requests that were admitted, which are yet to be started."""
        self.updates: list[Update] = []
        """First tokens that came from prefill workers, and ends outside a step."""
        self._config = config
        self._kv = kv
        self._roster = roster
        self._settling: list[Request] = []
        """Requests whose loads have all ended, but with a page copy that has yet to run."""

    # ---- the prefill worker's answer ---------------------------------------------------------------

    def fetched(
        self, sequence_id: str, remote: Mapping[int, Interval], first_token: int | None, *, drafts: int
    ) -> None:
        request = self._roster.fetching.pop(sequence_id, None)
        if request is None:
            return
        request.remote, request.carried_drafts = remote, drafts
        finish = None
        if first_token is not None:
            tokens, finish = request.cut_at_end((first_token,))
            request.tokens.extend(tokens)
            self.updates.append(Update(request.id, tokens, finish))
        if finish is None:
            self._roster.wait(request)
        else:
            self._roster.finish(request)

    def not_fetched(self, sequence_id: str) -> None:
        request = self._roster.requests.get(sequence_id)
        if request is None or request.state not in (State.FETCHING, State.WAITING):
            return
        self._roster.fetching.pop(sequence_id, None)
        request.remote, request.carried_drafts = None, 0
        if self._config.load_failure is LoadFailure.FAIL:
            self._fail(request)
        elif request.state is State.FETCHING:
            self._roster.wait(request)

    def looked_up(self, sequence_id: str, found: Tier | None) -> None:
        request = self._roster.fetching.pop(sequence_id, None)
        if request is not None:
            request.kv.found = found
            self._roster.wait(request)

    # ---- loads -------------------------------------------------------------------------------------

    def await_loads(self, request: Request, loads: tuple[Load, ...]) -> None:
        """Keep an admitted request until its loads have ended."""
        self._roster.load(request)
        self.new_loads.append((request.id, loads))

    def arrived(self, sequence_id: str, load: Load) -> None:
        request = self._roster.loading.get(sequence_id)
        if request is not None:
            self._kv.import_interval(request.kv, load)
            self._maybe_start(request)

    def failed(self, sequence_id: str, load: Load) -> None:
        request = self._roster.loading.get(sequence_id)
        if request is not None:
            self._kv.fail_load(request.kv, load)
            self._maybe_start(request)

    def lost(self, sequence_id: str) -> None:
        """Go on without the loads that have not ended; what they may still write to is put aside."""
        request = self._roster.loading.get(sequence_id)
        if request is None:
            return
        if not request.kv.pending_groups() - set(self._kv.layout.draft_groups):
            self._roster.note_given_up(request, self._kv.abandon_draft_loads(request.kv))
            self._maybe_start(request)
            return
        must_fail = self._peer_failed(request, LoadState.PENDING, LoadState.FAILED)
        self._roster.note_given_up(request, self._kv.abandon_loading(request.kv))
        request.epoch += 1
        self._roster.wait(request)
        if must_fail:
            self._fail(request)

    def settle(self) -> None:
        """Start the requests that waited only for a page copy of the step that has just ended."""
        settling, self._settling = self._settling, []
        for request in settling:
            self._maybe_start(request)

    def forget_loads(self) -> None:
        """Forget all loads, after every request that waits for one has ended."""
        self._settling, self.new_loads = [], []

    # ---- what follows ------------------------------------------------------------------------------

    def start(self, request: Request) -> None:
        """Let an admitted request run from where its KV ends."""
        carried, request.carried_drafts = request.carried_drafts, 0
        drafts = request.kv.drafting or not self._kv.layout.footprint.groups
        if carried and drafts and request.kv.committed == len(request.tokens) - 1:
            request.drafts = carried
            self._roster.decode(request)
        else:
            self._roster.prefill(request)

    def _maybe_start(self, request: Request) -> None:
        kv = request.kv
        if kv.loading or request.state is not State.LOADING:
            return
        if not self._kv.may_finish_loading(kv):
            self._settling.append(request)
            return
        must_fail = self._peer_failed(request, LoadState.FAILED)
        reached = self._kv.finish_loading(kv)
        request.epoch += 1
        if must_fail:
            self._roster.hold(request)
            self._fail(request)
        elif reached < kv.hit:
            # What the index held was given up for the transfer; search again.
            self._kv.release(kv)
            self._roster.wait(request)
        else:
            self.start(request)

    def _peer_failed(self, request: Request, *states: LoadState) -> bool:
        """Whether a load in one of these states makes the request fail. Only the target's KV from a peer does, and only
        if the policy says so: a page that is missing in a tier is a miss like any other."""
        if self._config.load_failure is not LoadFailure.FAIL:
            return False
        groups = self._kv.layout.target_groups
        return any(
            load.key is None and load.group in groups and state in states for load, state in request.kv.loads.items()
        )

    def _fail(self, request: Request) -> None:
        self.updates.append(Update(request.id, (), "failed"))
        self._roster.give_up(request, keep_end=False)
