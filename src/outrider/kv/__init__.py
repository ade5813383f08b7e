"""The KV core: footprints, pages, prefix index, ledger, manager. Standard library only."""

from outrider.kv.footprint import NO_DRAFTER, GroupSpec, KVFootprint, Proposing
from outrider.kv.groups import Full, GroupKind, Sliding, group_kind
from outrider.kv.intervals import Interval
from outrider.kv.layout import KVConfig, KVLayout
from outrider.kv.manager import Admission, KVManager
from outrider.kv.plan import BlockTableLists, KVPlan
from outrider.kv.prefix import CacheIdentity

__all__ = [
    "NO_DRAFTER",
    "Admission",
    "BlockTableLists",
    "CacheIdentity",
    "Full",
    "GroupKind",
    "GroupSpec",
    "Interval",
    "KVConfig",
    "KVFootprint",
    "KVLayout",
    "KVManager",
    "KVPlan",
    "Proposing",
    "Sliding",
    "group_kind",
]
