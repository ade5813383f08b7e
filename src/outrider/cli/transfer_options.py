"""Options of `outrider serve` for prefill/decode disaggregation. Names and meanings are those of `KVTransferConfig`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from outrider.cli.grouped import panel
from outrider.config import KVStoreConfig, KVTransferConfig
from outrider.errors import ConfigError
from outrider.transfer.tickets import ClusterKey

transfer_option = panel("Prefill/decode disaggregation")
CLUSTER_KEY_VARIABLE = "OUTRIDER_CLUSTER_KEY"
STORE_EXAMPLE = '{"master_server_address": "127.0.0.1:50051"}'
TRANSFER_EXAMPLE = '{"kv_connector": "nixl", "kv_role": "kv_producer"}'


@dataclass(frozen=True, kw_only=True)
class TransferOptions:
    kv_transfer_config: Annotated[
        str | None,
        transfer_option(
            help=f"Hand KV to other workers, or take it from them, as JSON: '{TRANSFER_EXAMPLE}'. kv_role is "
            "kv_producer (prefill), kv_consumer (decode) or kv_both; kv_load_failure_policy is recompute or fail. "
            "Needs the extra 'pd' and a cluster key.",
            metavar="JSON",
        ),
    ] = None
    kv_store_config: Annotated[
        str | None,
        transfer_option(
            help=f"Keep pages of the KV cache in a Mooncake Store that workers share, as JSON: '{STORE_EXAMPLE}'. "
            "Needs the extra 'store' and a cluster key.",
            metavar="JSON",
        ),
    ] = None
    cluster_key: Annotated[
        str | None,
        transfer_option(
            help="The secret that all workers share. @FILE reads it from a file, and the variable "
            f"{CLUSTER_KEY_VARIABLE} may hold it; a key on the command line is visible to every user of the machine.",
            metavar="KEY",
        ),
    ] = None

    def config(self) -> KVTransferConfig | None:
        """Returns the settings; None for a server without other workers. No error shows the key."""
        if self.kv_transfer_config is None:
            if self.cluster_key is not None and self.kv_store_config is None:
                raise ConfigError(
                    f"--cluster-key is for workers that exchange KV; add --kv-transfer-config '{TRANSFER_EXAMPLE}' or "
                    f"--kv-store-config '{STORE_EXAMPLE}', or leave it out"
                )
            return None
        settings = _settings(self.kv_transfer_config, "--kv-transfer-config", TRANSFER_EXAMPLE)
        key = self._required_key()
        config = KVTransferConfig.of({**settings, "cluster_key": key})
        assert config is not None
        if config.kv_connector == "local":
            raise ConfigError(
                "kv_connector local connects engines of one process, and a server has one; use kv_connector nixl"
            )
        return config

    def store(self) -> KVStoreConfig | None:
        """Returns the settings of the store behind the KV cache; None for a server without one."""
        if self.kv_store_config is None:
            return None
        settings = _settings(self.kv_store_config, "--kv-store-config", STORE_EXAMPLE)
        return KVStoreConfig.of({**settings, "cluster_key": self._required_key()})

    def _required_key(self) -> str:
        key = self._key()
        if key is None:
            raise ConfigError(
                "KV is exchanged under a key that all workers of the cluster share: write one to a file with "
                "python3 -c 'import secrets; print(secrets.token_urlsafe(32))' and give --cluster-key @FILE"
            )
        ClusterKey(key)  # refuses one that is too short
        return key

    def _key(self) -> str | None:
        if self.cluster_key is None:
            return os.environ.get(CLUSTER_KEY_VARIABLE) or None
        return _key_in_file(self.cluster_key[1:]) if self.cluster_key.startswith("@") else self.cluster_key


def _settings(text: str, option: str, example: str) -> Mapping[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise ConfigError(f"{option} is not valid JSON ({problem}); write '{example}'") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{option} must be a JSON object such as '{example}'")
    if "cluster_key" in value:
        raise ConfigError(f"{option}: the key does not belong into the JSON; give --cluster-key @FILE")
    return value


def _key_in_file(path: str) -> str:
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as problem:
        raise ConfigError(f"cannot read the cluster key in {path}: {problem.strerror or problem}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not a cluster key: a key is text") from None
    keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if len(keys) != 1:
        raise ConfigError(f"{path} must hold one line, the cluster key; it has {len(keys)}")
    return keys[0]
