"""The training loop: streams in, a drafter out, at any moment."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from outrider.errors import ConfigError
from outrider.training.attention import BlockMasks
from outrider.training.batches import Batch, Pool, decay_weights, dpace_weights, draw_anchors, known_counts, make_batch
from outrider.training.checkpoint import load_state, refuse_other_run, save_state
from outrider.training.corpus import Streams
from outrider.training.drafts import DraftPlan
from outrider.training.loss import HeadLoss
from outrider.training.networks import DraftNetwork, block_layout
from outrider.training.optim import Optimisers, learning_rate
from outrider.training.pooling import StreamSource, fill_pool, tap_scale
from outrider.training.settings import TrainSettings
from outrider.training.target import Target

Report = Callable[[str], None]

# What must be the same for a saved state to be continued.
IDENTITY = ("method", "layers", "k", "causal", "optimiser", "batch_streams", "anchors", "pool_streams", "reuse", "seed")


class Trainer:
    def __init__(self, settings: TrainSettings, target: Target, plan: DraftPlan, source: StreamSource) -> None:
        self.settings, self.target, self.plan, self.source = settings, target, plan, source
        self.device = target.device
        self.length = source.streams.tokens.shape[1]
        if settings.anchors >= self.length:
            raise ConfigError(f"{settings.anchors} anchors do not fit into streams of {self.length} tokens")
        if settings.pool_streams < settings.batch_streams:
            raise ConfigError(f"a pool of {settings.pool_streams} cannot fill a batch of {settings.batch_streams}")
        self.compute = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.generator = torch.Generator(device=self.device).manual_seed(settings.seed)
        self.shuffle = torch.Generator().manual_seed(settings.seed + 1)
        self.network: DraftNetwork = plan.network.to(self.device)
        self.network.initialise_on(self.device, settings.seed + 2)
        self.optimisers = Optimisers(
            self.network, kind=settings.optimiser, lr=settings.lr, weight_decay=settings.weight_decay
        )
        compiled = settings.compiled and self.device.type == "cuda"
        self.forward: Callable[..., Tensor] = (
            torch.compile(self.network, dynamic=False) if compiled else self.network
        )
        if compiled:
            target.compile()
        self.head_loss = HeadLoss(plan.head.to(self.compute), chunk_rows=settings.chunk_rows, compiled=compiled)
        self.masks = self._masks()
        self.weights = decay_weights(self.network.k, settings.gamma, self.device)
        self.mask_row = None
        if plan.mask_token_id is not None:
            mask_id = torch.tensor([plan.mask_token_id], device=self.device)
            self.mask_row = target.embed(mask_id).to(self.compute)
        self.scale: Tensor | None = None
        self.step = 0
        self.elapsed_s = 0.0
        self._wanted: set[str] = set()
        self._pool: Pool | None = None
        self._counts: Tensor | None = None
        self._members = np.empty(0, dtype=np.int64)
        self._queue: list[Tensor] = []

    def _masks(self) -> BlockMasks | None:
        settings = self.settings
        layout = block_layout(self.network, length=self.length, anchors=settings.anchors, causal=settings.causal)
        if layout is None:
            return None
        flex = settings.attention == "flex" or (settings.attention == "auto" and self.device.type == "cuda")
        return BlockMasks(layout, settings.batch_streams, self.device, flex=flex)

    # --- data ---------------------------------------------------------------------------------------

    def _fill(self, members: np.ndarray[Any, np.dtype[np.int64]]) -> None:
        self._pool = self._counts = None
        self._members = members
        if self.scale is None:
            few = self.source.streams[members[: self.settings.batch_streams]]
            self.scale = tap_scale(self.target, few, self.plan.taps)
        self._pool = self.pool_of(self.source.streams[members])
        self._counts = known_counts(self._pool, self.network.k)

    def pool_of(self, streams: Streams) -> Pool:
        assert self.scale is not None
        return fill_pool(
            self.target,
            streams,
            self.plan.taps,
            scale=self.scale,
            dtype=self.compute,
            batch_streams=self.settings.batch_streams,
            with_final=self.settings.distil > 0,
        )

    def _next_batch(self) -> Batch:
        settings = self.settings
        if not self._queue:
            size = settings.batch_streams
            self._fill(self.source.next(settings.pool_streams))
            assert self._pool is not None
            for _ in range(settings.reuse):
                # Moved in one piece: a copy in every step would wait for the device.
                order = torch.randperm(len(self._pool), generator=self.shuffle).to(self.device)
                self._queue += list(order.split(size)[: len(order) // size])
        assert self._pool is not None and self._counts is not None
        index = self._queue.pop(0)
        anchors, real = draw_anchors(self._counts[index], settings.anchors, self.generator)
        return make_batch(self._pool.take(index), anchors, real, self.network.k)

    # --- one step -----------------------------------------------------------------------------------

    def rows(self, batch: Batch) -> Tensor:
        """[streams, anchors, k, hidden]"""
        mask: Tensor | BlockMask = batch.anchors if self.masks is None else self.masks.make(batch.anchors)
        blocks = batch.anchors[..., None] + torch.arange(self.network.k, device=self.device)
        ids = batch.tokens.gather(1, blocks.clamp(max=self.length - 1).flatten(1)).view(blocks.shape)
        embedded = self.target.embed(ids).to(self.compute)
        other = self.mask_row
        if other is None:
            other = self.target.embed(batch.tokens).to(self.compute)
        mixed = torch.autocast("cuda", torch.bfloat16) if self.device.type == "cuda" else nullcontext()
        with mixed:
            return self.forward(batch.taps, embedded, other, batch.anchors, mask)

    def train_step(self) -> dict[str, Tensor]:
        settings = self.settings
        batch = self._next_batch()
        labels, known = self.plan.draft_labels(batch)
        rows = self.rows(batch)
        teacher = None if batch.teacher is None else batch.teacher.flatten(0, 2)
        result = self.head_loss(rows.flatten(0, 2), labels.flatten(), teacher, settings.distil)
        if settings.weighting == "dpace":
            weights = dpace_weights(result.confidence.view(known.shape)) * known
        else:
            weights = self.weights * known
        weights = weights / weights.sum().clamp(min=1e-6)
        loss = (result.losses * weights.flatten()).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(self.network.parameters(), settings.clip)
        self.optimisers.set_lr(
            learning_rate(
                settings.lr, step=self.step, warmup_steps=settings.warmup_steps, progress=self.progress()
            )
        )
        self.optimisers.step()
        self.optimisers.zero_grad()
        self.step += 1
        right = result.right.view(known.shape) & known
        whole = known.all(-1)
        run = torch.cumprod(right.to(torch.int32), dim=-1).sum(-1) + 1
        return {
            "loss": loss.detach(),
            "norm": norm.detach(),
            "first": right[..., 0].sum() / known[..., 0].sum().clamp(min=1),
            "length": (run * whole).sum() / whole.sum().clamp(min=1),
            "known": known.float().mean(),
        }

    def progress(self) -> float:
        settings = self.settings
        if settings.steps is not None:
            return self.step / settings.steps
        assert settings.minutes is not None
        return self.elapsed_s / (settings.minutes * 60)

    # --- the run ------------------------------------------------------------------------------------

    def run(self, report: Report, evaluate: Callable[[], str], export: Callable[[], None]) -> None:
        """Until time is up or somebody asks to stop. A signal USR1 exports; TERM and INT save, export and end."""
        handlers = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT)}
        handlers[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, self._note)
        try:
            self._loop(report, evaluate, export)
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        self.save()
        report(f"done: {self.step} steps in {self.elapsed_s:.0f} s; {evaluate()}")
        export()

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self._wanted.add("export" if number == signal.SIGUSR1 else "stop")

    def _loop(self, report: Report, evaluate: Callable[[], str], export: Callable[[], None]) -> None:
        settings = self.settings
        sums: dict[str, Tensor] = {}
        counted = 0
        began: float | None = None
        before = self.elapsed_s
        evaluated = saved = logged = time.monotonic()
        while self.progress() < 1.0 and "stop" not in self._wanted:
            values = self.train_step()
            if began is None:
                # Compilation and the first pool are not training time.
                self._synchronise()
                began = evaluated = saved = logged = time.monotonic()
            for name, value in values.items():
                sums[name] = sums[name] + value if name in sums else value
            counted += 1
            now = time.monotonic()
            self.elapsed_s = before + now - began
            if self.step % settings.log_every == 0:
                report(self._line({name: value.item() / counted for name, value in sums.items()}, counted, logged))
                sums, counted, logged = {}, 0, time.monotonic()
            if now - evaluated > settings.evaluate_every_s:
                report(f"step {self.step}: {evaluate()}")
                evaluated = time.monotonic()
            if now - saved > settings.save_every_s or "export" in self._wanted:
                self.save()
                export()
                self._wanted.discard("export")
                saved = time.monotonic()

    def _line(self, means: dict[str, float], counted: int, since: float) -> str:
        seconds = max(1e-9, time.monotonic() - since)
        tokens = counted * self.settings.batch_streams * self.length / seconds
        done = self.progress()
        left = self.elapsed_s * (1 - done) / done if done else 0.0
        return (
            f"step {self.step} · loss {means['loss']:.3f} · first draft {means['first']:.1%} · "
            f"length on anchors {means['length']:.2f} · labels {means['known']:.0%} · norm {means['norm']:.2f} · "
            f"{seconds / counted * 1e3:.1f} ms/step · {tokens / 1e3:.0f}k tokens/s · {left:.0f} s left"
        )

    def _synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    # --- state --------------------------------------------------------------------------------------

    def identity(self) -> dict[str, Any]:
        values = asdict(self.settings)
        return {name: values[name] for name in IDENTITY} | {
            "taps": list(self.plan.taps),
            "target": self.target.fingerprint,
            "mask_token_id": self.plan.mask_token_id,
        }

    def save(self) -> None:
        save_state(
            self.settings.output,
            {
                "identity": self.identity(),
                "network": self.network.state_dict(),
                "optimisers": self.optimisers.state(),
                "generator": self.generator.get_state(),
                "shuffle": self.shuffle.get_state(),
                "source": self.source.state(),
                "members": self._members.tolist(),
                "queue": [index.tolist() for index in self._queue],
                "scale": self.scale,
                "step": self.step,
                "elapsed_s": self.elapsed_s,
            },
        )

    def resume(self) -> bool:
        """Go on from the state in the output directory, if there is one."""
        state = load_state(self.settings.output)
        if state is None:
            return False
        refuse_other_run(state["identity"], self.identity(), self.settings.output)
        self.network.load_state_dict(state["network"])
        self.optimisers.load_state(state["optimisers"])
        self.generator.set_state(state["generator"])
        self.shuffle.set_state(state["shuffle"])
        self.source.load_state(state["source"])
        self.scale = state["scale"].to(self.device)
        self.step, self.elapsed_s = state["step"], state["elapsed_s"]
        self._fill(np.array(state["members"], dtype=np.int64))
        self._queue = [torch.tensor(index, device=self.device) for index in state["queue"]]
        return True
