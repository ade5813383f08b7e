"""The groups of one engine and what follows from them: arenas, chain grain, alignment, margin."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import gcd, lcm

from outrider.errors import ConfigError
from outrider.kv.checked import checked_fields, whole_number
from outrider.kv.footprint import NO_DRAFTER, GroupSpec, KVFootprint
from outrider.kv.prefix import CacheIdentity, group_tag
from outrider.kv.retention import DENSE, Retention

MOST_GROUPS = 254
"""Most groups that a layout may have: a page's group is stored in one byte."""


@checked_fields()
@dataclass(frozen=True, kw_only=True)
class KVLayout:
    """The KV groups of an engine: the target's first, then the drafter's. A group's number is its place in `groups`."""

    target: tuple[GroupSpec, ...]
    footprint: KVFootprint = NO_DRAFTER
    groups: tuple[GroupSpec, ...] = field(init=False)
    num_target: int = field(init=False)
    reach: tuple[int, ...] = field(init=False)
    """Number of later tokens that a slot depends on, per group."""
    arena_page_bytes: tuple[int, ...] = field(init=False)
    arena_of: tuple[int, ...] = field(init=False)
    grain: int = field(init=False)
    alignment: int = field(init=False)
    """Least common multiple of the target's page sizes; the boundaries for which pages are kept are multiples of it."""
    margin: int = field(init=False)
    """Positions retained below a boundary in addition to the window: one because a fully cached prompt recomputes its
    last token, and the reach because tap rows run again before that. It does not depend on whether there is a
    drafter (at least 1 is assumed), so that a drafter can never change what the target hits."""
    tags: tuple[bytes, ...] = field(init=False)

    def __post_init__(self) -> None:
        if not self.target:
            raise ConfigError("a layout needs at least one target group")
        groups = self.target + self.footprint.groups
        if len(groups) > MOST_GROUPS:
            raise ConfigError(f"a layout may have at most {MOST_GROUPS} groups, got {len(groups)}; merge equal ones")
        names = [group.name for group in groups]
        if len(set(names)) != len(names):
            raise ConfigError(f"group names must differ, got {names}")
        reach = (0,) * len(self.target) + (self.footprint.token_reach,) * len(self.footprint.groups)
        page_bytes = tuple(sorted({group.page_bytes for group in groups}))
        sizes = [group.page_tokens for group in groups]
        owners = [None] * len(self.target) + [self.footprint] * len(self.footprint.groups)
        tags = tuple(group_tag(group, reach=reach[number], owner=owners[number]) for number, group in enumerate(groups))
        derived = {
            "groups": groups,
            "num_target": len(self.target),
            "reach": reach,
            "arena_page_bytes": page_bytes,
            "arena_of": tuple(page_bytes.index(group.page_bytes) for group in groups),
            "grain": gcd(*sizes),
            "alignment": lcm(*(group.page_tokens for group in self.target)),
            "margin": 1 + max(1, self.footprint.token_reach),
            "tags": tags,
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    @property
    def target_groups(self) -> range:
        return range(self.num_target)

    @property
    def draft_groups(self) -> range:
        return range(self.num_target, len(self.groups))


@checked_fields()
@dataclass(frozen=True, kw_only=True, slots=True)
class KVConfig:
    """How much memory there is, and how the cache is used."""

    arena_pages: tuple[int, ...]
    """Pages of each arena, the null page included, in the order of KVLayout.arena_page_bytes."""
    identity: CacheIdentity = field(default_factory=CacheIdentity)
    prefix_caching: bool = True
    retention: Retention = DENSE
    """Policy for which cached pages of groups with a window are kept."""
    max_model_len: int = 1 << 20
    step_tokens: int = 2048
    """Most positions that one sequence advances in one step."""
    keep_margin: int = 0
    """Positions kept behind a window beyond what this worker reads: a prefill worker keeps the layout's margin
    for the peer that will fetch it."""
    steps_ahead: int = 1
    """Steps that may be planned at once: 1 if every verdict is known before the next plan, 2 with one in flight."""

    def __post_init__(self) -> None:
        for name in ("max_model_len", "step_tokens"):
            whole_number(getattr(self, name), name, at_least=1)
        for arena, pages in enumerate(self.arena_pages):
            advice = "one of them is the null page: raise the memory"
            whole_number(pages, f"pages of arena {arena}", at_least=2, advice=advice)
        whole_number(self.keep_margin, "keep_margin", at_least=0)
        if self.steps_ahead not in (1, 2):
            raise ConfigError(f"steps_ahead must be 1 or 2, got {self.steps_ahead}")
