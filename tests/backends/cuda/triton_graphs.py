"""Captured passes: a replay reads and writes what its batch says, whatever it was captured with. On Triton's
interpreter the recorded launches are replayed, without the Python that made them, as a CUDA graph would be."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.backends.cases import PAGE_TOKENS, PAGES, VOCABULARY, Model, decoder_spec, near
from tests.kv.fakes import full

from outrider.backends.batch import Batch, BatchBuilder, Span
from outrider.backends.cuda import graphs
from outrider.backends.cuda.backend import CudaBackend
from outrider.backends.cuda.batches import CudaBatchBuilder
from outrider.backends.cuda.kernels.attention import AttentionWorkspace
from outrider.kv import KVLayout
from outrider.models.decoder import DecoderOutput, PagedDecoder

DEVICE = torch.device("cpu")
REQUESTS, WIDTH = 4, 9


class Tables:
    """Block tables in which every request has pages of its own."""

    def __init__(self) -> None:
        self.pages = (1 + np.arange(REQUESTS * WIDTH, dtype=np.int32)).reshape(REQUESTS, WIDTH)
        self.lows = np.zeros((REQUESTS, 1), np.int32)

    def array(self, _group: int) -> Any:
        return self.pages

    def tensor(self, _group: int) -> torch.Tensor:
        return torch.from_numpy(self.pages)


class Captured:
    """A decoder on the backend, the same pages again for a run without graphs, and batches over them."""

    def __init__(self) -> None:
        assert REQUESTS * WIDTH < PAGES
        self.backend = CudaBackend(DEVICE)
        self.model = Model(self.backend, decoder_spec())
        self.tables = Tables()
        layout = KVLayout(target=(full("a", page=PAGE_TOKENS),))
        self.builder = CudaBatchBuilder(layout, self.tables, DEVICE)
        self.plain_builder = BatchBuilder(layout, self.tables, DEVICE)

    def batch(self, builder: BatchBuilder, *rows: tuple[int, int, int], seed: int = 0) -> Batch:
        """Returns the rows of requests: (table row, start, count)."""
        spans = [
            Span(table_row, start, [(7 * at + seed) % VOCABULARY for at in range(start, start + count)])
            for table_row, start, count in rows
        ]
        return builder.build(spans, range(1))

    def forward(self, batch: Batch, paged: PagedDecoder | None = None) -> DecoderOutput:
        return (paged or self.model.paged).forward(
            batch, taps=(0,), scored=(0, len(batch.token_ids)), probabilities=True
        )

    def check(self, *rows: tuple[int, int, int], seed: int = 0) -> None:
        """Runs a batch as it comes, and compares results and pages with a run without graphs, on a batch that holds
        whole tables."""
        batch = self.batch(self.builder, *rows, seed=seed)
        kv, paged = self.model.bind()
        for own, other in zip(self.model.kv, kv, strict=True):
            other.keys.copy_(own.keys)
            other.values.copy_(own.values)
        before = [(own.keys.clone(), own.values.clone()) for own in self.model.kv]
        found = self.forward(batch)
        assert found.hidden.shape[0] == len(batch.token_ids)
        expected = self.forward(self.batch(self.plain_builder, *rows, seed=seed), paged)
        assert found.logits is not None
        assert expected.logits is not None
        assert found.argmax is not None
        assert expected.argmax is not None
        assert near(found.logits, expected.logits)
        assert near(found.taps, expected.taps)
        assert found.argmax.read()[0] == expected.argmax.read()[0]
        assert found.argmax.probabilities() == pytest.approx(expected.argmax.probabilities(), rel=1e-3)
        slots = batch.groups[0].slot_mapping
        page, offset = slots // PAGE_TOKENS, slots % PAGE_TOKENS
        for (keys, values), own, other in zip(before, self.model.kv, kv, strict=True):
            for was, now, wanted in ((keys, own.keys, other.keys), (values, own.values, other.values)):
                assert near(now[1:], wanted[1:])
                # Nothing but the batch's slots and the null page has changed, to the last bit.
                was[page, :, offset] = now[page, :, offset]
                assert torch.equal(was[1:], now[1:])


def test_a_replay_writes_to_the_pages_of_its_own_batch() -> None:
    it = Captured()
    for start in (20, 21, 22):
        it.check((0, start, 1))
    counts = it.backend.graphs.counts
    assert (counts.captured, counts.replayed) == (1, 2)
    it.check((1, 40, 1), seed=5)
    it.check((3, 7, 1), seed=6)
    assert (counts.captured, counts.replayed) == (1, 4)


@pytest.mark.parametrize("first", [((0, 5, 6),), ((0, 5, 3), (1, 9, 4)), ((0, 5, 1), (1, 9, 1), (2, 20, 1))])
def test_rows_of_the_padding_write_to_the_null_page_only(first: tuple[tuple[int, int, int], ...]) -> None:
    it = Captured()
    for number in range(3):
        it.check(*((row, start + 3 * number, count) for row, start, count in first), seed=number)
    assert it.backend.graphs.counts.replayed == 2
    # Of the same padded shape, with other rows in it.
    _row, start, count = first[0]
    it.check((3, start + 30, count - 1 or 1), *first[1:], seed=9)
    assert it.backend.graphs.counts.replayed == 3


def test_a_replay_follows_tables_that_have_changed() -> None:
    it = Captured()
    for start in (30, 31, 32):
        it.check((0, start, 1))
    # The request has been preempted: its pages are others now, and its old ones belong to another request.
    it.tables.pages[[0, 2]] = it.tables.pages[[2, 0]]
    it.check((0, 33, 1), seed=4)
    it.check((2, 33, 1), seed=4)
    it.tables.pages = np.concatenate([it.tables.pages, it.tables.pages[::-1]])
    it.tables.lows = np.zeros((2 * REQUESTS, 1), np.int32)
    it.check((5, 20, 1))
    assert it.backend.graphs.counts.captured == 1


def test_a_number_that_the_host_reads_cannot_be_captured() -> None:
    backend = CudaBackend("cpu")
    with pytest.raises(RuntimeError, match="may not read a tensor on the host"):
        backend.graphs.capture(lambda: torch.ones(3).sum().item())


def test_shapes_without_a_graph_run_and_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    it = Captured()
    counts = it.backend.graphs.counts
    it.check((0, 3, 1))
    assert sum(counts.eager.values()) == 2  # this one, and the run without graphs
    monkeypatch.setattr(graphs, "GRAPHS_MAX", 0)
    for start in (4, 5, 6):
        it.check((0, start, 1))
    assert counts.captured == 0
    assert sum(counts.eager.values()) == 8
    monkeypatch.setattr(graphs, "GRAPHS_MAX", 9)
    it.check((0, 7, 40))  # a prompt
    it.check((0, 7, 40))
    assert counts.captured == 0


def test_memory_that_a_graph_writes_to_is_kept_when_more_is_needed() -> None:
    workspace = AttentionWorkspace(torch.device("cpu"))
    small = workspace.at_least(1, 16, 16)[0]
    address = small.data_ptr()
    del small
    large = workspace.at_least(4, 64, 64)[0]
    others = [torch.empty(16 * 16) for _ in range(50)]
    assert large.numel() >= 4 * 64 * 64
    assert address not in [other.data_ptr() for other in others]
