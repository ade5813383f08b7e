"""Settings of a training run, checked once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from outrider.errors import ConfigError
from outrider.speculative.method import Training
from outrider.speculative.registry import BUILT_IN, drafting_method

OPTIMISERS = ("muon", "adamw")
ATTENTIONS = ("auto", "flex", "sdpa")
WEIGHTINGS = ("decay", "dpace")
SEEDS = 1 << 63
LONG_SHARE = 0.12
SMALLER_SHARE = 0.3


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainSettings:
    method: str
    data: tuple[Path, ...]
    output: Path
    minutes: float | None = None
    """Training time after the first step; the learning rate decays over it. Either this or `steps` is given."""
    steps: int | None = None
    """Number of steps, if the length of the run is not given in minutes."""
    evaluation: Path | None = None
    """A corpus of greedy answers to measure with; without it a part of the data is held out."""
    init: Path | None = None
    """An exported drafter of the same shape, whose weights and tokens a new run starts with."""
    long_data: tuple[Path, ...] = ()
    """Longer streams for some of the steps: few drafts are accepted after contexts longer than those trained on."""
    watch: bool = False
    """Whether data may grow: directories are then read again whenever the pool is refilled."""

    layers: int = 4
    k: int = 7
    """Drafts per anchor: DFlash's block size less 1, EAGLE-3's unrolled steps."""
    taps: tuple[int, ...] | None = None
    """Target layers whose output the drafter reads; None for the usual choice of the method."""
    smaller_block: int | None = None
    """DFlash only: rows of a smaller block that is trained as well, so that fewer drafts need fewer rows."""
    causal: bool = False
    mask_token_id: int | None = None
    """Mask token; None for one that the data never uses."""
    draft_vocab_size: int | None = None
    """EAGLE-3 only: number of most frequent tokens that can be drafted; None for all."""

    batch_streams: int = 64
    anchors: int = 64
    pool_streams: int = 4096
    """Number of streams whose target states are kept at a time."""
    reuse: int = 4
    """Number of times that a stream is drawn, with new anchors each time, before it is replaced."""
    long_share: float = LONG_SHARE
    """Fraction of the steps that use `long_data`."""
    long_pack: int = 1
    """Number of streams of `long_data` joined into one, each the context of the next: longer contexts at no cost."""
    smaller_share: float = SMALLER_SHARE
    """Fraction of the steps that use blocks of `smaller_block` rows."""
    sure_weight: float = 1.0
    """Weight of an anchor whose token the target was sure of, relative to a surprising one. Decoding starts its blocks
    where drafts were wrong, which is mostly where the target is unsure."""
    weighting: str = "decay"
    gamma: float = 4.0
    distil: float = 0.0
    """Fraction of the training objective that is the target's distribution; the rest is its most likely token."""
    loss_vocab_size: int | None = None
    """Number of tokens over which the loss is computed: frequent ones, the labels, random others. None for all."""

    optimiser: str = "muon"
    lr: float = 1.5e-3
    warmup_steps: int = 200
    weight_decay: float = 0.01
    clip: float = 1.0
    seed: int = 0

    compiled: bool = True
    attention: str = "auto"
    chunk_rows: int = 4096
    """Number of rows whose logits are computed at a time."""
    holdout: int = 64
    log_every: int = 100
    evaluate_every_s: float = 60.0
    save_every_s: float = 120.0
    shard_mib: int | None = None

    data_source: str | None = None
    """Source of the data for the model card; None for what the corpora record."""
    data_licence: str | None = None
    """Licence of the data for the model card; None for what the corpora record."""
    licence: str | None = None
    """Licence of the drafter for the model card; None to name none."""

    def __post_init__(self) -> None:
        if drafting_method(self.method).training is None:
            trained = [name for name in BUILT_IN if drafting_method(name).training is not None]
            raise ConfigError(f"method {self.method!r} cannot be trained; choose one of {', '.join(trained)}")
        _one_of("optimiser", self.optimiser, OPTIMISERS)
        _one_of("attention", self.attention, ATTENTIONS)
        _one_of("weighting", self.weighting, WEIGHTINGS)
        if (self.minutes is None) == (self.steps is None):
            raise ConfigError("say how long to train: either --minutes or --steps")
        for name in (
            *("layers", "k", "batch_streams", "anchors", "pool_streams", "reuse", "chunk_rows", "log_every"),
            *("minutes", "steps", "gamma", "lr", "clip", "shard_mib"),
            *("draft_vocab_size", "long_pack", "loss_vocab_size"),
        ):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name} must be more than 0, got {value}")
        for name in ("holdout", "warmup_steps", "weight_decay", "evaluate_every_s", "save_every_s"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} must be at least 0, got {getattr(self, name)}")
        if not 0 <= self.seed < SEEDS:
            raise ConfigError(f"seed must be at least 0 and less than {SEEDS:,}, got {self.seed:,}")
        for name in ("distil", "long_share", "smaller_share"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ConfigError(f"{name} must be a fraction between 0 and 1, got {getattr(self, name)}")
        if not 0.0 < self.sure_weight <= 1.0:
            raise ConfigError(f"sure_weight must be more than 0 and at most 1, got {self.sure_weight}")
        if not self.data:
            raise ConfigError("no data to train on; name a corpus with --data")
        if not self.in_blocks and self.layers != 1:
            raise ConfigError(f"an {self.title} drafter has one layer, got {self.layers}")
        if self.smaller_block is not None:
            if not self.in_blocks:
                raise ConfigError(
                    f"an {self.title} drafter drafts token by token and has no blocks; leave smaller_block out"
                )
            if not 2 <= self.smaller_block <= self.k:
                raise ConfigError(f"smaller_block must be 2 to {self.k}, got {self.smaller_block}")

    @property
    def title(self) -> str:
        """The drafter's name in prose."""
        return drafting_method(self.method).title

    @property
    def in_blocks(self) -> bool:
        """Whether the drafter learns to predict a block of masks in one pass, rather than one token after the other."""
        return drafting_method(self.method).training is Training.BLOCK

    @property
    def block_size(self) -> int:
        return self.k + 1

    @property
    def draft_counts(self) -> tuple[int, ...]:
        """Numbers of drafts per anchor that are trained, the largest first."""
        return (self.k,) if self.smaller_block is None else (self.k, self.smaller_block - 1)

    def anchors_for(self, k: int, anchors: int) -> int:
        """Returns the number of anchors whose blocks of k drafts take as many rows as `anchors` blocks of full size."""
        return anchors * self.block_size // (k + 1) if k != self.k else anchors


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} {value!r} is not known; choose one of {', '.join(allowed)}")


def dflash_taps(layers: int, count: int = 5) -> tuple[int, ...]:
    """Returns taps spread evenly from the second layer to the third from the end. Tap i is the output of layer i."""
    if layers < 4:
        return tuple(range(layers))
    count = min(count, layers - 3)
    if count == 1:
        return (1,)
    return tuple(round(1 + j * (layers - 4) / (count - 1)) for j in range(count))


def eagle3_taps(layers: int) -> tuple[int, ...]:
    """Returns a low, a middle and a high tap. Public configurations name the layers they *enter* (2, L/2, L-3)."""
    if layers < 8:
        return tuple(sorted({0, layers // 2, layers - 1}))
    return (1, layers // 2 - 1, layers - 4)
