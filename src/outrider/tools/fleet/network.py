"""A network of the process's own, since Dynamo's event plane listens on all interfaces whatever it is told."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import struct
import subprocess
import sys

from outrider.errors import ConfigError

INSIDE = "OUTRIDER_OWN_NETWORK"
IFF_UP, SIOCSIFFLAGS = 1, 0x8914


def enter_own_network(*arguments: str) -> None:
    """Run this program again in a network namespace that has nothing but a loopback interface, and exit with its
    status; return at once if it is there already. `arguments` are those of `python`."""
    if os.environ.get(INSIDE):
        with socket.socket() as any_socket:
            fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", IFF_UP))
        return
    unshare = shutil.which("unshare")
    flags = ["-n"] if os.geteuid() == 0 else ["-r", "-n"]
    if unshare is None or subprocess.run([unshare, *flags, "true"], capture_output=True).returncode:
        raise ConfigError(
            "a network namespace is needed, since Dynamo listens on all interfaces, and cannot be made here: install "
            f"util-linux and allow user namespaces, or set {INSIDE}=1 on a machine that no stranger reaches"
        )
    os.environ[INSIDE] = "1"
    os.execv(unshare, [unshare, *flags, sys.executable, *arguments])
