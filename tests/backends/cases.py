"""Random input for backends, small decoders, and how near a fast result must be to the reference's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from outrider.backends.attention import AttentionLayer, AttentionMetadata, PagedKV
from outrider.backends.base import Backend
from outrider.backends.batch import Batch
from outrider.kv.layout import KVLayout
from outrider.models.decoder import Decoder, PagedDecoder
from outrider.models.kv_groups import layer_groups
from outrider.models.parameters import DecoderParameters, DenseMLP, ExpertsMLP, LayerParameters, Linear
from outrider.models.rope import rotary_table
from outrider.models.spec import DecoderSpec, ExpertsSpec, LayerSpec, RopeSpec

VOCABULARY = 101
PAGES, PAGE_TOKENS = 40, 8
T = TypeVar("T")


def near(fast: Tensor, plain: Tensor, tolerance: float = 2e-5) -> bool:
    """Whether results differ by at most this part of the largest element: sums that cancel are no more exact."""
    fast, plain = fast.cpu().float(), plain.cpu().float()
    assert fast.shape == plain.shape
    assert torch.isfinite(fast).all()
    return bool((fast - plain).abs().max() <= tolerance * plain.abs().max())


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def moved(thing: T, device: torch.device) -> T:
    """Returns a copy on a device of a tensor, or of a dataclass or a tuple that holds tensors."""
    if isinstance(thing, Tensor):
        return thing.clone().to(device)
    if isinstance(thing, tuple):
        return tuple(moved(item, device) for item in thing)  # type: ignore[return-value]
    if is_dataclass(thing):
        return replace(thing, **{each.name: moved(getattr(thing, each.name), device) for each in fields(thing)})  # type: ignore[type-var]
    return thing


# --- attention -------------------------------------------------------------------------------------------------


def layer(
    *,
    heads: int = 6,
    kv_heads: int = 2,
    dim: int = 32,
    rotary_dim: int | None = None,
    head_norms: bool = False,
    softcap: float | None = None,
    sinks: bool = False,
) -> AttentionLayer:
    rope = RopeSpec(rotary_dim=dim if rotary_dim is None else rotary_dim)
    return AttentionLayer(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=dim,
        scale=dim**-0.5,
        rotary=rotary_table(rope, 2048, dtype=torch.float32, device=torch.device("cpu")),
        q_norm=random(1, dim).abs() + 0.5 if head_norms else None,
        k_norm=random(2, dim).abs() + 0.5 if head_norms else None,
        norm_eps=1e-5,
        softcap=softcap,
        sinks=random(3, heads) if sinks else None,
    )


Range = tuple[int, int, int, int]
"""A row: its row of the block tables, its position, and the keys [first_key, stop_key) that it reads."""
LONG = 700  # more than two of the CPU backend's blocks of keys


def mixed_ranges() -> list[Range]:
    """Returns a prompt chunk, decode rows, a verified draft, rows with windows, and a block that attends both ways."""
    chunk = [(0, position, 0, position + 1) for position in range(40, 75)]
    decodes = [(1, LONG - 1, 0, LONG), (2, 0, 0, 1), (3, 255, 0, 256), (4, 256, 0, 257)]
    draft = [(5, position, 0, position + 1) for position in range(300, 306)]
    windowed = [(6, position, max(0, position - 99), position + 1) for position in range(520, 540)]
    block = [(7, position, 0, 20) for position in range(12, 20)]
    return chunk + decodes + draft + windowed + block


def paged(
    layer: AttentionLayer, ranges: Sequence[Range], page_tokens: int, dtype: torch.dtype = torch.float32
) -> tuple[PagedKV, AttentionMetadata]:
    """Returns pages with random content, a strided view of an arena that holds two layers, and the rows over them.
    Every row of the block tables has pages of its own, in random order."""
    table_rows = 1 + max(table_row for table_row, *_ in ranges)
    width = LONG // page_tokens + 1
    arena = random(7, table_rows * width, 2, 2, layer.kv_heads, page_tokens, layer.head_dim).to(dtype)
    order = torch.randperm(table_rows * width, generator=torch.Generator().manual_seed(7))
    return PagedKV(keys=arena[:, 1, 0], values=arena[:, 1, 1]), metadata(ranges, order.view(-1, width), page_tokens)


def metadata(ranges: Sequence[Range], block_tables: Tensor, page_tokens: int) -> AttentionMetadata:
    table_rows, positions, first, stop = (torch.tensor(column) for column in zip(*ranges, strict=True))
    block_tables = block_tables.int()
    page = block_tables[table_rows, positions // page_tokens].long()
    starts = [0, *(row for row in range(1, len(ranges)) if ranges[row][0] != ranges[row - 1][0]), len(ranges)]
    return AttentionMetadata(
        positions=positions,
        slot_mapping=page * page_tokens + positions % page_tokens,
        table_rows=table_rows,
        block_tables=block_tables,
        query_start_loc=torch.tensor(starts),
        seq_lens=torch.tensor([int(positions[end - 1]) + 1 for _, end in pairwise(starts)]),
        first_key=first,
        stop_key=stop,
        max_keys=int((stop - first).max()),
    )


def chosen(rows: AttentionMetadata, which: list[int], page_tokens: int) -> AttentionMetadata:
    """Returns the metadata of some of the rows."""
    columns = (rows.table_rows, rows.positions, rows.first_key, rows.stop_key)
    ranges = list(zip(*(column[which].tolist() for column in columns), strict=True))
    return metadata(ranges, rows.block_tables, page_tokens)


class FakeTables:
    """Block tables of as many requests as there are rows, with random pages."""

    def __init__(self, layout: KVLayout, *, requests: int, max_model_len: int, seed: int) -> None:
        numbers = np.random.default_rng(seed)
        self._numbers, self._widths = numbers, [max_model_len // spec.page_tokens for spec in layout.groups]
        self._arrays = [numbers.integers(1, 99, (requests, width), np.int32) for width in self._widths]
        self.lows = numbers.choice(np.array([0, 0, 7], np.int32), (requests, len(layout.groups)))
        self._tensors = [torch.from_numpy(array) for array in self._arrays]

    def grow(self) -> None:
        """Moves the tables to larger memory, with other pages for all requests."""
        self._arrays = [self._numbers.integers(1, 99, (2 * len(a), a.shape[1]), np.int32) for a in self._arrays]
        self.lows = np.concatenate([self.lows, self.lows])
        self._tensors = [torch.from_numpy(array) for array in self._arrays]

    def array(self, group: int) -> Any:
        return self._arrays[group]

    def tensor(self, group: int) -> Tensor:
        return self._tensors[group]

    def pages(self, group: int, table_row: int, first: int, end: int) -> list[int]:
        return list(self._arrays[group][table_row, first:end].tolist())

    def low(self, group: int, table_row: int) -> int:
        return int(self.lows[table_row, group])


# --- decoders --------------------------------------------------------------------------------------------------


def decoder_spec(
    *, windows: tuple[int | None, ...] = (None, None), experts: ExpertsSpec | None = None, **changes: Any
) -> DecoderSpec:
    rope = RopeSpec(rotary_dim=16)
    settings: dict[str, Any] = {
        "family": "tiny",
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 16,
        "layers": tuple(LayerSpec(window=window, rope=rope, experts=experts) for window in windows),
        "max_position": PAGES * PAGE_TOKENS,
    }
    return DecoderSpec(**(settings | changes))


def decoder_parameters(spec: DecoderSpec, dtype: torch.dtype = torch.float32) -> DecoderParameters:
    generator = torch.Generator().manual_seed(3)
    hidden, inner = spec.hidden_size, spec.intermediate_size

    def weight(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=generator) / shape[-1] ** 0.5).to(dtype)

    def norm(width: int, wanted: bool = True) -> Any:
        return (torch.rand(width, generator=generator) + 0.5).to(dtype) if wanted else None

    def mlp(experts: ExpertsSpec | None) -> DenseMLP | ExpertsMLP:
        if experts is None:
            return DenseMLP(gate_up=Linear(weight=weight(2 * inner, hidden)), down=Linear(weight=weight(hidden, inner)))
        return ExpertsMLP(
            router=Linear(weight=weight(experts.count, hidden)),
            gate_up=weight(experts.count, 2 * inner, hidden),
            down=weight(experts.count, hidden, inner),
            gate_up_bias=weight(experts.count, 2 * inner),
            down_bias=weight(experts.count, hidden),
        )

    def one_layer(experts: ExpertsSpec | None) -> LayerParameters:
        return LayerParameters(
            input_norm=norm(hidden),
            qkv=Linear(weight=weight(spec.query_size + 2 * spec.kv_size, hidden)),
            out=Linear(weight=weight(hidden, spec.query_size)),
            mlp_norm=norm(hidden),
            mlp=mlp(experts),
            q_norm=norm(spec.head_dim, spec.qk_norm),
            k_norm=norm(spec.head_dim, spec.qk_norm),
            attention_post_norm=norm(hidden, spec.post_norms),
            mlp_post_norm=norm(hidden, spec.post_norms),
            sinks=norm(spec.heads, spec.sinks),
        )

    embedding = weight(spec.vocab_size, hidden)
    layers = tuple(one_layer(each.experts) for each in spec.layers)
    return DecoderParameters(embedding=embedding, layers=layers, final_norm=norm(hidden), head=Linear(weight=embedding))


class Model:
    """A decoder over pages with random content, and the batches to run it on."""

    def __init__(self, backend: Backend, spec: DecoderSpec, parameters: DecoderParameters | None = None) -> None:
        self.spec = spec
        self.decoder = Decoder(spec, parameters or decoder_parameters(spec), backend, max_position=PAGES * PAGE_TOKENS)
        self.kv, self.paged = self.bind()

    def bind(self, seed: int = 3) -> tuple[list[PagedKV], PagedDecoder]:
        spec, dtype = self.spec, self.decoder.parameters.embedding.dtype
        shape = (PAGES, 2, spec.kv_heads, PAGE_TOKENS, spec.head_dim)
        arenas = [random(seed + number, *shape).to(dtype) for number in range(len(spec.layers))]
        kv = [PagedKV(keys=arena[:, 0], values=arena[:, 1]) for arena in arenas]
        groups = layer_groups(spec, owner="target", page_tokens=PAGE_TOKENS, item_bytes=dtype.itemsize)
        return kv, self.decoder.bind(kv, groups)

    def batch(self, token_ids: Sequence[int] | Tensor, *starts: int) -> Batch:
        """Returns a batch in which requests that begin at `starts` have equally many of the rows."""
        count = len(token_ids) // len(starts)
        pages = (PAGES - 1) // len(starts)
        tables = 1 + torch.arange(len(starts) * pages).view(len(starts), pages)
        return Batch(
            token_ids=torch.as_tensor(token_ids),
            groups=tuple(
                metadata(
                    [
                        (number, position, 0 if window is None else max(0, position - window + 1), position + 1)
                        for number, start in enumerate(starts)
                        for position in range(start, start + count)
                    ],
                    tables,
                    PAGE_TOKENS,
                )
                for window in dict.fromkeys(each.window for each in self.spec.layers)
            ),
            first_rows=list(range(0, len(token_ids), count)),
        )
