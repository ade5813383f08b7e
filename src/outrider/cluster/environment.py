"""How the processes of a cluster find each other, in the words of Dynamo's environment variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

LOOPBACK = "127.0.0.1"


def one_machine(directory: Path, *, host: str = LOOPBACK) -> dict[str, str]:
    """Returns the variables for a cluster on one machine, which needs neither etcd nor NATS: its members are files in a
    directory."""
    return {
        "DYN_DISCOVERY_BACKEND": "file",
        "DYN_FILE_KV": str(directory),
        "DYN_REQUEST_PLANE": "tcp",
        "DYN_EVENT_PLANE": "zmq",
        "DYN_TCP_RPC_HOST": host,
        "DYN_TCP_RESPONSE_STREAM_HOST": host,
        "DYN_EVENT_PLANE_HOST": host,
        "DYN_SYSTEM_HOST": host,
        "HF_HUB_OFFLINE": "1",
    }


def setting(name: str, default: str, environment: Mapping[str, str] = os.environ) -> str:
    return environment.get(name) or default
