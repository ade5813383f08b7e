"""Settings of an engine. A setting has vLLM's name where its meaning is the same."""

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
BACKENDS = ("auto", "cpu", "cuda", "reference")


def _one_of(value: object, name: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(allowed)}; got {value!r}")


@checked_fields()
@dataclass(frozen=True, kw_only=True, slots=True)
class SpeculativeConfig:
    """Settings of a drafter."""

    method: str
    num_speculative_tokens: int | None = None
    """Most drafts per step and request; fewer are proposed near length limits and under load. None means the number
    that the drafter was trained for."""
    draft_confidence: float | None = None
    """Drafts are verified only as long as their joint probability, by the drafter, is at least this; 0 verifies all.
    None means 0 where num_speculative_tokens is given or a GPU verifies, else the value that is fastest on a CPU."""
    draft_vocab_size: int | None = None
    """Number of tokens that may be drafted, the most frequent ones by the drafter's own list; 0 means all tokens, None
    the number that is fastest."""
    pack_weights: bool | None = None
    """Whether to keep the drafter's matrices in 8 bits. None means yes where the CPU kernels can read them and
    expand_weights is not set."""
    model: str | None = None
    """The drafter's checkpoint, for methods that have one; None means the one that is installed for the target."""
    num_hidden_layers: int | None = None
    """Number of layers of the draft model's checkpoint to use; None means all."""
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
        """Returns the settings that a user gave as None, as a mapping with vLLM's field names, or as this class."""
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
    """auto means float32 on a CPU and bfloat16 on a GPU."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    max_model_len: int | None = None
    """Longest prompt plus output; None means the model's own limit, or what the memory for KV allows."""
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    """Most tokens computed in one step. More makes long prompts faster and delays requests that decode meanwhile."""
    block_size: int = 16
    """Tokens in a page of the KV cache. In a model with sliding-window layers, the group with the most layers has pages
    of this size and the other groups have longer ones."""
    enable_prefix_caching: bool = True
    kv_retention: str | int = "dense"
    """Where a cached text of a model with sliding-window layers can be hit. A hit needs the window before its end, and
    the cache keeps only windows that a hit can need: dense keeps all of them; tail keeps those before the ends of
    prompts and texts and of prefixes that turn out to be shared; a number keeps one every so many tokens, and those
    of tail. Without such layers the cache keeps everything."""
    kv_cache_memory_bytes: int | None = None
    """Memory for KV, which the prefix cache fills as texts end. None means 2 GiB, or less where the machine has less,
    on a CPU; what gpu_memory_utilization allows on a GPU; and never more than 64 (or max_num_seqs, if that is more)
    texts of the longest length need."""
    gpu_memory_utilization: float = 0.9
    speculative_config: SpeculativeConfig | None = None
    sanitizer: str = "off"
    sanitizer_level: str = "plan"
    """plan checks block tables and intervals; bytes also checksums published pages and verifies them on a hit."""
    expand_weights: bool = False
    """Whether to convert weights to float32 although the CPU kernels can read them as they are stored, quantised or in
    16 bits. Results then differ in the fourth digit from those with quantised weights, and everything is slower."""
    num_threads: int | None = None
    """Threads for CPU kernels; None means one for each core that this process may use."""
    backend: str = "auto"
    """Implementation of the layers: cpu (compiled kernels), cuda, or reference (plain PyTorch on any device); auto
    takes the fastest that works on the device."""

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "block_size"):
            whole_number(getattr(self, name), name, at_least=1)
        for name in ("max_model_len", "kv_cache_memory_bytes", "num_threads"):
            if getattr(self, name) is not None:
                whole_number(getattr(self, name), name, at_least=1)
        Retention.of(self.kv_retention)
        _one_of(self.dtype, "dtype", DTYPES)
        _one_of(self.sanitizer, "sanitizer", SANITIZER_MODES)
        _one_of(self.sanitizer_level, "sanitizer_level", SANITIZER_LEVELS)
        _one_of(self.backend, "backend", BACKENDS)
        if not isinstance(self.model, str) or not self.model:
            raise ConfigError(f"model must be a name or a path, got {self.model!r}")
        if not isinstance(self.gpu_memory_utilization, float) or not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(f"gpu_memory_utilization must lie in (0, 1], got {self.gpu_memory_utilization!r}")
        if self.speculative_config is not None and not isinstance(self.speculative_config, SpeculativeConfig):
            raise ConfigError("speculative_config must be a SpeculativeConfig; use SpeculativeConfig.of for a mapping")
