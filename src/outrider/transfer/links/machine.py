"""What two workers must know about their machines: whether one can read the other's memory, and which network device
an address belongs to."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import secrets
import socket
import struct
from hashlib import blake2b
from ipaddress import AddressValueError, IPv4Address
from pathlib import Path

import msgspec

from outrider.errors import ConfigError

NONCE_BYTES = 32
OTHER_CONTAINER = "the two run in different containers, which do not see each other's processes; share a PID namespace"
_SIOCGIFCONF = 0x8912
_INTERFACE_BYTES = 40
"""Size of a `struct ifreq` on 64-bit Linux: a name of 16 bytes, then a socket address."""
_INTERFACES_MAX = 512


class MemoryProbe(msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """Names a few random bytes in the memory of a process, and their digest. A process that finds such bytes there can
    read the memory of this process, and not of another one that happens to have its number."""

    boot: str
    process: int
    address: int
    digest: bytes


class ProbedMemory:
    """The random bytes that `MemoryProbe` names, kept in place while peers may look at them."""

    def __init__(self) -> None:
        self._nonce = ctypes.create_string_buffer(secrets.token_bytes(NONCE_BYTES), NONCE_BYTES)
        self.probe = MemoryProbe(
            boot=_boot_id(),
            process=os.getpid(),
            address=ctypes.addressof(self._nonce),
            digest=_digest(self._nonce.raw),
        )


def can_read_memory(probe: MemoryProbe) -> bool:
    """Whether this process may read the memory of the process that made the probe."""
    return memory_obstacle(probe) is None


def memory_obstacle(probe: MemoryProbe) -> str | None:
    """Returns why this process may not read the memory of the process that made the probe; None if it may."""
    if probe.boot != _boot_id():
        return "it runs on another machine"
    if not (0 < probe.process < 1 << 31) or not (0 < probe.address < 1 << 63):
        return "it names no place in memory"
    found = _read_process_memory(probe.process, probe.address, NONCE_BYTES)
    if isinstance(found, bytes):
        # Another process may have its number here.
        return None if _digest(found) == probe.digest else OTHER_CONTAINER
    if found in (errno.ESRCH, errno.EFAULT):
        return OTHER_CONTAINER
    if found == errno.EPERM:
        return (
            "the system does not let this process read the memory of that one: run both as one user, and allow ptrace "
            "(kernel.yama.ptrace_scope 0; in containers the capability SYS_PTRACE)"
        )
    return f"process_vm_readv fails: {os.strerror(found)}"


class _IOVector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def _read_process_memory(process: int, address: int, num_bytes: int) -> bytes | int:
    """Returns bytes of another process, or the number of the error that keeps this process from reading them."""
    try:
        call = ctypes.CDLL(None, use_errno=True).process_vm_readv
    except AttributeError:
        return errno.ENOSYS
    buffer = ctypes.create_string_buffer(num_bytes)
    here, there = _IOVector(ctypes.addressof(buffer), num_bytes), _IOVector(address, num_bytes)
    call.restype = ctypes.c_ssize_t
    vectors = ctypes.POINTER(_IOVector)
    call.argtypes = [ctypes.c_int, vectors, ctypes.c_ulong, vectors, ctypes.c_ulong, ctypes.c_ulong]
    done = call(process, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
    if done == num_bytes:
        return buffer.raw
    return ctypes.get_errno() if done < 0 else errno.EFAULT


def _digest(nonce: bytes) -> bytes:
    return blake2b(nonce, digest_size=NONCE_BYTES).digest()


def _boot_id() -> str:
    """Returns an id of this start of this machine's kernel."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return f"host {socket.gethostname()}"


def checked_address(host: str) -> str:
    """Returns the IPv4 address of a host name or address that peers can reach. Raises ConfigError otherwise."""
    try:
        address = IPv4Address(socket.gethostbyname(host))
    except (OSError, AddressValueError, UnicodeError) as error:
        raise ConfigError(f"kv_ip: {host!r} is no IPv4 address of this machine ({error})") from error
    if address.is_unspecified or address.is_multicast:
        raise ConfigError(f"kv_ip: {host} is not an address that peers can reach; name one address of this machine")
    return str(address)


def network_device(address: str) -> str:
    """Returns the name of the network device that has this IPv4 address. Raises ConfigError if there is none."""
    if IPv4Address(address).is_loopback:
        return "lo"
    buffer = ctypes.create_string_buffer(_INTERFACES_MAX * _INTERFACE_BYTES)
    request = struct.pack("iP", len(buffer), ctypes.addressof(buffer))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        filled, _ = struct.unpack("iP", fcntl.ioctl(probe, _SIOCGIFCONF, request))
    for start in range(0, filled, _INTERFACE_BYTES):
        entry = buffer.raw[start : start + _INTERFACE_BYTES]
        if socket.inet_ntoa(entry[20:24]) == address:
            # An alias such as eth0:1 is an address of the device eth0.
            return entry[:16].partition(b"\0")[0].decode().partition(":")[0]
    raise ConfigError(f"kv_ip: no network device of this machine has the address {address}")
