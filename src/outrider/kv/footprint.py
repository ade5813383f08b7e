"""The contract: what a drafter does to the KV cache, declared once, as data.

Reservation, fit, keys, publication, hits, retention, freeing, forks and transfer are all derived from
the fields below. Nothing outside a drafter's own declaration may ask for it by name: if the engine needs
to know something about a drafter, it becomes a field here.

Positions around the end v of the target's durable KV, after a step (tokens are known up to and
including position v, the last sampled one):

    target            [0 ------------------ v)
    durable_lead 0    [0 ------------------ v)      durable_end(v) = v
    durable_lead 1    [0 ------------------ v ]     durable_end(v) = v + 1: it consumed the last token
    scratch                                [v ------ v + scratch_ahead(k))
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from outrider.errors import FootprintError
from outrider.kv.checked import checked_fields, text, whole_number
from outrider.kv.groups import GroupKind
from outrider.kv.intervals import Interval


@checked_fields()
@dataclass(frozen=True, kw_only=True, slots=True)
class GroupSpec:
    """Layers that share a block table: same owner, kind, reach and bytes per slot."""

    name: str
    kind: GroupKind
    page_tokens: int
    slot_bytes: int = 1
    unused_bytes: int = 0
    """Bytes at the end of a page that pad it to the size of another group's page, so that both use one arena."""
    causal: bool = True
    """False if the rows of a drafter's block read each other in both directions. Batches are built accordingly, and a
    backend that cannot do it is refused when the drafter is loaded."""

    def __post_init__(self) -> None:
        text(self.name, "the name of a group", empty=False)
        for field in ("page_tokens", "slot_bytes"):
            whole_number(getattr(self, field), f"group {self.name!r}: {field}", at_least=1)
        whole_number(self.unused_bytes, f"group {self.name!r}: unused_bytes", at_least=0)

    @property
    def page_bytes(self) -> int:
        return self.page_tokens * self.slot_bytes + self.unused_bytes


class Proposing(Enum):
    """How a drafter proposes, which fixes its passes, its rows and the slots that they write."""

    NOTHING = "nothing"
    """There is no drafter."""
    LOOKUP = "lookup"
    """Drafts are looked up, without a forward pass and without KV."""
    CHAIN = "chain"
    """k passes of one row; each but the first consumes the draft before it."""
    BLOCK = "block"
    """One pass over the last sampled token and k masks, or more: see block_sizes."""
    HEADS = "heads"
    """One product over the target's hidden state at the last accepted token: all k drafts at once, and no KV."""


WITHOUT_KV = (Proposing.NOTHING, Proposing.LOOKUP, Proposing.HEADS)
"""Ways of proposing that neither read nor write KV of the drafter's own."""


