"""Settings of an engine. A setting has vLLM's name where its meaning is the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from outrider.errors import ConfigError
from outrider.events.config import KVEventsConfig
from outrider.kv.checked import checked_fields, whole_number
from outrider.kv.retention import Retention
from outrider.models.resolve import DEFAULT_MODEL

DTYPES = ("auto", "float32", "bfloat16", "float16")
SANITIZER_MODES = ("off", "log", "raise")
SANITIZER_LEVELS = ("plan", "bytes")
BACKENDS = ("auto", "cpu", "cuda", "reference")
KV_CONNECTORS = ("nixl", "local")
KV_ROLES = ("kv_producer", "kv_consumer", "kv_both")
LOAD_FAILURE_POLICIES = ("recompute", "fail")
KV_TRANSPORTS = ("auto", "cma", "tcp")
VLLM_FIELDS_WITHOUT_EFFECT = frozenset(
    {"engine_id", "kv_buffer_device", "kv_buffer_size", "kv_parallel_size", "kv_rank"}
)
"""Fields of vLLM's kv_transfer_config that are accepted and ignored: an engine's id is new at each start, KV is read
without a buffer between, and workers have no numbers."""


def _one_of(value: object, name: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(allowed)}; got {value!r}")


@checked_fields()
@dataclass(frozen=True, kw_only=True, slots=True)
class SpeculativeConfig:
    """Settings of a drafter."""

    method: str
    num_speculative_tokens: int | None = None
    """Drafts per step and request; fewer are proposed near length limits. None means that the engine chooses at each
    step, from none to as many as the drafter was trained for."""
    draft_confidence: float | None = None
    """Drafts are verified only as long as their joint probability, by the drafter, is at least this; 0 verifies all.
    None means 0 where num_speculative_tokens is given; otherwise the engine chooses at each step."""
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
    lookup: bool | None = None
    """Whether drafts are also looked up, in the request's own text and in finished texts with the same cache salt. None
    means yes unless num_speculative_tokens or draft_confidence is given, which fix how much is drafted."""
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 4
    """Longest run of last tokens that n-gram look-up compares, where the number of drafts is fixed. Where the engine
    chooses, it compares up to 32 tokens, since a longer match is a surer one."""

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
        if self.lookup is not None and not isinstance(self.lookup, bool):
            raise ConfigError(f"speculative_config: lookup must be true or false, got {self.lookup!r}")
        if self.lookup and not self.chooses:
            raise ConfigError(
                "speculative_config: lookup needs an engine that chooses how much to draft; leave "
                "num_speculative_tokens and draft_confidence out, or lookup"
            )
        if self.pack_weights is not None and not isinstance(self.pack_weights, bool):
            raise ConfigError(f"speculative_config: pack_weights must be true or false, got {self.pack_weights!r}")
        if self.model is not None and not isinstance(self.model, str):
            raise ConfigError(f"speculative_config: model must be a name or a path, got {self.model!r}")
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ConfigError(
                f"speculative_config: prompt_lookup_min ({self.prompt_lookup_min}) must not exceed "
                f"prompt_lookup_max ({self.prompt_lookup_max})"
            )

    @property
    def chooses(self) -> bool:
        """Whether the engine chooses at each step how much is drafted and verified: nothing fixes it."""
        return self.num_speculative_tokens is None and self.draft_confidence is None

    @classmethod
    def of(cls, given: SpeculativeConfig | Mapping[str, Any] | None) -> SpeculativeConfig | None:
        """Returns the settings that a user gave as None, as a mapping with vLLM's field names, or as this class."""
        if given is None or isinstance(given, SpeculativeConfig):
            return given
        if not isinstance(given, Mapping):
            raise ConfigError(f"speculative_config must be a mapping such as {{'method': 'ngram'}}, got {given!r}")
        if "method" not in given and all(str(name) in cls.__slots__ for name in given):
            raise ConfigError("speculative_config has no method; name one, such as {'method': 'ngram'}")
        return cls(**{str(name): value for name, value in given.items()})


