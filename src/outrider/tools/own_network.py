"""Runs a program where nothing outside can reach it, and it can reach nothing: in a network namespace of its own.

Some libraries listen on all interfaces whatever they are told.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence

from outrider.errors import ConfigError

MARK = "OUTRIDER_OWN_NETWORK"
LOOPBACK_UP = 'ip link set lo up && exec "$@"'


def in_own_network(command: Sequence[str]) -> list[str]:
    """Returns a command that runs another one in a network namespace; raises ConfigError where that is not allowed."""
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        raise ConfigError("a network of its own needs the programs unshare and ip; install util-linux and iproute2")
    # As root no user namespace is needed, and in some containers there is none to be had.
    for options in (["--net"], ["--net", "--map-root-user"]):
        prefix = ["unshare", *options, "sh", "-c", LOOPBACK_UP, "sh"]
        if subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode == 0:
            return [*prefix, "env", f"{MARK}=1", *command]
    raise ConfigError(
        "this user may not make a network namespace (unshare --net); run as root, or allow user namespaces"
    )


def is_own_network() -> bool:
    """Whether this process was started by such a command."""
    return MARK in os.environ
