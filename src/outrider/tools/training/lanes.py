"""Batches from streams of one length: read, run through the target, drawn several times with new anchors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outrider.errors import ConfigError
from outrider.tools.training.batches import Batch, Pool, anchor_weights, draw_anchors, make_batch
from outrider.tools.training.pooling import StreamSource
from outrider.tools.training.settings import TrainSettings

# An anchor teaches less the second time: each of its first few draws multiplies its weight by this.
REPEAT_WEIGHT = 0.03
REPEATS_MAX = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class LaneShape:
    batch_streams: int
    anchors: int
    """Anchors per stream, for blocks of full size."""
    pool_streams: int
    pack: int
    """Number of streams that are joined into one."""


class Lane:
    """A source of streams of one length, the pool of those with target states, and the queue of draws from it."""

    def __init__(self, source: StreamSource, shape: LaneShape, settings: TrainSettings) -> None:
        self.source, self.shape, self.settings = source, shape, settings
        self.length: int = source.streams.tokens.shape[1]
        for k in settings.draft_counts:
            if (anchors := settings.anchors_for(k, shape.anchors)) >= self.length:
                raise ConfigError(f"{anchors} anchors do not fit into streams of {self.length} tokens; lower --anchors")
        roles = source.trained.roles
        if not (roles[:, 1:-1] & roles[:, 2:]).any():
            raise ConfigError(
                f"{', '.join(map(str, source.paths))}: nothing to learn from: in the streams that are not held out "
                "the assistant never sampled two tokens in a row"
            )
        if shape.pool_streams < shape.batch_streams:
            raise ConfigError(
                f"a pool of {shape.pool_streams} cannot fill a batch of {shape.batch_streams}; raise --pool-streams"
            )
        self.members = np.empty(0, dtype=np.int64)
        self.queue: list[Tensor] = []
        self._pool: Pool | None = None
        self._weights: dict[int, Tensor] = {}
        self._times: Tensor | None = None

    @property
    def context_tokens(self) -> int:
        """Largest context of a block."""
        return self.length * self.shape.pack

    def next_members(self) -> npt.NDArray[np.int64]:
        # A small corpus is not repeated to fill the pool.
        enough = max(self.shape.batch_streams, len(self.source.trained))
        return self.source.next(min(self.shape.pool_streams, enough))

    def empty(self) -> None:
        """Drops the pool, so that two of them are never in memory."""
        self._pool = self._times = None
        self._weights = {}

    def fill(self, members: npt.NDArray[np.int64], pool: Pool) -> None:
        self.members = members
        self._pool = pool
        self._weights = {k: anchor_weights(pool, k, self.settings.sure_weight) for k in self.settings.draft_counts}
        self._times = torch.zeros(pool.tokens.shape, dtype=torch.int8, device=pool.tokens.device)

    def plan_draws(self, shuffle: torch.Generator) -> None:
        assert self._pool is not None
        size = self.shape.batch_streams
        for _ in range(self.settings.reuse):
            # Copied at once: a copy in every step would wait for the device.
            order = torch.randperm(len(self._pool), generator=shuffle).to(self._pool.tokens.device)
            self.queue += list(order.split(size)[: len(order) // size])

    def draw(self, k: int, generator: torch.Generator) -> Batch:
        assert self._pool is not None and self._times is not None
        index = self.queue.pop(0)
        times = self._times[index]
        weights = self._weights[k][index] * REPEAT_WEIGHT ** times.float()
        anchors, real = draw_anchors(weights, self.settings.anchors_for(k, self.shape.anchors), generator)
        self._times[index] = times.scatter(1, anchors, (times.gather(1, anchors) + 1).clamp(max=REPEATS_MAX))
        batch = make_batch(self._pool.take(index), anchors, real, k)
        return batch.end_to_end(self.shape.pack) if self.shape.pack > 1 else batch

    def state(self) -> dict[str, Any]:
        return {
            "source": self.source.state(),
            "members": self.members.tolist(),
            "queue": [index.tolist() for index in self.queue],
            "times": self._times,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Restores the queue, after `fill` with the members that the state names."""
        assert self._pool is not None
        device = self._pool.tokens.device
        self._times = state["times"].to(device)
        self.queue = [torch.tensor(index, device=device) for index in state["queue"]]


def open_lanes(settings: TrainSettings, *, vocab_size: int) -> list[Lane]:
    """Opens the lane of the usual streams and, if there are any, that of the long ones."""
    source = StreamSource(
        settings.data,
        vocab_size=vocab_size,
        holdout=settings.holdout if settings.evaluation is None else 0,
        seed=settings.seed,
        watch=settings.watch,
    )
    shape = LaneShape(
        batch_streams=settings.batch_streams, anchors=settings.anchors, pool_streams=settings.pool_streams, pack=1
    )
    lanes = [Lane(source, shape, settings)]
    if settings.long_data:
        longer = StreamSource(
            settings.long_data, vocab_size=vocab_size, holdout=0, seed=settings.seed + 1, watch=settings.watch
        )
        shape = long_shape(settings, length=longer.streams.tokens.shape[1], usual=lanes[0].length)
        lanes.append(Lane(longer, shape, settings))
    return lanes


def long_shape(settings: TrainSettings, *, length: int, usual: int) -> LaneShape:
    """Returns the shape of a lane of longer streams: as many rows per step as the usual one, half of its memory."""
    if length <= usual:
        raise ConfigError(
            f"long_data has streams of {length} tokens, data of {usual}: long_data must have the longer ones"
        )
    ratio = length / usual
    pack = settings.long_pack
    batch = max(1, round(settings.batch_streams / ratio / pack)) * pack
    return LaneShape(
        batch_streams=batch,
        anchors=max(1, round(settings.anchors * settings.batch_streams / batch)),
        pool_streams=max(batch, int(settings.pool_streams / ratio / 2)),
        pack=pack,
    )