@checked_fields()
@dataclass(frozen=True, kw_only=True, slots=True)
class KVTransferConfig:
    """Settings of prefill/decode disaggregation, with vLLM's names where the meaning is the same."""

    kv_connector: str = "nixl"
    """What carries KV: nixl between processes and machines, local between engines of one process."""
    kv_role: str = "kv_both"
    """kv_producer computes prompts and hands their KV over, kv_consumer starts from such KV, kv_both does either."""
    kv_load_failure_policy: str = "recompute"
    """What becomes of a request whose KV does not arrive from its prefill worker: recompute computes the prompt on the
    decode worker, fail ends the request with an error."""
    kv_ip: str = "127.0.0.1"
    """Address at which other workers reach this one; it must belong to a private network, since KV travels
    unencrypted."""
    kv_port: int = 0
    """Port of control messages; 0 means any free port."""
    kv_transport: str = "auto"
    """How nixl moves bytes: cma (one machine, one user), tcp, or auto, which tries cma and falls back to tcp."""
    lease_s: float = 30.0
    """Time for which a prefill worker holds a prompt's KV for a decode worker that does not ask to prolong it."""
    held_share: float = 0.25
    """Largest share of each pool of pages that may be held for decode workers; beyond it, prompts are handed over
    without KV, and the decode worker computes them."""
    answer_limit_s: float = 5.0
    """Time in which a prefill worker must answer a question, which is asked twice."""
    read_limit_s: float = 20.0
    """Time in which all KV of a prompt must have arrived."""
    cluster_key: str | None = field(default=None, repr=False)
    """The secret that all workers of the cluster share."""

    def __post_init__(self) -> None:
        name = "kv_transfer_config"
        _one_of(self.kv_connector, f"{name}: kv_connector", KV_CONNECTORS)
        _one_of(self.kv_role, f"{name}: kv_role", KV_ROLES)
        _one_of(self.kv_load_failure_policy, f"{name}: kv_load_failure_policy", LOAD_FAILURE_POLICIES)
        _one_of(self.kv_transport, f"{name}: kv_transport", KV_TRANSPORTS)
        if not isinstance(self.kv_ip, str) or not self.kv_ip:
            raise ConfigError(f"{name}: kv_ip must be an address of this machine, got {self.kv_ip!r}")
        whole_number(self.kv_port, f"{name}: kv_port", at_least=0)
        if self.kv_port > 65535:
            raise ConfigError(f"{name}: kv_port must be at most 65535, got {self.kv_port}; 0 means any free port")
        for field_name, most in (("lease_s", 3600.0), ("answer_limit_s", 600.0), ("read_limit_s", 600.0)):
            _number_within(getattr(self, field_name), f"{name}: {field_name}", 0.0, most)
        _number_within(self.held_share, f"{name}: held_share", 0.0, 1.0)
        if self.cluster_key is not None and not isinstance(self.cluster_key, str):
            raise ConfigError(f"{name}: cluster_key must be text")

    @property
    def hands_over(self) -> bool:
        """Whether this worker computes prompts for others."""
        return self.kv_role != "kv_consumer"

    @property
    def fetches(self) -> bool:
        """Whether this worker starts from KV of others."""
        return self.kv_role != "kv_producer"

    @classmethod
    def of(cls, given: KVTransferConfig | Mapping[str, Any] | None) -> KVTransferConfig | None:
        """Returns the settings that a user gave as None, as a mapping with vLLM's field names, or as this class."""
        if given is None or isinstance(given, KVTransferConfig):
            return given
        if not isinstance(given, Mapping):
            # The value may hold the cluster key, so it is not repeated here.
            raise ConfigError(
                "kv_transfer_config must be a mapping such as {'kv_connector': 'nixl', 'kv_role': 'kv_both'}, got "
                f"{type(given).__name__}"
            )
        return cls(**_without_vllms_fields({str(name): value for name, value in given.items()}))


def _without_vllms_fields(given: dict[str, Any]) -> dict[str, Any]:
    """Returns settings as vLLM's users write them without the fields that make no difference here."""
    settings = {name: value for name, value in given.items() if name not in VLLM_FIELDS_WITHOUT_EFFECT}
    if settings.get("kv_connector") == "NixlConnector":
        settings["kv_connector"] = "nixl"
    extra = settings.pop("kv_connector_extra_config", None)
    if extra not in (None, {}, {"backends": ["UCX"]}):
        raise ConfigError(
            "kv_transfer_config: kv_connector_extra_config has no meaning here, where KV always moves over UCX; leave "
            "it out (kv_transport chooses between cma and tcp)"
        )
    if settings.pop("enable_permute_local_kv", None):
        raise ConfigError(
            "kv_transfer_config: enable_permute_local_kv is not available, since workers have one page layout; leave "
            "it out"
        )
    if settings.pop("kv_connector_module_path", None) is not None:
        raise ConfigError(
            "kv_transfer_config: kv_connector_module_path is not available: connectors of other packages cannot be "
            "loaded; leave it out, and use kv_connector nixl"
        )
    return settings


