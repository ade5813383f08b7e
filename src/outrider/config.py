"""Settings of an engine, frozen and keyword-only. Names as users of vLLM know them where the meaning is the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outrider.errors import ConfigError
from outrider.kv.checked import checked_fields, whole_number
from outrider.kv.retention import Retention
from outrider.models.resolve import DEFAULT_MODEL

DTYPES = ("auto", "float32", "bfloat16", "float16")
SANITIZER_MODES = ("off", "log", "raise")
SANITIZER_LEVELS = ("plan", "bytes")
OPS = ("auto", "numba", "torch")


def _named(value: object, name: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(allowed)}; got {value!r}")


@checked_fields()
@dataclass(frozen=True, kw_only=True, slots=True)
class SpeculativeConfig:
    """How to draft."""

    method: str
    num_speculative_tokens: int | None = None
    """Most drafts per step and request; fewer are proposed near limits and under load. None: as many as the drafter
    was made for."""
    draft_confidence: float | None = None
    """Drafts are verified only as far as the drafter finds all of them together at least so likely; 0: all of them.
    None: 0 where the number of drafts is given or a GPU verifies, else what pays on a CPU."""
    draft_vocab_size: int | None = None
    """Draft only so many of the tokens, the most frequent by the drafter's own list; 0: all. None: what pays."""
    pack_weights: bool | None = None
    """Keep the drafter's matrices in 8 bits. None: where CPU kernels can read them, unless expand_weights is set."""
    model: str | None = None
    """The drafter's checkpoint, for methods that have one; None: the one that is made for the target, if any."""
    num_hidden_layers: int | None = None
    """Use only so many layers of the draft model's checkpoint."""
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 4

    def __post_init__(self) -> None:
        if not isinstance(self.method, str):
            raise ConfigError(f"speculative_config: method must be a name, got {self.method!r}")
        for name in ("prompt_lookup_min", "prompt_lookup_max"):
            whole_number(getattr(self, name), f"speculative_config: {name}", at_least=1)
        for name, least in (("num_speculative_tokens", 1), ("num_hidden_layers", 1), ("draft_vocab_size", 0)):
            if getattr(self, name) is not None:
                whole_number(getattr(self, name), f"speculative_config: {name}", at_least=least)
        confidence = self.draft_confidence
        if confidence is not None and (
            isinstance(confidence, bool) or not isinstance(confidence, int | float) or not 0 <= confidence < 1
        ):
            raise ConfigError(f"speculative_config: draft_confidence must lie in [0, 1), got {confidence!r}")
        if self.pack_weights is not None and not isinstance(self.pack_weights, bool):
            raise ConfigError(f"speculative_config: pack_weights must be true or false, got {self.pack_weights!r}")
        if self.model is not None and not isinstance(self.model, str):
            raise ConfigError(f"speculative_config: model must be a name or a path, got {self.model!r}")
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ConfigError(
                f"speculative_config: prompt_lookup_min ({self.prompt_lookup_min}) must not exceed "
                f"prompt_lookup_max ({self.prompt_lookup_max})"
            )

    @classmethod
    def of(cls, given: SpeculativeConfig | Mapping[str, Any] | None) -> SpeculativeConfig | None:
        """From what a user passes: None, a mapping with vLLM's field names, or the real thing."""
        if given is None or isinstance(given, SpeculativeConfig):
            return given
        if not isinstance(given, Mapping):
            raise ConfigError(f"speculative_config must be a mapping such as {{'method': 'ngram'}}, got {given!r}")
        return cls(**{str(name): value for name, value in given.items()})


@checked_fields()
@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    model: str = DEFAULT_MODEL
    dtype: str = "auto"
    """auto: float32 on a CPU, the checkpoint's own (else bfloat16) on a GPU."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    max_model_len: int | None = None
    """Longest prompt and output together; None: the model's own limit, or what the memory for KV allows."""
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    """Rows of one step. More is faster on long prompts and slower for everybody who decodes beside them."""
    block_size: int = 16
    """Tokens in a page of the KV cache; in a model with windows in the shortest page, of the most layers."""
    enable_prefix_caching: bool = True
    kv_retention: str | int = "dense"
    """What the prefix cache keeps of layers with a window, of which a hit needs only what lay under the window where
    it ends: dense, for every place where a hit may end; tail, for ends of prompts and texts and for prefixes that turn
    out to be shared; or a number, for every so many tokens, and ends. Without such layers all is kept anyway."""
    kv_cache_memory_bytes: int | None = None
    """Memory for KV, which the prefix cache fills as texts end; None: 2 GiB, or less where the machine has less, on a
    CPU; by gpu_memory_utilization on a GPU; and no more than 64 texts of the longest length need, or max_num_seqs."""
    gpu_memory_utilization: float = 0.9
    speculative_config: SpeculativeConfig | None = None
    sanitizer: str = "off"
    sanitizer_level: str = "plan"
    """plan checks tables and intervals; bytes also checksums published pages and verifies them when they are hit."""
    expand_weights: bool = False
    """Write weights out in memory although the CPU kernels can read them as they are stored, quantised or of 16 bits.
    Arithmetic is then float32 throughout: results differ in the fourth digit from those with quantised weights, and
    everything is slower."""
    num_threads: int | None = None
    """Threads of CPU kernels; None: one for each core this process may use."""
    ops: str = "auto"
    """Which version of the layers' arithmetic runs: numba (CPU), torch (anywhere)."""

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "block_size"):
            whole_number(getattr(self, name), name, at_least=1)
        for name in ("max_model_len", "kv_cache_memory_bytes", "num_threads"):
            if getattr(self, name) is not None:
                whole_number(getattr(self, name), name, at_least=1)
        Retention.of(self.kv_retention)
        _named(self.dtype, "dtype", DTYPES)
        _named(self.sanitizer, "sanitizer", SANITIZER_MODES)
        _named(self.sanitizer_level, "sanitizer_level", SANITIZER_LEVELS)
        _named(self.ops, "ops", OPS)
        if not isinstance(self.model, str) or not self.model:
            raise ConfigError(f"model must be a name or a path, got {self.model!r}")
        if not isinstance(self.gpu_memory_utilization, float) or not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(f"gpu_memory_utilization must lie in (0, 1], got {self.gpu_memory_utilization!r}")
        if self.speculative_config is not None and not isinstance(self.speculative_config, SpeculativeConfig):
            raise ConfigError("speculative_config must be a SpeculativeConfig; use SpeculativeConfig.of for a mapping")
