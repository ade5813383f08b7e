"""The options of `outrider serve` for prefill/decode disaggregation, and vLLM's configurations pasted into them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.cli.cli import Outrider

from outrider.cli.transfer_options import CLUSTER_KEY_VARIABLE, TransferOptions
from outrider.config import KVTransferConfig
from outrider.errors import ConfigError

KEY = "a key of more than sixteen characters"


def options(given: object, *, key: str | None = KEY) -> TransferOptions:
    return TransferOptions(
        kv_transfer_config=given if isinstance(given, str | None) else json.dumps(given), cluster_key=key
    )


@pytest.mark.parametrize(
    "pasted",
    [
        {"kv_connector": "NixlConnector", "kv_role": "kv_both"},
        {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cuda"},
        {
            "kv_connector": "NixlConnector",
            "kv_role": "kv_both",
            "engine_id": "prefill-0",
            "kv_rank": 0,
            "kv_parallel_size": 2,
            "kv_buffer_size": 5e9,
            "kv_connector_extra_config": {},
            "kv_connector_module_path": None,
            "enable_permute_local_kv": False,
        },
        {"kv_connector": "nixl", "kv_role": "kv_both", "kv_connector_extra_config": {"backends": ["UCX"]}},
    ],
)
def test_what_vllms_users_paste_is_taken(pasted: dict[str, Any]) -> None:
    assert (
        options(pasted).config()
        == KVTransferConfig(cluster_key=KEY)
        == KVTransferConfig.of(pasted | {"cluster_key": KEY})
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}, "nixl, local"),
        ({"kv_role": "prefill"}, "kv_producer, kv_consumer, kv_both"),
        ({"kv_load_failure_policy": "retry"}, "recompute, fail"),
        ({"kv_connector_extra_config": {"backends": ["GDS"]}}, "UCX"),
        ({"enable_permute_local_kv": True}, "leave it out"),
        ({"kv_connector_module_path": "my.module"}, "kv_connector nixl"),
        ({"kv_connector": "local"}, "use kv_connector nixl"),
        ({"kv_roll": "kv_both"}, "did you mean 'kv_role'"),
        ({"cluster_key": KEY}, "--cluster-key @FILE"),
        ("{", "not valid JSON"),
        ("[]", "JSON object"),
    ],
)
def test_what_has_no_meaning_here_is_refused_by_name(given: object, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        options(given).config()
    assert KEY not in str(caught.value)


def test_the_key_comes_from_a_file_the_environment_or_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(CLUSTER_KEY_VARIABLE, raising=False)
    path = tmp_path / "key"
    path.write_text(f"# a comment\n\n{KEY}\n", encoding="utf-8")
    assert options({}, key=f"@{path}").config() == options({}).config() == KVTransferConfig(cluster_key=KEY)
    with pytest.raises(ConfigError, match="--cluster-key @FILE"):
        options({}, key=None).config()
    monkeypatch.setenv(CLUSTER_KEY_VARIABLE, KEY)
    assert options({}, key=None).config() == KVTransferConfig(cluster_key=KEY)
    # The variable alone makes no worker: it may be set for all servers of a machine.
    assert options(None, key=None).config() is None


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot read the cluster key"),
        ("", "it has 0"),
        (f"{KEY}\n{KEY}", "it has 2"),
        ("short", "16 characters"),
    ],
)
def test_a_key_that_is_none_is_refused_without_being_shown(tmp_path: Path, content: str | None, said: str) -> None:
    path = tmp_path / "key"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=said) as caught:
        options({}, key=f"@{path}").config()
    assert KEY not in str(caught.value)
    assert "short" not in str(caught.value)


def test_the_command_line_says_what_is_missing(outrider: Outrider) -> None:
    done = outrider("serve", "--kv-transfer-config", '{"kv_role": "kv_producer"}')
    assert done.status != 0
    assert "--cluster-key @FILE" in done.err
    done = outrider("serve", "--cluster-key", KEY)
    assert done.status != 0
    assert "--kv-transfer-config" in done.err
    assert KEY not in done.err
