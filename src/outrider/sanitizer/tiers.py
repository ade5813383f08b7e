"""What the checker is told about pages that go to tiers behind the device and come from them.

A tier knows pages by key, and the checker knows them by the identity of their last slot, which it computes apart.
"""

from __future__ import annotations

from outrider.kv.intervals import Interval
from outrider.kv.ledger import Load, SequenceKV
from outrider.kv.manager import KVManager
from outrider.kv.publication import NewPage
from outrider.sanitizer.checks import Sanitizer
from outrider.sanitizer.shadow import DURABLE
from outrider.transfer.cache_tier import CacheTier

FEWEST_KEYS = 1024
"""Number of keys below which none is forgotten."""


class TierWatch:
    """`transfer.offloading.TierChecks` for a worker with a sanitizer."""

    def __init__(self, sanitizer: Sanitizer, kv: KVManager, tiers: list[CacheTier]) -> None:
        self._sanitizer = sanitizer
        self._kv = kv
        self._tiers = tiers
        self._keys: dict[tuple[int, int], bytes] = {}
        """Keys of pages that may be in a tier, by group and by the identity of their last slot."""
        self._keys_max = FEWEST_KEYS
        sanitizer.tier_holds = self._holds

    def offered(self, tier: CacheTier, new: NewPage, *, wanted: bool) -> None:
        size = self._kv.layout.groups[new.group].page_tokens
        ids, _states = self._sanitizer.steps.slots(new.group, new.page, 0, size)
        self._note(new.group, ids[-1], new.key)

    def found(self, sequence: SequenceKV, group: int, page_number: int, key: bytes) -> None:
        identity = self._sanitizer.page_identity(sequence, group, page_number)
        if identity is not None:
            self._note(group, identity, key)

    def _note(self, group: int, identity: int, key: bytes) -> None:
        self._keys[group, identity] = key
        if len(self._keys) > self._keys_max:
            self._keys = {at: key for at, key in self._keys.items() if self._is_held(at[0], key)}
            self._keys_max = max(FEWEST_KEYS, 2 * len(self._keys))

    def _is_held(self, group: int, key: bytes) -> bool:
        """Whether a page is on the device, or where some sequence can load it from."""
        return (
            key in self._kv.pool.indexes[group].pages
            or any(tier.contains(group, key) for tier in self._tiers)
            or any(each.found is not None and each.found.contains(group, key) for each in self._kv.sequences.values())
        )

    def _holds(self, sequence: SequenceKV, group: int, identity: int) -> bool:
        key = self._keys.get((group, identity))
        if key is None:
            return False
        found = sequence.found
        in_found = found is not None and found.contains(group, key)
        return in_found or any(tier.contains(group, key) for tier in self._tiers)

    def loaded(self, sequence: str, load: Load) -> None:
        steps, size = self._sanitizer.steps, self._kv.layout.groups[load.group].page_tokens
        page = self._kv.sequences[sequence].groups[load.group].pages[load.interval.start // size]
        # The trailer vouches for the key, and the key names this very prompt: the slots have the identity of ours.
        ids = steps.identities(sequence, load.group, Interval(load.interval.start, load.interval.end))
        steps.landed(sequence, load.group, page, 0, ids, bytes([DURABLE]) * len(ids), "tier")

    def stored(self, new: NewPage) -> None:
        self._sanitizer.page_stored(new.group, new.page)