@checked_fields()
@dataclass(frozen=True, kw_only=True, slots=True)
class KVStoreConfig:
    """Settings of a store that workers share behind their KV caches, with Mooncake's names."""

    master_server_address: str
    """HOST:PORT of Mooncake's master."""
    local_hostname: str = "127.0.0.1"
    """Address at which other workers and nodes reach this one; it must belong to a private network."""
    metadata_server: str = "P2PHANDSHAKE"
    protocol: str = "tcp"
    device_name: str = ""
    """RDMA devices, where the protocol is rdma."""
    global_segment_size: int = 0
    """Bytes of this machine's memory that this worker lends to the store; they are lost when it ends."""
    local_buffer_size: int = 64 << 20
    replica_num: int = 1
    """On how many nodes each page is kept."""
    kv_retention: str | int = "dense"
    """What the store keeps of models with sliding-window layers, of what the KV cache keeps."""
    cluster_key: str | None = field(default=None, repr=False)
    """The secret that all workers share: pages are sealed under it."""

    def __post_init__(self) -> None:
        name = "kv_store_config"
        host, _, port = str(self.master_server_address).rpartition(":")
        if not isinstance(self.master_server_address, str) or not host or not port.isdecimal():
            raise ConfigError(
                f"{name}: master_server_address must be HOST:PORT of Mooncake's master, got "
                f"{self.master_server_address!r}"
            )
        for field_name in ("local_hostname", "metadata_server", "protocol"):
            if not isinstance(getattr(self, field_name), str) or not getattr(self, field_name):
                raise ConfigError(f"{name}: {field_name} must be text, got {getattr(self, field_name)!r}")
        if not isinstance(self.device_name, str):
            raise ConfigError(f"{name}: device_name must be text, got {self.device_name!r}")
        for field_name, least in (("global_segment_size", 0), ("local_buffer_size", 1 << 20), ("replica_num", 1)):
            whole_number(getattr(self, field_name), f"{name}: {field_name}", at_least=least)
        Retention.of(self.kv_retention)
        if self.cluster_key is not None and not isinstance(self.cluster_key, str):
            raise ConfigError(f"{name}: cluster_key must be text")

    @classmethod
    def of(cls, given: KVStoreConfig | Mapping[str, Any] | None) -> KVStoreConfig | None:
        """Returns the settings that a user gave as None, as a mapping, or as this class."""
        if given is None or isinstance(given, KVStoreConfig):
            return given
        if not isinstance(given, Mapping):
            # The value may hold the cluster key, so it is not repeated here.
            raise ConfigError(
                "kv_store_config must be a mapping such as {'master_server_address': '127.0.0.1:50051'}, got "
                f"{type(given).__name__}"
            )
        if "master_server_address" not in given:
            raise ConfigError("kv_store_config has no master_server_address; give HOST:PORT of Mooncake's master")
        return cls(**{str(name): value for name, value in given.items()})


def _number_within(value: object, name: str, low: float, high: float) -> None:
    """Refuse anything but a number in (low, high]."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not low < value <= high:
        raise ConfigError(f"{name} must be a number above {low:g} and at most {high:g}, got {value!r}")


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
    kv_offloading_size: float | None = None
    """Memory of the host, in GiB, behind the KV cache: pages are copied there as they are published, and copied back
    when a prompt needs one that was evicted. None or 0 means that there is none."""
    kv_offloading_retention: str | int = "dense"
    """What that memory keeps of models with sliding-window layers, of what the KV cache keeps: see kv_retention."""
    kv_store_config: KVStoreConfig | None = None
    """A store behind the KV cache that several workers share; None for none."""
    kv_transfer_config: KVTransferConfig | None = None
    """How this engine hands KV to others, or takes it from them; None for an engine that does neither."""
    kv_events_config: KVEventsConfig | None = None
    """How routers are told what the prefix cache holds; None if they are not."""
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
        Retention.of(self.kv_offloading_retention)
        if self.kv_offloading_size is not None and self.kv_offloading_size != 0:
            _number_within(self.kv_offloading_size, "kv_offloading_size (GiB)", 0.0, float(1 << 20))
        if self.kv_offloading_bytes and not self.enable_prefix_caching:
            raise ConfigError(
                "kv_offloading_size keeps pages of the prefix cache, which enable_prefix_caching turns off; leave one "
                "of them out"
            )
        if self.kv_store_config is not None and not isinstance(self.kv_store_config, KVStoreConfig):
            raise ConfigError("kv_store_config must be a KVStoreConfig; use KVStoreConfig.of for a mapping")
        if self.kv_store_config is not None and not self.enable_prefix_caching:
            raise ConfigError(
                "kv_store_config keeps pages of the prefix cache, which enable_prefix_caching turns off; leave one of "
                "them out"
            )
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
        if self.kv_transfer_config is not None and not isinstance(self.kv_transfer_config, KVTransferConfig):
            raise ConfigError("kv_transfer_config must be a KVTransferConfig; use KVTransferConfig.of for a mapping")
        if self.kv_events_config is not None and not isinstance(self.kv_events_config, KVEventsConfig):
            raise ConfigError("kv_events_config must be a KVEventsConfig; use KVEventsConfig.of for a mapping")
        if self.kv_events_config is not None and self.kv_events_config.publishes and not self.enable_prefix_caching:
            raise ConfigError(
                "kv_events_config: there are no events without a prefix cache; leave it out, or turn prefix caching on"
            )

    @property
    def kv_offloading_bytes(self) -> int:
        """Memory of the host behind the KV cache; 0 if there is none."""
        return int((self.kv_offloading_size or 0) * (1 << 30))
