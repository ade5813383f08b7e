"""Agents of NVIDIA's NIXL: the only place that calls it.

An agent belongs to the thread that made it. Nothing that a peer sends is unpickled: its metadata is read by NIXL's own
C++ parser, and comes from members of the cluster only.
"""

from __future__ import annotations

import gc
import importlib
import logging
import os
import sys
from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np

from outrider.errors import ConfigError, TransferError
from outrider.transfer.links.memory import ArenaMemory, Spans

BACKEND = "UCX"
MODULES = ("nixl_cu12._api", "nixl_cu13._api")
"""NIXL's packages, by the CUDA they are made for; either moves ordinary memory without CUDA. The package called nixl
only chooses between them, and imports torch to do so."""
UCX_LOGGING = {"UCX_LOG_LEVEL": "error", "UCX_LOG_FILE": "stderr"}
MISSING = (
    "kv_connector nixl needs NIXL: pip install 'outrider[pd]'; where PyTorch is in place already, "
    "pip install --no-deps nixl-cu12==1.5.1 adds nothing else"
)


@cache
def load_nixl() -> ModuleType:
    """Returns NIXL's module, with its plugins loaded. Raises ConfigError if it is not installed."""
    nixl = _imported()
    # UCX reads these when it is loaded, with NIXL's first agent. It reports each request of a destroyed agent as a
    # warning, thousands of lines for one fence, and it writes to standard output, which belongs to the user.
    before = {name: os.environ.get(name) for name in UCX_LOGGING}
    for name, value in UCX_LOGGING.items():
        os.environ.setdefault(name, value)
    try:
        # The first agent of a process takes about half a second, which would otherwise be that of the first request.
        Agent(nixl, "outrider first", device="lo", with_cma=False).destroy()
    except Exception as error:
        raise ConfigError(f"NIXL is installed, but cannot be used ({error}); {MISSING}") from error
    finally:
        for name, value_before in before.items():
            if value_before is None:
                del os.environ[name]
    return nixl


def _imported() -> ModuleType:
    raise_exceptions = logging.raiseExceptions
    for name in MODULES:
        try:
            module = importlib.import_module(name)
        except ImportError as error:
            # Something that the package needs may be missing, rather than the package.
            if error.name not in (name, name.partition(".")[0]):
                raise ConfigError(f"NIXL is installed, but cannot be loaded ({error}); {MISSING}") from error
            continue
        # NIXL logs every agent to standard output, which belongs to the user, and mutes errors of all logging.
        logging.raiseExceptions = raise_exceptions
        logger = logging.getLogger("nixl")
        logger.handlers.clear()
        logger.propagate = True
        if not os.environ.get("NIXL_LOG_LEVEL"):
            logger.setLevel(logging.WARNING)
        return module
    raise ConfigError(MISSING)


class Agent:
    """One NIXL agent with the memory that is registered with it."""

    def __init__(self, nixl: ModuleType, name: str, *, device: str, with_cma: bool) -> None:
        """`with_cma`: let UCX read the memory of processes on this machine, which must be allowed for all its peers."""
        self._nixl = nixl
        self._agent: Any = nixl.nixl_agent(name, nixl.nixl_agent_config(enable_prog_thread=False, backends=[]))
        # Of all transports, those with error handling are cma and, on the given device, tcp. The list "cma,tcp" cannot
        # be written here, and environment variables would change under threads that read them.
        transports = "all" if with_cma else "tcp"
        options = {
            "ucx_error_handling_mode": "peer",
            "num_workers": "1",
            "engine_config": f"TLS={transports},NET_DEVICES={device}",
        }
        self._agent.create_backend(BACKEND, options)

    def register(self, arenas: Sequence[ArenaMemory]) -> None:
        """Open these arenas to transfers."""
        table = np.array([(arena.base, arena.total_bytes, 0) for arena in arenas], dtype=np.uint64)
        self._agent.register_memory(table.reshape(-1, 3), "DRAM", backends=[BACKEND])

    @property
    def metadata(self) -> bytes:
        """What a peer's agent must know to read the registered memory."""
        metadata = self._agent.get_agent_metadata()
        assert isinstance(metadata, bytes)
        return metadata

    def add_remote(self, metadata: bytes) -> str:
        """Returns the name of the agent that the metadata is of, which can be read from now."""
        name = self._agent.add_remote_agent(metadata)
        return name.decode() if isinstance(name, bytes) else str(name)

    def progress(self) -> None:
        """Let UCX do what peers wait for: connecting to them, and answering reads over tcp."""
        self._agent.get_new_notifs()

    def start_read(self, remote: str, spans: Spans) -> tuple[Any, bool]:
        """Returns the handle of a read, and whether it has ended already. Raises TransferError if it cannot start."""
        try:
            handle = self._agent.initialize_xfer(
                "READ",
                self._descriptors(spans.destinations, spans.lengths),
                self._descriptors(spans.sources, spans.lengths),
                remote,
                b"",
                backends=[BACKEND],
            )
        except Exception as error:
            raise TransferError(f"NIXL refuses to read these addresses: {error}") from error
        return handle, self._is_done(self._agent.transfer(handle))

    def is_done(self, handle: Any) -> bool:
        """Whether a read has ended with all of its bytes. Raises if it has failed."""
        return self._is_done(self._agent.check_xfer_state(handle))

    def _is_done(self, state: str) -> bool:
        if state == "ERR":
            raise TransferError("NIXL reports an error")
        return state == "DONE"

    def _descriptors(self, addresses: Any, lengths: Any) -> Any:
        table = np.zeros((len(addresses), 3), dtype=np.uint64)
        table[:, 0], table[:, 1] = addresses, lengths
        return self._agent.get_xfer_descs(table, "DRAM")

    def destroy(self) -> None:
        """Destroy the agent, so that none of its reads writes any more. The caller has dropped all handles.

        Releasing a handle does not stop its read, and neither does removing the remote agent: only the destructor does.
        It runs when the last reference goes, so this makes sure that it goes. Raises TransferError if it did not.
        """
        wrapper, self._agent = self._agent, None
        if wrapper is None:
            return
        core = wrapper.agent
        del wrapper
        # One reference is ours and one is the argument's; the agent's own wrapper has gone.
        if sys.getrefcount(core) > 2:
            gc.collect()
        if (references := sys.getrefcount(core) - 2) > 0:
            raise TransferError(f"a NIXL agent is still in use in {references} place(s), and may go on writing")
