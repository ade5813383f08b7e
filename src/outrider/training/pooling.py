"""Which streams come next, and the target's states for them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outrider.errors import ConfigError
from outrider.training.batches import Pool
from outrider.training.corpus import Streams, count_files, read_corpus
from outrider.training.target import Target

ARGMAX_ROWS = 8192
FIRST_TOKENS = 8


class Piece(NamedTuple):
    """Streams [start, stop) of one corpus."""

    corpus: int
    start: int
    stop: int


class StreamSource:
    """Streams of several corpora, each once per epoch, in an order that a seed fixes.

    They are numbered as they came: what a corpus is given later lies behind everything that was there before, so that
    numbers of streams, those that are held out first of all, mean the same for the whole run.
    """

    def __init__(self, paths: Sequence[Path], *, vocab_size: int, holdout: int, seed: int, watch: bool) -> None:
        self.paths, self.vocab_size, self.watch = tuple(paths), vocab_size, watch
        self._generator = np.random.Generator(np.random.PCG64(seed))
        self._pieces: list[Piece] = []
        self._counts = self._count()
        self.streams = self._read()
        self._first = min(holdout, len(self.streams) // 4)
        self._order = np.empty(0, dtype=np.int64)
        self.epoch = 0

    @property
    def held_out(self) -> Streams:
        return self.streams[slice(0, self._first)]

    @property
    def trained(self) -> Streams:
        return self.streams[slice(self._first, None)]

    def _count(self) -> tuple[int, ...]:
        return tuple(count_files(path) if path.exists() else 0 for path in self.paths)

    def _read(self) -> Streams:
        """The pieces that are known, and behind them whatever is there beyond them."""
        parts = {
            number: read_corpus(path, vocab_size=self.vocab_size)
            for number, (path, count) in enumerate(zip(self.paths, self._counts, strict=True))
            if count or not self.watch
        }
        if not parts:
            raise ConfigError(f"{', '.join(str(path) for path in self.paths)}: no streams yet")
        if len({part.tokens.shape[1] for part in parts.values()}) > 1:
            raise ConfigError("the corpora have streams of different lengths; give the longer ones as --long-data")
        pieces = list(self._pieces)
        for number, known in enumerate(self._known()):
            there = len(parts[number]) if number in parts else 0
            if there < known:
                raise ConfigError(
                    f"{self.paths[number]} has {there} streams, but had {known} before: "
                    "give the run the same data, or begin anew with --fresh"
                )
            if there > known:
                pieces.append(Piece(number, known, there))
        self._pieces = pieces
        taken = [parts[piece.corpus][slice(piece.start, piece.stop)] for piece in pieces]
        return Streams(
            tokens=np.concatenate([part.tokens for part in taken]), roles=np.concatenate([part.roles for part in taken])
        )

    def _known(self) -> list[int]:
        """How many streams of each corpus have a number."""
        return [
            max((piece.stop for piece in self._pieces if piece.corpus == number), default=0)
            for number in range(len(self.paths))
        ]

    def next(self, count: int) -> npt.NDArray[np.int64]:
        """Indices of the next streams; at the end of an epoch the rest and the beginning of the next."""
        if self.watch and (counts := self._count()) != self._counts:
            self._counts = counts
            self._grow(len(self.streams))
        while len(self._order) < count:
            fresh = self._generator.permutation(np.arange(self._first, len(self.streams)))
            self._order = np.concatenate([self._order, fresh])
            self.epoch += 1
        taken, self._order = self._order[:count], self._order[count:]
        return taken

    def _grow(self, before: int) -> None:
        """What is new comes with the rest of the epoch, before anything is seen again."""
        self.streams = self._read()
        if len(self.streams) > before:
            new = np.arange(before, len(self.streams))
            self._order = self._generator.permutation(np.concatenate([self._order, new]))

    def state(self) -> dict[str, Any]:
        return {
            "order": self._order.tolist(),
            "generator": self._generator.bit_generator.state,
            "epoch": self.epoch,
            "held_out": self._first,
            "pieces": [list(piece) for piece in self._pieces],
            "length": self.streams.tokens.shape[1],
        }

    def load_state(self, state: dict[str, Any]) -> None:
        length, wanted = self.streams.tokens.shape[1], state["length"]
        if length != wanted:
            raise ConfigError(
                f"{self.paths[0]} has streams of {length} tokens, but the run to continue had streams of {wanted}: "
                "give the run the same data, or begin anew with --fresh"
            )
        pieces = [Piece(*piece) for piece in state["pieces"]]
        corpora = 1 + max(piece.corpus for piece in pieces)
        if corpora > len(self.paths):
            raise ConfigError(
                f"the run to continue learnt from {corpora} corpora, {len(self.paths)} are given: "
                "give the run the same data, or begin anew with --fresh"
            )
        # A larger corpus would have more held out by now, some of which was trained on.
        self._first = state["held_out"]
        self._order = np.array(state["order"], dtype=np.int64)
        self._generator.bit_generator.state = state["generator"]
        self.epoch = state["epoch"]
        if pieces != self._pieces:
            self._pieces = pieces
            self._grow(sum(piece.stop - piece.start for piece in pieces))


def wide_logits(rows: Tensor, head: Tensor) -> Tensor:
    """In float32: 16 bits would make ties of near misses."""
    if rows.is_cuda and rows.dtype != torch.float32:
        return torch.mm(rows, head.T, out_dtype=torch.float32)
    return (rows @ head.T).float()


@torch.no_grad()
def best_tokens(target: Target, final: Tensor) -> Tensor:
    """[streams, length]: at p the target's most likely token after p - 1; at 0 it is 0."""
    rows = final.flatten(0, 1)
    best = torch.cat([wide_logits(part, target.head).argmax(-1) for part in rows.split(ARGMAX_ROWS)])
    best = best.view(final.shape[:2])
    return torch.cat([torch.zeros_like(best[:, :1]), best[:, :-1]], dim=1)


