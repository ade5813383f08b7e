"""What each sequence holds: the only record of which slot belongs to which sequence. Only the manager and its parts
(holdings, progress) change it.

For one group of one sequence, as interval sets, always

    published  ⊆  durable = [low, durable end)  ⊆  written  ⊆  reserved = pages held

    page number      0      1      2      3      4
    pages         [ null | null |  17  |  4   |  9   ]     pages 0 and 1 left the window, or were never held
    first_page                    ^2
    low                           ^ first position that is valid
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, MutableMapping
from collections.abc import Sequence as Items
from enum import Enum
from typing import NamedTuple

from outrider.kv.intervals import Interval
from outrider.kv.pages import NULL_PAGE
from outrider.kv.prefix import Chain, Tier
from outrider.kv.retention import Marks


class Load(NamedTuple):
    """Slots that have to arrive from a tier or a peer before a sequence may run."""

    group: int
    interval: Interval
    key: bytes | None
    """The key of a page in another tier, or None when a peer worker holds it."""


class LoadState(Enum):
    PENDING = "pending"
    ARRIVED = "arrived"
    FAILED = "failed"


class Loads(MutableMapping[Load, LoadState]):
    """The loads of one sequence and where each stands; how many are pending is counted as they change."""

    __slots__ = ("_states", "num_pending")

    def __init__(self) -> None:
        self._states: dict[Load, LoadState] = {}
        self.num_pending = 0

    def __getitem__(self, load: Load) -> LoadState:
        return self._states[load]

    def __setitem__(self, load: Load, state: LoadState) -> None:
        self.num_pending += (state is LoadState.PENDING) - (self._states.get(load) is LoadState.PENDING)
        self._states[load] = state

    def __delitem__(self, load: Load) -> None:
        self.num_pending -= self._states.pop(load) is LoadState.PENDING

    def __iter__(self) -> Iterator[Load]:
        return iter(self._states)

    def __len__(self) -> int:
        return len(self._states)

    def __bool__(self) -> bool:
        return bool(self._states)


class GroupPages:
    """The pages that one sequence holds in one group."""

    __slots__ = ("first_page", "low", "pages", "published")

    def __init__(self) -> None:
        self.pages: list[int] = []
        self.first_page = 0
        """Number of the first page that is held; entries before it name the null page."""
        self.low = 0
        """First valid position; slots below it are not valid, even in a page that is held."""
        self.published = 0
        """Pages before this number were published if they were worth keeping, or never will be."""

    def held(self) -> list[int]:
        return self.pages[self.first_page :]

    @property
    def num_held(self) -> int:
        return len(self.pages) - self.first_page

    def held_from(self, page_tokens: int) -> int:
        """Returns the first position that is both held and valid."""
        return max(self.low, self.first_page * page_tokens)

    def place(self, first_page: int, pages: Items[int], *, low: int, published: int) -> None:
        self.pages = [NULL_PAGE] * first_page
        self.pages.extend(pages)
        self.first_page = first_page
        self.low = low
        self.published = published


class SequenceKV:
    """The ledger's entry of one sequence."""

    __slots__ = (
        "admitted",
        "chain",
        "committed",
        "copy_step",
        "draft_end",
        "draft_headroom",
        "draft_room",
        "drafting",
        "found",
        "groups",
        "headrooms",
        "hit",
        "id",
        "load_end",
        "loads",
        "marks",
        "namespace",
        "next_event",
        "skip_tiers",
        "surplus_until",
        "target_headroom",
        "target_room",
        "tokens",
    )

    def __init__(self, id: str, tokens: array[int], chain: Chain, num_groups: int, namespace: tuple[str, str]) -> None:
        self.id = id
        self.namespace = namespace
        """(adapter, salt): sequences of another namespace never share anything with this one."""
        self.tokens = tokens
        """Tokens of the sequence, which the scheduler appends to; those up to and including `committed` are known."""
        self.chain = chain
        self.found: Tier | None = None
        """What tiers that have to be asked said that they hold of this sequence's prompt."""
        self.skip_tiers = False
        """Whether a load from a tier has failed; the sequence then takes only what the device holds."""
        self.target_headroom = 0
        """Slots past v that the next step may ask for, so that a commit leaves them reserved."""
        self.headrooms = (0, 0)
        """target_headroom without drafts to verify, and with them. A sequence that loses its draft groups has pages
        left over, which its next commit gives back."""
        self.draft_headroom = 0
        self.reset(num_groups)

    def reset(self, num_groups: int) -> None:
        """Forget everything that is held, as before admission."""
        self.admitted = False
        self.committed = 0
        """The end c of the target's durable slots, which are [low, committed) in every target group."""
        self.copy_step = -1
        """The step that copies pages for this sequence; -1 if there was none."""
        self.hit = 0
        self.drafting = False
        """Whether the sequence holds draft groups: there are some, and they were not dropped."""
        self.draft_end = 0
        """Draft groups are durable on [low, draft_end)."""
        self.groups = [GroupPages() for _ in range(num_groups)]
        self.loads = Loads()
        self.load_end = 0
        self.marks: Marks = ()
        """Boundaries to keep for other sequences' hits, besides those of the policy."""
        # Bounds that let the common step touch nothing but two integers.
        self.target_room = 0
        self.draft_room = 0
        self.surplus_until = -1
        """The last committed end at which a page is held that the next step cannot reach."""
        self.next_event = 0
        """The first committed end that completes a page or frees one."""

    def pending_groups(self) -> set[int]:
        """Returns the groups that still wait for a load."""
        return {load.group for load, state in self.loads.items() if state is LoadState.PENDING}

    @property
    def loading(self) -> bool:
        return self.loads.num_pending > 0