@checked_fields(FootprintError)
@dataclass(frozen=True, kw_only=True, slots=True)
class KVFootprint:
    """One drafter's contract. The table in docs/architecture.md is this class, one column per declaration."""

    name: str
    """A label for messages and metrics. No code may branch on it."""
    proposing: Proposing
    groups: tuple[GroupSpec, ...] = ()
    scratch_extra: int = 0
    """scratch_ahead(k) = k + scratch_extra for a drafter with groups."""
    block_sizes: tuple[int, ...] = ()
    """Numbers of rows in the blocks that the masks were trained in, ascending. A block has the fewest of them that hold
    the drafts wanted, or as many rows as these take. It ends at the drafter's limit where that is nearer."""
    durable_lead: int = 0
    """How far past v the durable slots end: 1 for a drafter that consumes the last sampled token itself."""
    token_reach: int = 0
    """Number of later tokens that a slot depends on: the slot at p depends on tokens[: p + 1 + token_reach]."""
    taps: tuple[int, ...] = ()
    """Target layers whose hidden states (auxiliary hidden states, here taps) the drafter reads. A tap row is a target
    row that is run again only for its taps; its own K/V goes to the null page."""
    keeps_accepted: bool = False
    """Whether scratch of accepted drafts becomes durable as it is."""
    feed_reads_kv: bool = False
    """Whether feeding, the draft model's prefill, reads its own earlier KV: above a gap it then writes wrong slots."""
    rebuild: bool = False
    """Whether missing durable slots can be made from token ids alone."""
    max_len: int | None = None
    """First position that the drafter cannot store; None if only the model's limit holds."""
    fingerprint: str = ""
    """Identifies everything that determines the drafter's KV bytes: weights and configuration."""

    def __post_init__(self) -> None:
        text(self.name, "the name of a drafter", empty=False, error=FootprintError)
        for tap in self.taps:
            advice = "it is the number of a target layer"
            whole_number(tap, f"{self.name}: each of taps", at_least=0, advice=advice, error=FootprintError)
        for rows in self.block_sizes:
            whole_number(rows, f"{self.name}: each of block_sizes", at_least=1, error=FootprintError)
        if list(self.block_sizes) != sorted(set(self.block_sizes)):
            raise FootprintError(f"{self.name}: block_sizes must ascend, got {self.block_sizes}")
        for field in ("scratch_extra", "durable_lead", "token_reach"):
            whole_number(getattr(self, field), f"{self.name}: {field}", at_least=0, error=FootprintError)
        if self.max_len is not None:
            whole_number(self.max_len, f"{self.name}: max_len", at_least=1, error=FootprintError)
        names = [group.name for group in self.groups]
        if len(set(names)) != len(names):
            raise FootprintError(f"{self.name}: two groups have the same name in {names}; give each its own")
        if not self.groups:
            self._check_without_groups()
            return
        if self.proposing in WITHOUT_KV:
            raise FootprintError(
                f"{self.name}: {self.proposing.value} reads and writes no KV, so it owns no groups; declare its "
                "passes, or drop the groups"
            )
        if self.durable_lead > 1:
            raise FootprintError(
                f"{self.name}: durable_lead {self.durable_lead} would need tokens past the last sampled one; use 0 or 1"
            )
        if self.durable_lead + self.token_reach > 1:
            raise FootprintError(
                f"{self.name}: durable_lead {self.durable_lead} and token_reach {self.token_reach} together "
                "need a token that is not sampled yet; a drafter that reaches ahead stops at v"
            )
        if self.rebuild and self.taps:
            raise FootprintError(
                f"{self.name}: rebuild means 'from token ids alone', but it reads taps of the target; "
                "declare one or the other"
            )
        if not self.rebuild and not self.taps:
            raise FootprintError(f"{self.name}: it reads no taps, so token ids are all it is fed; declare rebuild=True")
        if self.rebuild and self.token_reach:
            raise FootprintError(f"{self.name}: a drafter fed from token ids alone reads no later token")
        if self.durable_lead and self.proposing is Proposing.BLOCK:
            raise FootprintError(
                f"{self.name}: a block starts at v and would overwrite the durable slot there; use durable_lead=0"
            )
        if self.keeps_accepted and self.proposing is Proposing.BLOCK:
            raise FootprintError(
                f"{self.name}: a block is written from masks, so accepted drafts leave nothing to keep; "
                "declare keeps_accepted=False"
            )
        if self.block_sizes and self.proposing is not Proposing.BLOCK:
            raise FootprintError(f"{self.name}: block_sizes are {self.block_sizes}, but it does not propose in blocks")
        if self.keeps_accepted and self.taps:
            raise FootprintError(
                f"{self.name}: scratch is written without the target's taps, so it cannot be kept; "
                "declare keeps_accepted=False"
            )
        # Blocks of a size that is declared reserve all of their rows; longer ones go by scratch_extra again.
        for k in (1, 2, *self.block_sizes):
            if self.scratch_ahead(k) < self.slots_written(k):
                raise FootprintError(
                    f"{self.name}: proposing {k} writes {self.slots_written(k)} slot(s) at and past v but "
                    f"scratch_ahead({k}) is {self.scratch_ahead(k)}; raise scratch_extra"
                )

    def _check_without_groups(self) -> None:
        owns_kv = {
            "scratch_extra": self.scratch_extra,
            "block_sizes": self.block_sizes,
            "durable_lead": self.durable_lead,
            "token_reach": self.token_reach,
            "taps": self.taps if self.proposing is not Proposing.HEADS else (),
            "keeps_accepted": self.keeps_accepted,
            "feed_reads_kv": self.feed_reads_kv,
            "rebuild": self.rebuild,
        }
        wrong = [field for field, value in owns_kv.items() if value]
        if wrong:
            raise FootprintError(
                f"{self.name}: {', '.join(wrong)} describe KV, but it declares no groups; add them or drop these"
            )
        if self.proposing not in WITHOUT_KV:
            raise FootprintError(f"{self.name}: {self.proposing.value} passes read KV; declare the groups")
        if self.proposing is Proposing.HEADS and not self.taps:
            raise FootprintError(f"{self.name}: heads read a hidden state of the target; declare its layer in taps")

    def _writes_scratch(self, k: int) -> bool:
        """Whether proposing k writes KV."""
        if k < 0:
            raise FootprintError(f"{self.name}: k must be a whole number of at least 0, got {k!r}; 0 proposes nothing")
        return k > 0 and bool(self.groups)

    def _trained_rows(self, k: int) -> int:
        """Number of rows in the smallest block that it was trained with and that holds k drafts; 0 if none does."""
        return next((rows for rows in self.block_sizes if rows > k), 0)

    def _block_rows(self, k: int) -> int:
        """Number of rows in a block that proposes k."""
        return self._trained_rows(k) or k + 1

    def passes(self, k: int) -> int:
        """Number of the drafter's forward passes that propose k tokens."""
        if not self._writes_scratch(k):
            return 1 if self.proposing is Proposing.HEADS and k > 0 else 0
        return k if self.proposing is Proposing.CHAIN else 1

    def query_len(self, k: int) -> int:
        """Number of rows in each of these passes."""
        if not self._writes_scratch(k):
            return 1 if self.proposing is Proposing.HEADS and k > 0 else 0
        return 1 if self.proposing is Proposing.CHAIN else self._block_rows(k)

    def draft_rows(self, k: int) -> int:
        """Number of rows that proposing k adds to a step; they count against the token budget."""
        return self.passes(k) * self.query_len(k)

    def scratch_ahead(self, k: int) -> int:
        """Number of slots at and past v that must be reserved to propose k."""
        if not self._writes_scratch(k):
            return 0
        return max(k + self.scratch_extra, self._trained_rows(k))

    def slots_written(self, k: int) -> int:
        """Number of slots at and past v that proposing k writes, the durable lead included."""
        if not self._writes_scratch(k):
            return 0
        if self.proposing is Proposing.BLOCK:
            return self._block_rows(k)
        return self.durable_lead + k - 1

    def scratch(self, v: int, k: int) -> Interval:
        """Returns the scratch slots that proposing k from v writes."""
        if not self._writes_scratch(k):
            return Interval(v, v)
        end = v + self.slots_written(k)
        if self.proposing is not Proposing.BLOCK:
            return Interval(self.durable_end(v), end)
        if self.max_len is not None:
            # Only rows that pad the block may be cut off: a draft too many is not hidden here.
            end = max(v + k + 1, min(end, self.max_len))
        return Interval(v, end)

    def durable_end(self, v: int) -> int:
        """Returns where the durable slots end after a step that ends at v, at most at the drafter's limit."""
        end = v + self.durable_lead
        return end if self.max_len is None or end <= self.max_len else self.max_len

    def backlog(self, *, durable_end: int, v: int) -> int:
        """Number of positions below v that the drafter could store but was not fed."""
        return max(0, (v if self.max_len is None else min(v, self.max_len)) - durable_end)

    def publishes_above(self, low: int) -> bool:
        """Whether pages of a draft group that starts at `low` may be published.

        A drafter that reads its own KV while it is fed writes something else above a gap than the keys say.
        """
        return low == 0 or self.rebuild or not self.feed_reads_kv

    def reserve_end(self, *, v: int, k: int) -> int:
        """Returns the end of the reservation of a step that ends at v and proposes k."""
        if not self.groups:
            return 0
        end = v + max(self.durable_lead, self.scratch_ahead(k))
        return end if self.max_len is None or end <= self.max_len else self.max_len

    def fed_from(self, *, durable_end: int, accepted: int, proposed: int) -> int:
        """Returns the first slot that feeding must write, given where durability ended before this step.

        A chain that keeps accepted drafts consumed all of its drafts but the last. When all are accepted
        that last slot is missing, and this is the only place that has to know it.
        """
        if not self.keeps_accepted:
            return durable_end
        return durable_end + min(accepted, max(0, proposed - 1))

    def feed(self, *, durable_end: int, v: int, accepted: int, proposed: int) -> Interval:
        """Returns the durable slots to write in a step that ends at v. Feeding runs at every step, whatever k is."""
        start = self.fed_from(durable_end=durable_end, accepted=accepted, proposed=proposed)
        return Interval(start, self.durable_end(v))

    def fit(self, *, k: int, v: int, max_model_len: int, remaining_tokens: int) -> int:
        """Returns the largest number of drafts, at most k, that may be proposed from v.

        Scratch must lie below the drafter's limit, the verified row of the last draft and the rows of a block below
        the model's, and one token of the remaining ones always comes from the target.
        """
        if self.proposing is Proposing.NOTHING:
            return 0
        k = min(k, max_model_len - v - 1, remaining_tokens - 1)
        if self.max_len is not None and self.groups:
            k = min(k, self.max_len - v - self.scratch_extra)
        while self.block_sizes and k > 0 and self.scratch(v, k).end > max_model_len:
            # A block ends at the drafter's own limit, but nothing shortens it to the model's.
            k -= 1
        return max(0, k)


NO_DRAFTER = KVFootprint(name="none", proposing=Proposing.NOTHING)
"""Decoding without speculation, so that nothing has to ask whether there is a drafter."""