@torch.no_grad()
def best_and_sure(target: Target, final: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """`best_tokens`, and how likely the target found each token after those before it; at 0 that is 1."""
    following = torch.cat([tokens[:, 1:], tokens[:, :1]], dim=1).flatten()
    best, sure = [], []
    for part, said in zip(final.flatten(0, 1).split(ARGMAX_ROWS), following.split(ARGMAX_ROWS), strict=True):
        chosen, likely = target.row_scores(wide_logits(part, target.head), said)
        best.append(chosen)
        sure.append(likely)
    found = torch.cat(best).view(tokens.shape)
    probable = torch.nan_to_num(torch.cat(sure)).view(tokens.shape)
    return (
        torch.cat([torch.zeros_like(found[:, :1]), found[:, :-1]], dim=1),
        torch.cat([torch.ones_like(probable[:, :1]), probable[:, :-1]], dim=1),
    )


@torch.no_grad()
def fill_pool(
    target: Target,
    streams: Streams,
    taps: Sequence[int],
    *,
    scale: Tensor,
    dtype: torch.dtype,
    batch_streams: int,
    with_final: bool,
    with_sure: bool = False,
) -> Pool:
    """Run the target over the streams and keep what a drafter learns from; taps are multiplied by the scale."""
    device = target.device
    tokens = torch.from_numpy(streams.tokens.astype(np.int64)).to(device)
    roles = torch.from_numpy(streams.roles).to(device)
    count, length = tokens.shape
    width = len(taps) * target.spec.hidden_size
    kept = torch.empty(count, length, width, dtype=dtype, device=device)
    final = torch.empty(count, length, target.spec.hidden_size, dtype=dtype, device=device) if with_final else None
    best = torch.empty_like(tokens)
    sure = torch.empty(count, length, device=device) if with_sure else None
    for start in range(0, count, batch_streams):
        part = slice(start, start + batch_streams)
        padded = tokens[part]
        missing = batch_streams - len(padded) if count > batch_streams else 0
        if missing:
            # One shape for all: a smaller batch would be compiled anew.
            padded = torch.cat([padded, padded[:1].expand(missing, -1)])
        states = target.states(padded, taps)
        rows = len(tokens[part])
        found = states.taps[:rows]
        # A stream that overflows 16 bits must not spoil the run.
        kept[part] = torch.nan_to_num(found.float() * scale, nan=0.0, posinf=0.0, neginf=0.0).to(dtype)
        if sure is None:
            best[part] = best_tokens(target, states.final)[:rows]
        else:
            found_best, found_sure = best_and_sure(target, states.final, padded)
            best[part], sure[part] = found_best[:rows], found_sure[:rows]
        if final is not None:
            final[part] = torch.nan_to_num(states.final[:rows]).to(dtype)
    return Pool(tokens=tokens, best=best, roles=roles, taps=kept, final=final, sure=sure)


@torch.no_grad()
def tap_scale(target: Target, streams: Streams, taps: Sequence[int]) -> Tensor:
    """One over each tap channel's usual size: a few channels are a thousand times the others'."""
    tokens = torch.from_numpy(streams.tokens.astype(np.int64)).to(target.device)
    # The first tokens of a stream are outliers, hundreds of times as large as any other.
    found = target.states(tokens, taps).taps[:, min(FIRST_TOKENS, tokens.shape[1] - 1) :].float().flatten(0, 1)
    return torch.nan_to_num(found.square().mean(0).add(1e-6).rsqrt())
