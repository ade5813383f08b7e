"""Findings about the machine and the libraries. Nothing here needs a working library: a broken one is a finding."""

from __future__ import annotations

import importlib
import os
import platform
import re
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType

from outrider import __version__
from outrider.tools.bench.busy import usable_cores
from outrider.tools.doctor.findings import Finding, Status, bytes_text

OLDEST_PYTHON = (3, 11)
LITTLE_MEMORY_BYTES = 2 << 30
FEATURES = ("avx2", "fma", "f16c", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8", "neon", "sve")
REQUIRED = ("torch", "tokenizers", "numpy")
OPTIONAL = {
    "numba": "fast CPU kernels need it: pip install numba",
    "transformers": "`outrider bench decode` compares with it: pip install 'outrider[reference]'",
    "huggingface_hub": "models by hub id need it: pip install 'outrider[hub]'",
}


def look_at_environment() -> list[Finding]:
    findings = [Finding("outrider", __version__), _python()]
    findings += [_library(name, f"pip install {name}", Status.PROBLEM) for name in REQUIRED]
    findings += [_library(name, advice, Status.NOTE) for name, advice in OPTIONAL.items()]
    findings += [_cpu(), _cores(), _memory(), _gpu()]
    return findings


def _python() -> Finding:
    old = sys.version_info < OLDEST_PYTHON
    return Finding(
        "Python",
        f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        Status.PROBLEM if old else Status.OK,
        "use Python 3.11 or newer" if old else None,
    )


def _library(name: str, advice: str, missing: Status) -> Finding:
    try:
        number = version(name)
    except PackageNotFoundError:
        return Finding(name, "not installed", missing, advice)
    # Only the version of other libraries is read: importing them all would take seconds.
    if name in (*REQUIRED, "numba"):
        try:
            importlib.import_module(name)
        except Exception as problem:
            reason = (str(problem).strip().splitlines() or [type(problem).__name__])[0]
            return Finding(name, f"{number}, but it cannot be imported: {reason}", missing, f"reinstall it: {advice}")
    return Finding(name, number)


def _cpu() -> Finding:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return Finding("CPU", platform.processor() or platform.machine())
    name = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    known = set(flags[1].split()) if flags else set()
    features = [feature for feature in FEATURES if feature in known]
    return Finding("CPU", f"{name[1] if name else platform.machine()} ({', '.join(features) or 'no known extensions'})")


def _cores() -> Finding:
    usable = usable_cores()
    limit = os.environ.get("OMP_NUM_THREADS")
    text = f"{usable} usable of {os.cpu_count()}"
    if limit is not None and limit.isdigit() and int(limit) < usable:
        return Finding(
            "cores", f"{text}; OMP_NUM_THREADS is {limit}", Status.NOTE, "unset OMP_NUM_THREADS, or set --num-threads"
        )
    return Finding("cores", text)


def _memory() -> Finding:
    page = os.sysconf("SC_PAGE_SIZE")
    total = os.sysconf("SC_PHYS_PAGES") * page
    free = _available_bytes() or os.sysconf("SC_AVPHYS_PAGES") * page
    little = free < LITTLE_MEMORY_BYTES
    return Finding(
        "memory",
        f"{bytes_text(free)} available of {bytes_text(total)}",
        Status.NOTE if little else Status.OK,
        "lower --kv-cache-memory-bytes or --max-model-len" if little else None,
    )


def _available_bytes() -> int | None:
    """Returns Linux's estimate of available memory, which counts what it could free at once."""
    try:
        found = re.search(r"^MemAvailable:\s*(\d+) kB", Path("/proc/meminfo").read_text(encoding="ascii"), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None


def _gpu() -> Finding:
    torch: ModuleType | None = sys.modules.get("torch")
    if torch is None:
        return Finding("GPU", "unknown without torch")
    if not torch.cuda.is_available():
        return Finding("GPU", "none that PyTorch can use; models run on the CPU")
    names = [
        f"{torch.cuda.get_device_name(number)}, {bytes_text(torch.cuda.get_device_properties(number).total_memory)}"
        for number in range(torch.cuda.device_count())
    ]
    return Finding("GPU", "; ".join(names))
