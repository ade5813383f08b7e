"""The order in which streams are trained on, and the target's states for them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outrider.errors import ConfigError
from outrider.tools.training.batches import Pool
from outrider.tools.training.corpus import Streams, count_files, read_corpus
from outrider.tools.training.target import Target

ARGMAX_ROWS = 8192
FIRST_TOKENS = 8


class Piece(NamedTuple):
    """Streams [start, stop) of one corpus."""

    corpus: int
    start: int
    stop: int


class StreamSource:
    """Streams of several corpora, each once per epoch, in an order fixed by a seed.

    Streams are numbered in order of arrival: those added to a corpus later come after all earlier ones, so that a
    number names the same stream for the whole run. The first ones are held out.
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
        """Reads the known pieces, followed by the streams that have been added since."""
        parts = {
            number: read_corpus(path, vocab_size=self.vocab_size)
            for number, (path, count) in enumerate(zip(self.paths, self._counts, strict=True))
            if count or not self.watch
        }
        if not parts:
            raise ConfigError(
                f"{', '.join(str(path) for path in self.paths)}: no streams yet; write some: outrider train corpus"
            )
        if len({part.tokens.shape[1] for part in parts.values()}) > 1:
            raise ConfigError("the corpora have streams of different lengths; give the longer ones as --long-data")
        pieces = list(self._pieces)
        for number, known in enumerate(self._known()):
            found = len(parts[number]) if number in parts else 0
            if found < known:
                raise ConfigError(
                    f"{self.paths[number]} has {found} streams, but had {known} before: "
                    "give the run the same data, or start again with --fresh"
                )
            if found > known:
                pieces.append(Piece(number, known, found))
        self._pieces = pieces
        taken = [parts[piece.corpus][slice(piece.start, piece.stop)] for piece in pieces]
        return Streams(
            tokens=np.concatenate([part.tokens for part in taken]), roles=np.concatenate([part.roles for part in taken])
        )

    def _known(self) -> list[int]:
        """Returns the number of known streams of each corpus."""
        return [
            max((piece.stop for piece in self._pieces if piece.corpus == number), default=0)
            for number in range(len(self.paths))
        ]

    def next(self, count: int) -> npt.NDArray[np.int64]:
        """Returns the indices of the next streams; the last of an epoch are followed by the first of the next."""
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
        """Adds new streams to the rest of the epoch, so that they come before any repetition."""
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
                "give the run the same data, or start again with --fresh"
            )
        pieces = [Piece(*piece) for piece in state["pieces"]]
        corpora = 1 + max(piece.corpus for piece in pieces)
        if corpora > len(self.paths):
            raise ConfigError(
                f"the run to continue used {corpora} corpora, {len(self.paths)} are given: "
                "give the run the same data, or start again with --fresh"
            )
        # A corpus that has grown would hold out more streams, some of which were trained on.
        self._first = state["held_out"]
        self._order = np.array(state["order"], dtype=np.int64)
        self._generator.bit_generator.state = state["generator"]
        self.epoch = state["epoch"]
        if pieces != self._pieces:
            self._pieces = pieces
            self._grow(sum(piece.stop - piece.start for piece in pieces))


def wide_logits(rows: Tensor, head: Tensor) -> Tensor:
    """Returns logits in float32: in 16 bits near misses would become ties."""
    if rows.is_cuda and rows.dtype != torch.float32:
        return torch.mm(rows, head.T, out_dtype=torch.float32)
    return (rows @ head.T).float()


@torch.no_grad()
def best_tokens(target: Target, final: Tensor) -> Tensor:
    """Returns [streams, length]: at p the target's most likely token after p - 1; at position 0 it is 0."""
    rows = final.flatten(0, 1)
    best = torch.cat([wide_logits(part, target.head).argmax(-1) for part in rows.split(ARGMAX_ROWS)])
    best = best.view(final.shape[:2])
    return torch.cat([torch.zeros_like(best[:, :1]), best[:, :-1]], dim=1)


@torch.no_grad()
def best_and_probability(target: Target, final: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Returns `best_tokens` and the target's probability of each token given those before it; 1 at position 0."""
    following = torch.cat([tokens[:, 1:], tokens[:, :1]], dim=1).flatten()
    best, probabilities = [], []
    for part, sampled in zip(final.flatten(0, 1).split(ARGMAX_ROWS), following.split(ARGMAX_ROWS), strict=True):
        chosen, probability = target.row_scores(wide_logits(part, target.head), sampled)
        best.append(chosen)
        probabilities.append(probability)
    found = torch.cat(best).view(tokens.shape)
    probability = torch.nan_to_num(torch.cat(probabilities)).view(tokens.shape)
    return (
        torch.cat([torch.zeros_like(found[:, :1]), found[:, :-1]], dim=1),
        torch.cat([torch.ones_like(probability[:, :1]), probability[:, :-1]], dim=1),
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
    with_probability: bool = False,
) -> Pool:
    """Runs the target over the streams and keeps the states to learn from; taps are multiplied by `scale`."""
    device = target.device
    tokens = torch.from_numpy(streams.tokens.astype(np.int64)).to(device)
    roles = torch.from_numpy(streams.roles).to(device)
    count, length = tokens.shape
    width = len(taps) * target.spec.hidden_size
    kept = torch.empty(count, length, width, dtype=dtype, device=device)
    final = torch.empty(count, length, target.spec.hidden_size, dtype=dtype, device=device) if with_final else None
    best = torch.empty_like(tokens)
    probability = torch.empty(count, length, device=device) if with_probability else None
    for start in range(0, count, batch_streams):
        part = slice(start, start + batch_streams)
        padded = tokens[part]
        missing = batch_streams - len(padded) if count > batch_streams else 0
        if missing:
            # A smaller last batch would be compiled again.
            padded = torch.cat([padded, padded[:1].expand(missing, -1)])
        states = target.states(padded, taps)
        rows = len(tokens[part])
        found = states.taps[:rows]
        # A stream that overflows 16 bits must not fill the weights with NaN.
        kept[part] = torch.nan_to_num(found.float() * scale, nan=0.0, posinf=0.0, neginf=0.0).to(dtype)
        if probability is None:
            best[part] = best_tokens(target, states.final)[:rows]
        else:
            found_best, found_probability = best_and_probability(target, states.final, padded)
            best[part], probability[part] = found_best[:rows], found_probability[:rows]
        if final is not None:
            final[part] = torch.nan_to_num(states.final[:rows]).to(dtype)
    return Pool(tokens=tokens, best=best, roles=roles, taps=kept, final=final, probability=probability)


@torch.no_grad()
def tap_scale(target: Target, streams: Streams, taps: Sequence[int]) -> Tensor:
    """Returns the inverse RMS of each tap channel: a few channels are a thousand times as large as the others."""
    tokens = torch.from_numpy(streams.tokens.astype(np.int64)).to(target.device)
    # The first tokens of a stream are outliers, hundreds of times as large as any other.
    found = target.states(tokens, taps).taps[:, min(FIRST_TOKENS, tokens.shape[1] - 1) :].float().flatten(0, 1)
    return torch.nan_to_num(found.square().mean(0).add(1e-6).rsqrt())
