"""One tier behind the device as a worker uses it: what it keeps by its policy, what it holds, and what it has done."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.kv.layout import KVLayout
from outrider.kv.publication import NewPage
from outrider.kv.retention import DENSE, Marks, Retention, RetentionMask
from outrider.transfer.tier import Tier, TierPage


@dataclass(slots=True)
class TierCounters:
    """Totals since the worker started; all but times and bytes are numbers of pages."""

    looked_up: int = 0
    found: int = 0
    loaded: int = 0
    missed: int = 0
    """Pages that had been found and could not be loaded."""
    refused: int = 0
    """Values that were not used because their trailer was not right."""
    stored: int = 0
    not_stored: int = 0
    """Pages that the policy keeps and that were not stored: the tier was full, slow or not there."""
    loaded_bytes: int = 0
    stored_bytes: int = 0
    look_up_s: float = 0.0
    load_s: float = 0.0
    store_s: float = 0.0
    """Time that operations took from their start to their end, added up."""


class CacheTier:
    def __init__(self, tier: Tier, layout: KVLayout, retention: Retention = DENSE) -> None:
        self.tier = tier
        self.name = tier.name
        self.retention = retention
        self.counters = TierCounters()
        self._mask = RetentionMask(layout, retention)
        self._tags = layout.tags

    def key(self, group: int, key: bytes) -> bytes:
        """Returns the name of a page outside this process, from its key in the prefix index."""
        return self._tags[group] + key

    def contains(self, group: int, key: bytes) -> bool:
        """Whether the hit search may count on a page here, without asking: `outrider.kv.prefix.Tier`."""
        if not self.tier.is_local:
            return False
        held = self.tier.contains(self.key(group, key))
        self.counters.looked_up += 1
        self.counters.found += held
        return held

    def wants(self, group: int, page_number: int, marks: Marks) -> bool:
        """Whether a page that the device has published is worth keeping in this tier too."""
        return self._mask.keeps(group, page_number, marks)

    def page(self, new: NewPage) -> TierPage:
        return TierPage(self.key(new.group, new.key), new.group, new.page, new.parent)
