"""Passes that are captured once for each padded shape, and replayed.

A captured pass reads its rows from memory of its own. Before each replay the words of the batch are copied there, so
the slots that it writes are those of the batch at hand, whatever it was captured with. A shape is captured when it
comes for the second time; until then, and where there is no room, its pass runs launch by launch and is counted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Generic, NamedTuple, Protocol

import torch
from torch import Tensor

from outrider.backends.attention import AttentionMetadata
from outrider.backends.base import Body, Options, PaddedOptions, Pass, Result
from outrider.backends.cuda.batches import CudaMetadata, PackedBatch, Shape
from outrider.backends.cuda.recording import RecordedPass

logger = logging.getLogger("outrider.engine")

GRAPHS_MAX = 192
"""The most graphs of one engine."""
BYTES_MAX = 4 << 30
"""The most memory of all graphs, which `free_kv_bytes` leaves for them."""
SEEN_MAX = 4096


class Captured(Protocol):
    """A pass that can be replayed."""

    def replay(self) -> None: ...


@dataclass
class Counts:
    captured: int = 0
    replayed: int = 0
    eager: dict[Hashable, int] = field(default_factory=dict)
    """How often passes ran launch by launch, by their shape; None stands for shapes that are not padded."""
    bytes: int = 0
    """Memory that graphs hold for their results and intermediates."""
    seconds: float = 0.0
    """Time that capturing took."""


class Graphs:
    """The graphs of one backend. They share one pool of memory, because one pass runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.counts = Counts()
        self.enabled = True
        self._pool: Any = None

    @property
    def has_room(self) -> bool:
        return self.enabled and self.counts.captured < GRAPHS_MAX and self.counts.bytes < BYTES_MAX

    def count_eager(self, shape: Hashable) -> None:
        eager = self.counts.eager
        if shape in eager or len(eager) < SEEN_MAX:
            eager[shape] = eager.get(shape, 0) + 1

    def capture(self, call: Callable[[], Result]) -> tuple[Captured, Result]:
        """Captures what a call launches. Its results are valid after a replay."""
        started_s = perf_counter()
        if self.device.type != "cuda":
            recorded = RecordedPass()
            result = recorded.record(call)
            self.counts.captured += 1
            return recorded, result
        before = torch.cuda.memory_reserved(self.device)
        # Compiles kernels and prepares libraries, neither of which can be captured.
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            call()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = call()
        self.counts.bytes += max(0, torch.cuda.memory_reserved(self.device) - before)
        self.counts.captured += 1
        self.counts.seconds += perf_counter() - started_s
        return graph, result


class _Key(NamedTuple):
    shape: Shape
    width: int
    """The number of elements of an input row; 0 for token ids of the batch itself."""
    dtype: torch.dtype
    options: Hashable


@dataclass(frozen=True, slots=True)
class _Graph(Generic[Result]):
    captured: Captured
    words: Tensor
    x: Tensor
    result: Result
    tables: tuple[Tensor, ...]


class GraphPass(Pass[Options, Result]):
    def __init__(self, graphs: Graphs, body: Body[Options, Result]) -> None:
        self._graphs = graphs
        self._body = body
        self._seen: set[_Key] = set()
        self._captured: dict[_Key, _Graph[Result]] = {}

    def run(self, x: Tensor, groups: tuple[AttentionMetadata, ...], options: Options) -> Result:
        packed = groups[0].packed if groups and isinstance(groups[0], CudaMetadata) else None
        if packed is None or not packed.padded or not self._graphs.enabled:
            self._graphs.count_eager(None)
            return self._body(x, groups, options)
        rows = x.shape[0]
        if isinstance(options, PaddedOptions):
            padded: Any = options.padded(rows, packed.shape.rows)
        elif options is None or rows == packed.shape.rows:
            padded = options
        else:
            self._graphs.count_eager(None)
            return self._body(x, groups, options)
        own = x.dtype is torch.int64 and x.data_ptr() == packed.words.data_ptr()
        key = _Key(packed.shape, 0 if own else x.shape[1], x.dtype, padded)
        graph = self._captured.get(key)
        if graph is None or any(a is not b for a, b in zip(graph.tables, packed.tables, strict=True)):
            if key not in self._seen or not self._graphs.has_room:
                if len(self._seen) < SEEN_MAX:
                    self._seen.add(key)
                self._graphs.count_eager(key.shape)
                return self._body(x, groups, options)
            graph = self._captured[key] = self._capture(x, packed, groups, padded, own=own)
        graph.words.copy_(packed.words)
        if not own:
            graph.x[:rows].copy_(x)
        graph.captured.replay()
        self._graphs.counts.replayed += 1
        return graph.result

    def _capture(
        self,
        x: Tensor,
        packed: PackedBatch,
        groups: tuple[AttentionMetadata, ...],
        options: Any,
        *,
        own: bool,
    ) -> _Graph[Result]:
        shape = packed.shape
        words = packed.words.clone()
        page_tokens = [each.max_keys // each.block_tables.shape[1] for each in groups]
        metadata = packed.metadata(words, shape.rows, shape.spans, page_tokens)
        if own:
            static = words[: shape.rows]
        else:
            static = torch.zeros(shape.rows, x.shape[1], dtype=x.dtype, device=x.device)
            static[: x.shape[0]].copy_(x)
        captured, result = self._graphs.capture(lambda: self._body(static, metadata, options))
        logger.debug("captured a pass of %s", shape)
        return _Graph(captured, words, static, result, packed.tables)
