"""The training loop; the drafter can be exported at any step."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from outrider.errors import ConfigError
from outrider.tools.training.attention import BlockLayout, BlockMasks
from outrider.tools.training.batches import Batch, Pool, decay_weights, dpace_weights
from outrider.tools.training.checkpoint import save_state
from outrider.tools.training.corpus import Streams
from outrider.tools.training.drafts import DraftPlan, TokenChoices, choose_taps
from outrider.tools.training.head_part import HeadPart
from outrider.tools.training.lanes import Lane
from outrider.tools.training.loss import HeadLoss
from outrider.tools.training.networks import DraftNetwork, block_layout
from outrider.tools.training.optim import Optimisers, learning_rate
from outrider.tools.training.pooling import fill_pool, tap_scale
from outrider.tools.training.settings import TrainSettings
from outrider.tools.training.target import Target

# Settings that must be the same for a saved state to be continued.
IDENTITY = (
    *("method", "layers", "k", "causal", "draft_vocab_size"),
    *("optimiser", "batch_streams", "anchors", "pool_streams", "reuse", "seed"),
    *("smaller_block", "smaller_share", "long_share", "long_pack", "sure_weight", "loss_vocab_size"),
)
# Longest time between two progress lines, however slow the steps are.
LOG_INTERVAL_MAX_S = 30.0

Report = Callable[[str], None]


class Measured(NamedTuple):
    """Result of an evaluation."""

    text: str
    length: float | None
    """Mean acceptance length over all held-out answers; None if nothing could be measured."""


def identity(settings: TrainSettings, target: Target, choices: TokenChoices) -> dict[str, Any]:
    values = asdict(settings)
    given = settings.mask_token_id
    return {name: values[name] for name in IDENTITY} | {
        "taps": list(choose_taps(settings, len(target.spec.layers))),
        "target": target.fingerprint,
        "long": bool(settings.long_data),
        "mask_token_id": choices.mask_token_id if given is None else given,
    }


class Trainer:
    def __init__(self, settings: TrainSettings, target: Target, plan: DraftPlan, lanes: Sequence[Lane]) -> None:
        self.settings, self.target, self.plan, self.lanes = settings, target, plan, tuple(lanes)
        self.device = target.device
        self.compute = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.generator = torch.Generator(device=self.device).manual_seed(settings.seed)
        self.shuffle = torch.Generator().manual_seed(settings.seed + 1)
        self.network: DraftNetwork = plan.network.to(self.device)
        self.network.initialise_on(self.device, settings.seed + 2)
        self.optimisers = Optimisers(
            self.network, kind=settings.optimiser, lr=settings.lr, weight_decay=settings.weight_decay
        )
        compiled = settings.compiled and self.device.type == "cuda"
        self.forward: Callable[..., Tensor] = torch.compile(self.network, dynamic=False) if compiled else self.network
        if compiled:
            target.compile()
        self.head_loss = HeadLoss(plan.head.to(self.compute), chunk_rows=settings.chunk_rows, compiled=compiled)
        self.head_part = self._head_part(lanes[0].source.trained)
        self.weights = {k: decay_weights(k, settings.gamma, self.device) for k in settings.draft_counts}
        self.scale: Tensor | None = None
        self.step = 0
        self.elapsed_s = 0.0
        self._lengths = {lane.context_tokens for lane in lanes}
        self._masks: dict[BlockLayout, BlockMasks] = {}
        self._wanted: set[str] = set()
        self._measured: float | None = None
        self._tokens_since = 0

    def _head_part(self, streams: Streams) -> HeadPart | None:
        size = self.settings.loss_vocab_size
        if size is None:
            return None
        kept = self.plan.choices.kept
        counts = np.bincount(streams.tokens[streams.roles], minlength=self.target.spec.vocab_size)
        return HeadPart(self.head_loss.head, counts if kept is None else counts[list(kept)], size)

    def _mask(self, batch: Batch, *, tiled: bool) -> Tensor | BlockMask | None:
        settings = self.settings
        streams, length = batch.tokens.shape
        layout = block_layout(
            self.network, length=length, anchors=batch.anchors.shape[1], k=batch.k, causal=settings.causal
        )
        if layout is None:
            return None
        if layout not in self._masks:
            flex = tiled and (
                settings.attention == "flex" or (settings.attention == "auto" and self.device.type == "cuda")
            )
            self._masks[layout] = BlockMasks(layout, streams, self.device, flex=flex)
        return self._masks[layout].make(batch.anchors)

    # --- data ---------------------------------------------------------------------------------------

    def _fill(self, lane: Lane, members: npt.NDArray[np.int64]) -> None:
        lane.empty()
        streams = lane.source.streams[members]
        if self.scale is None:
            self.scale = self._scale_on(streams[slice(0, lane.shape.batch_streams)])
        lane.fill(
            members, self.pool_of(streams, lane.shape.batch_streams, with_probability=self.settings.sure_weight < 1.0)
        )

    def _scale_on(self, few: Streams) -> Tensor:
        return tap_scale(self.target, few, self.plan.taps)

    def pool_of(self, streams: Streams, batch_streams: int, *, with_probability: bool = False) -> Pool:
        assert self.scale is not None
        return fill_pool(
            self.target,
            streams,
            self.plan.taps,
            scale=self.scale,
            dtype=self.compute,
            batch_streams=batch_streams,
            with_final=self.settings.distil > 0,
            with_probability=with_probability,
        )

    def _next_batch(self) -> Batch:
        settings = self.settings
        # The first step uses the usual streams: the scale of the taps comes from them.
        first = self.scale is None
        lane = self.lanes[0] if first or not self._by_chance(settings.long_share, self.lanes) else self.lanes[1]
        counts = settings.draft_counts
        k = counts[0] if first or not self._by_chance(settings.smaller_share, counts) else counts[1]
        if not lane.queue:
            self._fill(lane, self._next_members(lane))
            lane.plan_draws(self.shuffle)
        return lane.draw(k, self.generator)

    def _next_members(self, lane: Lane) -> npt.NDArray[np.int64]:
        try:
            return lane.next_members()
        except ConfigError as problem:
            # Data added during the run is damaged; the weights are not.
            if not self.step:
                raise
            self.save()
            raise ConfigError(
                f"{problem}; the run is saved as of step {self.step:,}: repair the data and run the same command again"
            ) from None

    def _by_chance(self, probability: float, choices: Sequence[object]) -> bool:
        """Whether to take the second of two choices; draws nothing if there is only one."""
        return len(choices) > 1 and torch.rand(1, generator=self.shuffle).item() < probability

    # --- one step -----------------------------------------------------------------------------------

    def rows(self, batch: Batch) -> Tensor:
        """Runs the network: [streams, anchors, k, hidden]."""
        # Only evaluation has streams of other lengths: not worth compiling for.
        trained = batch.tokens.shape[1] in self._lengths
        mask = self._mask(batch, tiled=trained)
        embedded = self.target.embed(batch.tokens).to(self.compute)
        mixed = torch.autocast("cuda", torch.bfloat16) if self.device.type == "cuda" else nullcontext()
        with mixed:
            forward = self.forward if trained else self.network
            return forward(batch.taps, embedded, batch.anchors, mask, batch.k)

    def train_step(self) -> dict[str, Tensor]:
        settings = self.settings
        batch = self._next_batch()
        labels, known = self.plan.draft_labels(batch)
        places, part = labels, None
        if self.head_part is not None:
            part, place = self.head_part.choose(labels, known, self.generator)
            places = place[labels]
            # Rare labels that exceed the room are skipped in this step.
            known = known & (places >= 0)
            places = places.clamp(min=0)
        rows = self.rows(batch)
        teacher = None if batch.teacher is None else batch.teacher.flatten(0, 2)
        result = self.head_loss(rows.flatten(0, 2), places.flatten(), teacher, settings.distil, part=part)
        if settings.weighting == "dpace":
            weights = dpace_weights(result.confidence.view(known.shape)) * known
        else:
            weights = self.weights[batch.k] * known
        weights = weights / weights.sum().clamp(min=1e-6)
        loss = (result.losses * weights.flatten()).sum()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.network.parameters(), settings.clip)
        self.optimisers.set_lr(
            learning_rate(settings.lr, step=self.step, warmup_steps=settings.warmup_steps, progress=self.progress())
        )
        self.optimisers.step()
        self.optimisers.zero_grad()
        self.step += 1
        self._tokens_since += batch.tokens.numel()
        right = result.right.view(known.shape) & known
        # A label outside the draft vocabulary is known, and missed.
        whole = batch.known.all(-1)
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

    def run(self, report: Report, evaluate: Callable[[], Measured], export: Callable[[], None]) -> None:
        """Trains until time is up or a signal arrives: USR1 exports; TERM and INT save, export and end the run."""
        handlers = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT)}
        handlers[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, self._note)
        try:
            self._loop(report, evaluate, export)
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        self.save()
        report("measuring acceptance on held-out answers …")
        report(f"done: {self.step:,} steps, {self.elapsed_s:.0f} s without the first; {evaluate().text}")
        export()

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT and "stop" in self._wanted:
            # The second interrupt ends the run at once, without saving.
            raise KeyboardInterrupt
        self._wanted.add("export" if number == signal.SIGUSR1 else "stop")

    def _loop(self, report: Report, evaluate: Callable[[], Measured], export: Callable[[], None]) -> None:
        settings = self.settings
        sums: dict[str, Tensor] = {}
        counted = timed = 0
        began: float | None = None
        before = self.elapsed_s
        evaluated = saved = logged = time.monotonic()
        while self.progress() < 1.0 and "stop" not in self._wanted:
            values = self.train_step()
            if began is None:
                # Compilation and the first pool are not training time.
                self._synchronise()
                began = evaluated = saved = logged = time.monotonic()
            else:
                timed += 1
            for name, value in values.items():
                sums[name] = sums[name] + value if name in sums else value
            counted += 1
            now = time.monotonic()
            self.elapsed_s = before + now - began
            if timed and (self.step % settings.log_every == 0 or now - logged > LOG_INTERVAL_MAX_S):
                means = {name: value.item() / counted for name, value in sums.items()}
                report(self._line(means, timed, logged))
                if not math.isfinite(means["loss"]):
                    raise ConfigError(
                        f"the loss is {means['loss']} at step {self.step}: start again with a lower --lr, "
                        "or resume from the last saved state"
                    )
                sums, counted, timed, logged = {}, 0, 0, time.monotonic()
            if now - evaluated > settings.evaluate_every_s:
                measured = evaluate()
                self._measured = measured.length
                report(f"step {self.step:,} · {measured.text}")
                evaluated = time.monotonic()
            if now - saved > settings.save_every_s or "export" in self._wanted:
                self.save()
                export()
                self._wanted.discard("export")
                saved = time.monotonic()

    def _line(self, means: dict[str, float], timed: int, since: float) -> str:
        """Returns a progress line; `timed` steps were done since the time `since`."""
        seconds = max(1e-9, time.monotonic() - since)
        tokens = self._tokens_since / seconds
        self._tokens_since = 0
        done = self.progress()
        left_s = self.elapsed_s * max(0.0, 1 - done) / done if done else 0.0
        held_out = "" if self._measured is None else f", held out {self._measured:.2f}"
        return (
            f"step {self.step:,} · loss {means['loss']:.3f} · simulated acceptance {means['length']:.2f}{held_out} "
            f"(first draft {means['first']:.0%}) · labels {means['known']:.0%} · norm {means['norm']:.2f} · "
            f"{seconds / timed * 1e3:.1f} ms/step · {_thousands(tokens)} tokens/s · {_clock(left_s)} left"
        )

    def _synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    # --- state --------------------------------------------------------------------------------------

    def save(self) -> None:
        save_state(
            self.settings.output,
            {
                "identity": identity(self.settings, self.target, self.plan.choices),
                "choices": self.plan.choices.state(),
                "network": self.network.state_dict(),
                "optimisers": self.optimisers.state(),
                "generator": self.generator.get_state(),
                "shuffle": self.shuffle.get_state(),
                "lanes": [lane.state() for lane in self.lanes],
                "scale": self.scale,
                "step": self.step,
                "elapsed_s": self.elapsed_s,
            },
        )

    def start_from(self, weights: dict[str, Tensor]) -> None:
        """Starts from exported weights, into which the scale of the taps was folded."""
        self.scale = self._scale_on(self.lanes[0].source.trained[slice(0, self.settings.batch_streams)])
        self.network.load_state_dict(weights)
        fuse = self.network.get_parameter("fc.weight")
        fuse.data.div_(self.scale.to(fuse.dtype))

    def resume(self, state: dict[str, Any]) -> None:
        """Resumes from a saved state of this run."""
        self.network.load_state_dict(state["network"])
        self.optimisers.load_state(state["optimisers"])
        self.generator.set_state(state["generator"])
        self.shuffle.set_state(state["shuffle"])
        self.scale = state["scale"].to(self.device)
        self.step, self.elapsed_s = state["step"], state["elapsed_s"]
        for lane, saved in zip(self.lanes, state["lanes"], strict=True):
            lane.source.load_state(saved["source"])
            if saved["members"]:
                self._fill(lane, np.array(saved["members"], dtype=np.int64))
                lane.load_state(saved)


def _thousands(count: float) -> str:
    return f"{count / 1e3:,.0f}k" if count >= 1e4 else f"{count:,.0f}"


def _clock(seconds: float) -> str:
    """Returns 1:02:03 or 2:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
