"""The groups of one engine and what follows from them: arenas, chain grain, alignment, margin."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import gcd, lcm

from outrider.errors import ConfigError
from outrider.kv.checked import checked_fields, text, true_or_false, tuple_of, whole_number
from outrider.kv.footprint import NO_DRAFTER, GroupSpec, KVFootprint
from outrider.kv.prefix import CacheIdentity, group_tag
from outrider.kv.retention import DENSE, Retention

MOST_GROUPS = 254
"""A page's group is kept in one byte."""


@checked_fields()
@dataclass(frozen=True, kw_only=True)
class KVLayout:
    """Target groups first, then the drafter's; a group's number is its place in `groups`."""

    target: tuple[GroupSpec, ...]
    footprint: KVFootprint = NO_DRAFTER
    groups: tuple[GroupSpec, ...] = field(init=False)
    num_target: int = field(init=False)
    reach: tuple[int, ...] = field(init=False)
    """Per group: how many later tokens a slot depends on."""
    arena_page_bytes: tuple[int, ...] = field(init=False)
    arena_of: tuple[int, ...] = field(init=False)
    grain: int = field(init=False)
    alignment: int = field(init=False)
    """A hit that every target group retains for ends at a multiple of this."""
    margin: int = field(init=False)
    """Extra positions retained below a boundary: one because a fully cached prompt recomputes its last
    token, and the reach because tap rows run again before that. It does not depend on whether a drafter
    is on (at least 1 is assumed), so that a drafter can never change what the target hits."""
    tags: tuple[bytes, ...] = field(init=False)

    def __post_init__(self) -> None:
        tuple_of(self.target, GroupSpec, "target")
        if not isinstance(self.footprint, KVFootprint):
            raise ConfigError(f"footprint must be a KVFootprint, got {self.footprint!r}; NO_DRAFTER is one")
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
    """Pages of each arena, the sink included, in the order of KVLayout.arena_page_bytes."""
    identity: CacheIdentity = field(default_factory=CacheIdentity)
    prefix_caching: bool = True
    retention: Retention = DENSE
    """Which cached pages of groups with a window are kept."""
    max_model_len: int = 1 << 20
    step_tokens: int = 2048
    """Most positions one sequence advances in one step."""
    keep_margin: int = 0
    """Positions kept behind a window beyond what this worker reads: a prefill worker keeps the layout's margin
    for the peer that will fetch it."""
    steps_ahead: int = 1
    """1 when every verdict is known before the next plan, 2 with one step in flight."""

    def __post_init__(self) -> None:
        tuple_of(self.arena_pages, int, "arena_pages, the pages of each arena,")
        if not isinstance(self.identity, CacheIdentity):
            raise ConfigError(f"identity must be a CacheIdentity, got {self.identity!r}")
        for name in ("weights", "dtype", "layout"):
            text(getattr(self.identity, name), f"identity: {name}")
        whole_number(self.identity.tensor_parallel_size, "identity: tensor_parallel_size", at_least=1)
        whole_number(self.identity.tensor_parallel_rank, "identity: tensor_parallel_rank", at_least=0)
        true_or_false(self.prefix_caching, "prefix_caching")
        if not isinstance(self.retention, Retention):
            raise ConfigError(f"retention must be a Retention, got {self.retention!r}; Retention.of('tail') is one")
        for name in ("max_model_len", "step_tokens"):
            whole_number(getattr(self, name), name, at_least=1)
        for arena, pages in enumerate(self.arena_pages):
            advice = "one of them is the sink: raise the memory"
            whole_number(pages, f"pages of arena {arena}", at_least=2, advice=advice)
        whole_number(self.keep_margin, "keep_margin", at_least=0)
        if self.steps_ahead not in (1, 2) or isinstance(self.steps_ahead, bool):
            raise ConfigError(f"steps_ahead must be 1 or 2, got {self.steps_ahead}")
