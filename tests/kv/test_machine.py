"""Hypothesis drives the KV manager as a state machine, with the sanitizer and the oracle watching."""

from __future__ import annotations

from array import array

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from outrider.errors import OutOfPages
from outrider.kv import KVConfig, KVLayout, KVManager
from outrider.kv.archetypes import ARCHETYPES, DrafterShape
from outrider.kv.ledger import SequenceKV
from outrider.kv.prefix import Media
from outrider.sanitizer import Sanitizer
from outrider.scheduler.plan import ScheduledRequest, StepPlan
from outrider.tools.sim.device import DeviceRequest, FakeDevice
from outrider.tools.sim.oracle import FakeModel, Inputs, Reference
from outrider.tools.sim.scenario import GroupDraw

MAX_LEN = 60
PAGES = 190


def group_draws(window: bool) -> st.SearchStrategy[GroupDraw]:
    windows = st.sampled_from((1, 2, 5, 8, 13)) if window else st.just(0)
    return st.builds(GroupDraw, page_tokens=st.sampled_from((1, 2, 3, 4, 8)), slot_bytes=st.just(1), window=windows)


class KVMachine(RuleBasedStateMachine):
    """Admit, run, fork, preempt and end sequences in any order; nothing may ever read, write or keep a wrong slot."""

    @initialize(
        archetype=st.sampled_from(sorted(ARCHETYPES)),
        full=st.lists(group_draws(False), min_size=0, max_size=1),
        sliding=st.lists(group_draws(True), min_size=0, max_size=2),
        draft=st.lists(group_draws(False) | group_draws(True), min_size=1, max_size=2),
    )
    def start(self, archetype: str, full: list[GroupDraw], sliding: list[GroupDraw], draft: list[GroupDraw]) -> None:
        target = (full + sliding) or [GroupDraw(page_tokens=4, slot_bytes=1)]
        kind = ARCHETYPES[archetype]
        shape = DrafterShape(
            groups=tuple(g.spec(f"draft{i}") for i, g in enumerate(draft)) if kind.owns_kv else (),
            taps=(1,) if kind.reads_taps else (),
        )
        layout = KVLayout(
            target=tuple(g.spec(f"target{i}") for i, g in enumerate(target)),
            footprint=kind.declare(archetype, shape),
        )
        config = KVConfig(
            arena_pages=(PAGES,) * len(layout.arena_page_bytes), max_model_len=MAX_LEN + 20, step_tokens=16
        )
        self.sanitizer = Sanitizer(layout, config)
        self.kv = KVManager(layout, config, observer=self.sanitizer)
        self.sanitizer.bind(self.kv)
        self.model = FakeModel(layout, vocabulary=5, weights="")
        self.device = FakeDevice(
            layout, config, self.sanitizer, acceptance=0.7, seed=1, on_stale_draft=self.stale_draft
        )
        self.footprint = layout.footprint
        self.live: list[SequenceKV] = []
        self.prompts: dict[str, tuple[int, ...]] = {}
        self.proposed: dict[str, int] = {}
        self.count = 0
        self.step = 0

    def stale_draft(self, request: str, position: int) -> None:
        raise AssertionError(f"the drafter of {request} gathered the wrong context before {position}")

    def reference(self, sequence: SequenceKV, seed: int) -> Reference:
        return Reference(self.model, self.prompts[sequence.id], seed, Inputs(sequence.chain.media))

    @precondition(lambda self: len(self.live) < 4)
    @rule(
        prompt=st.lists(st.integers(0, 2), min_size=1, max_size=24),
        salt=st.sampled_from(("", "", "tenant")),
        shown=st.sampled_from((b"", b"", b"cat", b"dog")),
    )
    def admit(self, prompt: list[int], salt: str, shown: bytes) -> None:
        self.count += 1
        media = (Media(1, min(5, len(prompt)), shown),) if shown and len(prompt) > 1 else ()
        sequence = self.kv.open(f"s{self.count}", array("I", prompt), total_tokens=MAX_LEN, k=3, salt=salt, media=media)
        self.prompts[sequence.id] = tuple(prompt)
        self.take_in(sequence, prompt, seed=self.count)

    @precondition(lambda self: 0 < len(self.live) < 4)
    @rule(which=st.integers(0, 3), length=st.integers(1, 40))
    def admit_again(self, which: int, length: int) -> None:
        """The same tokens as a sequence that runs, up to some length: a hit, often inside a page."""
        like = self.live[which % len(self.live)]
        tokens = list(like.tokens[:length])
        self.count += 1
        media = tuple(item for item in like.chain.media if item.end <= length)
        sequence = self.kv.open(
            f"s{self.count}", array("I", tokens), total_tokens=MAX_LEN, k=3, salt=like.namespace[1], media=media
        )
        self.prompts[sequence.id] = tuple(tokens)
        self.take_in(sequence, tokens, seed=self.count)

    def take_in(self, sequence: SequenceKV, prompt: list[int], seed: int) -> None:
        request = DeviceRequest(prompt, seed, self.reference(sequence, seed))
        self.device.add(sequence.id, request, sequence.namespace, sequence.chain.media)
        try:
            self.kv.admit(sequence)
        except OutOfPages:
            self.kv.close(sequence)
            return
        self.live.append(sequence)
        self.proposed[sequence.id] = 0

    @precondition(lambda self: bool(self.live))
    @rule(which=st.integers(0, 3), rows=st.integers(1, 9), k=st.integers(0, 3))
    def run(self, which: int, rows: int, k: int) -> None:
        sequence = self.live[which % len(self.live)]
        known = len(sequence.tokens)
        if known >= MAX_LEN - 8:
            self.end(which)
            return
        left = known - sequence.committed
        samples = int(rows >= left)
        drafts = self.proposed[sequence.id] if left == 1 else 0
        count = min(rows, left) + drafts
        v = sequence.committed + count
        drafting = sequence.drafting
        backlog = self.footprint.backlog(durable_end=sequence.draft_end, v=sequence.committed) if drafting else 0
        k = 0 if not samples or (self.footprint.rebuild and backlog) else k
        try:
            self.kv.reserve(sequence, v, self.footprint.reserve_end(v=v, k=k))
        except OutOfPages:
            self.preempt(which)
            return
        if not sequence.drafting and self.footprint.groups:
            k = 0
        row = ScheduledRequest(
            sequence_id=sequence.id,
            epoch=0,
            start=sequence.committed,
            num_rows=count,
            drafts=drafts,
            tap_rows=0 if self.footprint.rebuild or not sequence.drafting else backlog,
            propose=k,
            samples=samples,
            draft_end=sequence.draft_end if sequence.drafting else -1,
            proposed=self.proposed[sequence.id],
            feed_to=None,
        )
        plan = StepPlan(step=self.step, scheduled=(row,), kv=self.kv.take_plan(self.step))
        verdict = self.device.run(plan)
        self.kv.complete(self.step)
        self.step += 1
        sequence.tokens.extend(verdict.tokens[0])
        self.proposed[sequence.id] = verdict.proposed[0] if samples else self.proposed[sequence.id]
        self.kv.commit(sequence, len(sequence.tokens) - 1 if samples else v)

    @precondition(lambda self: bool(self.live))
    @rule(which=st.integers(0, 3))
    def end(self, which: int) -> None:
        self.kv.close(self.live.pop(which % len(self.live)))

    @precondition(lambda self: bool(self.live))
    @rule(which=st.integers(0, 3))
    def preempt(self, which: int) -> None:
        sequence = self.live[which % len(self.live)]
        self.kv.release(sequence)
        self.proposed[sequence.id] = 0
        try:
            self.kv.admit(sequence)
        except OutOfPages:
            self.end(which)

    @precondition(lambda self: bool(self.live))
    @rule(which=st.integers(0, 3))
    def drop_draft(self, which: int) -> None:
        sequence = self.live[which % len(self.live)]
        if sequence.drafting:
            self.kv.drop_draft(sequence)

    @precondition(lambda self: 0 < len(self.live) < 4)
    @rule(which=st.integers(0, 3))
    def fork(self, which: int) -> None:
        """A second continuation from the committed end, with the same last token."""
        parent = self.live[which % len(self.live)]
        if parent.committed != len(parent.tokens) - 1 or parent.committed == 0:
            return
        if self.kv.holdings.copies_outstanding(parent):
            return
        self.count += 1
        child = self.kv.open(
            f"s{self.count}",
            array("I", parent.tokens),
            total_tokens=MAX_LEN,
            k=3,
            salt=parent.namespace[1],
            media=parent.chain.media,
        )
        self.prompts[child.id] = tuple(parent.tokens)
        request = DeviceRequest(parent.tokens, self.count, self.reference(child, self.count))
        self.device.add(child.id, request, child.namespace, child.chain.media)
        try:
            self.kv.fork(parent, child)
        except OutOfPages:
            self.kv.close(child)
            return
        self.live.append(child)
        self.proposed[child.id] = 0

    @rule()
    def forget_the_cache(self) -> None:
        self.kv.reset_cache()

    @invariant()
    def pages_are_conserved(self) -> None:
        if hasattr(self, "kv"):
            self.sanitizer.check_conservation()
            self.kv.check_integrity()

    def teardown(self) -> None:
        if hasattr(self, "kv"):
            for sequence in self.live:
                self.kv.close(sequence)
            self.kv.take_plan(self.step)
            self.kv.complete(self.step)
            self.kv.reset_cache()
            assert all(arena.num_free == arena.num_pages - 1 for arena in self.kv.pool.arenas)


TestKVMachine = KVMachine.TestCase
TestKVMachine.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
