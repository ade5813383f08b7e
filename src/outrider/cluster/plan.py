"""What a cluster on one machine consists of: the settings of `outrider cluster`, from flags or a YAML file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outrider.cluster.settings import Role
from outrider.errors import ConfigError
from outrider.kv.checked import checked_fields, whole_number

ROUTERS = ("kv", "round-robin", "random", "power-of-two", "least-loaded")
MOST_WORKERS = 64
EXAMPLE = "{prefill: 2, decode: 2, port: 8000, worker: {kv_cache_memory_bytes: 1G}}"


@checked_fields()
@dataclass(frozen=True, kw_only=True)
class ClusterPlan:
    model: str | None = None
    """None for the default model."""
    served_model_name: str | None = None
    replicas: int = 0
    """Number of workers that compute prompts and write answers."""
    prefill: int = 0
    decode: int = 0
    host: str = "127.0.0.1"
    port: int = 8000
    router: str = "kv"
    """How the front end chooses a worker; kv takes the one that has most of a prompt cached, and counts its load."""
    migration_limit: int = 3
    """How often a request may go on with another worker when its own is lost."""
    namespace: str = "outrider"
    worker: Mapping[str, Any] = field(default_factory=dict)
    """Options of `outrider worker` for all workers, without the dashes: {num_threads: 1}."""
    prefill_worker: Mapping[str, Any] = field(default_factory=dict)
    """Options for prefill workers alone."""
    decode_worker: Mapping[str, Any] = field(default_factory=dict)
    frontend: Mapping[str, Any] = field(default_factory=dict)
    """Further options of Dynamo's front end."""
    restart_first_s: float = 0.5
    """Wait before a process that died is started again; it doubles each time."""
    restart_most_s: float = 30.0
    drain_s: float = 30.0
    """Time in which running requests may finish when the cluster ends."""

    def __post_init__(self) -> None:
        for name in ("replicas", "prefill", "decode", "migration_limit"):
            whole_number(getattr(self, name), f"cluster: {name}", at_least=0)
        whole_number(self.port, "cluster: port", at_least=1)
        if self.router not in ROUTERS:
            raise ConfigError(f"cluster: router must be one of {', '.join(ROUTERS)}; got {self.router!r}")
        for name in ("restart_first_s", "restart_most_s", "drain_s"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
                raise ConfigError(f"cluster: {name} must be a number of seconds above 0, got {value!r}")
        for name in ("worker", "prefill_worker", "decode_worker", "frontend"):
            if not isinstance(getattr(self, name), Mapping):
                raise ConfigError(f"cluster: {name} must be options such as {{num_threads: 1}}")
        if self.replicas and (self.prefill or self.decode):
            raise ConfigError("cluster: give replicas, or prefill and decode, not both")
        if bool(self.prefill) != bool(self.decode):
            raise ConfigError("cluster: prefill and decode workers need each other; give a number of both")
        if not 0 < len(self.roles) <= MOST_WORKERS:
            raise ConfigError(
                f"cluster: give 1 to {MOST_WORKERS} workers: --replicas N, or --prefill N --decode N, or a file that "
                f"holds {EXAMPLE}"
            )

    @property
    def roles(self) -> tuple[Role, ...]:
        """The role of each worker."""
        return (
            *(Role.AGGREGATED,) * self.replicas,
            *(Role.PREFILL,) * self.prefill,
            *(Role.DECODE,) * self.decode,
        )

    def options(self, role: Role) -> dict[str, Any]:
        """Returns the options of the workers of a role."""
        own = {Role.PREFILL: self.prefill_worker, Role.DECODE: self.decode_worker}.get(role, {})
        return {**self.worker, **own}

    @classmethod
    def read(cls, path: Path, **given: Any) -> ClusterPlan:
        """Returns the plan in a YAML file, changed by what was given beside it."""
        import yaml

        try:
            value = yaml.safe_load(path.read_text(encoding="utf-8"))
        except OSError as problem:
            raise ConfigError(f"cannot read {path}: {problem.strerror or problem}") from None
        except (yaml.YAMLError, UnicodeDecodeError) as problem:
            what = " ".join(str(problem).split())
            raise ConfigError(f"{path} is not valid YAML ({what}); it should hold {EXAMPLE}") from None
        if not isinstance(value, Mapping):
            raise ConfigError(f"{path} must hold settings such as {EXAMPLE}")
        return cls(**{**{str(name): each for name, each in value.items()}, **given})


def as_flags(options: Mapping[str, Any]) -> list[str]:
    """Returns options as a command line: true is a flag alone, false leaves it out, a list repeats it."""
    flags: list[str] = []
    for name, value in options.items():
        flag = "--" + str(name).replace("_", "-")
        if value is True:
            flags.append(flag)
        elif value is False or value is None:
            continue
        else:
            for each in value if isinstance(value, list) else [value]:
                flags += [flag, str(each)]
    return flags
