"""What a training run is told, checked once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from outrider.errors import ConfigError

METHODS = ("dflash", "eagle3")
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
    """Of training, from the first step that is done; the learning rate ends with it. Or:"""
    steps: int | None = None
    evaluation: Path | None = None
    """A corpus of greedy answers that is never trained on; without it a slice of the data is held out."""
    init: Path | None = None
    """An exported drafter of the same shape, whose weights and tokens a new run begins with."""
    long_data: tuple[Path, ...] = ()
    """Longer streams, for a share of the steps: behind contexts longer than it has seen a drafter accepts little."""
    watch: bool = False
    """Data may grow: directories are read again whenever fresh streams are wanted."""

    layers: int = 4
    k: int = 7
    """Drafts per anchor: DFlash's block size less 1, EAGLE-3's unrolled steps."""
    taps: tuple[int, ...] | None = None
    """Layers whose output the drafter reads. None: spread over the target as the method does it."""
    smaller_block: int | None = None
    """DFlash only: rows of a smaller block that is learnt as well; fewer drafts then need fewer rows."""
    causal: bool = False
    mask_token_id: int | None = None
    """None: a token that the data never uses."""
    draft_vocab_size: int | None = None
    """EAGLE-3 only: the most frequent tokens; None keeps all."""

    batch_streams: int = 64
    anchors: int = 64
    pool_streams: int = 4096
    """Streams whose target states are kept at a time."""
    reuse: int = 4
    """How often a stream is drawn, each time with other anchors, before it is replaced."""
    long_share: float = LONG_SHARE
    """Of the steps: on `long_data`."""
    long_pack: int = 1
    """Streams of `long_data` laid end to end, each being context of the next: farther positions cost nothing."""
    smaller_share: float = SMALLER_SHARE
    """Of the steps: on blocks of `smaller_block` rows."""
    sure_weight: float = 1.0
    """How readily a token is made an anchor that the target was sure of, against one that surprised it. Decoding
    begins its blocks where drafts were wrong, which is mostly where the target is unsure."""
    weighting: str = "decay"
    gamma: float = 4.0
    distil: float = 0.0
    """Share of the target's whole distribution in the aim; the rest is its most likely token."""
    loss_vocab_size: int | None = None
    """Tokens that the loss of a step is computed over: the most frequent ones, the labels, and others by chance."""

    optimiser: str = "muon"
    lr: float = 1.5e-3
    warmup_steps: int = 200
    weight_decay: float = 0.01
    clip: float = 1.0
    seed: int = 0

    compiled: bool = True
    attention: str = "auto"
    chunk_rows: int = 4096
    """Rows of logits that exist at a time."""
    holdout: int = 64
    log_every: int = 100
    evaluate_every_s: float = 60.0
    save_every_s: float = 120.0
    shard_mib: int | None = None

    data_source: str | None = None
    """For the model card, as are the next two; None: what the corpora say of themselves."""
    data_licence: str | None = None
    licence: str | None = None
    """Of the drafter. None: the card names none."""

    def __post_init__(self) -> None:
        _one_of("method", self.method, METHODS)
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
                raise ConfigError(f"{name} is a share between 0 and 1, got {getattr(self, name)}")
        if not 0.0 < self.sure_weight <= 1.0:
            raise ConfigError(f"sure_weight must be more than 0 and at most 1, got {self.sure_weight}")
        if not self.data:
            raise ConfigError("no data to train on")
        if self.method == "eagle3" and self.layers != 1:
            raise ConfigError(f"an EAGLE-3 drafter has one layer, got {self.layers}")
        if self.smaller_block is not None:
            if self.method == "eagle3":
                raise ConfigError("an EAGLE-3 drafter drafts token by token: it has no smaller_block to learn")
            if not 2 <= self.smaller_block <= self.k:
                raise ConfigError(f"smaller_block must be 2 to {self.k}, got {self.smaller_block}")

    @property
    def block_size(self) -> int:
        return self.k + 1

    @property
    def draft_counts(self) -> tuple[int, ...]:
        """How many drafts behind an anchor are learnt: the most first."""
        return (self.k,) if self.smaller_block is None else (self.k, self.smaller_block - 1)

    def anchors_for(self, k: int, anchors: int) -> int:
        """Anchors whose blocks of k drafts take as many rows as `anchors` blocks of the whole size."""
        return anchors * self.block_size // (k + 1) if k != self.k else anchors


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} {value!r} is not known; choose one of {', '.join(allowed)}")


def dflash_taps(layers: int, count: int = 5) -> tuple[int, ...]:
    """Evenly spread from the second layer to the third from the end. Tap i is what leaves layer i."""
    if layers < 4:
        return tuple(range(layers))
    count = min(count, layers - 3)
    if count == 1:
        return (1,)
    return tuple(round(1 + j * (layers - 4) / (count - 1)) for j in range(count))


def eagle3_taps(layers: int) -> tuple[int, ...]:
    """Low, middle, high. Public configurations name what *enters* a layer (2, L/2, L-3): one more than these."""
    if layers < 8:
        return tuple(sorted({0, layers // 2, layers - 1}))
    return (1, layers // 2 - 1, layers - 4)
