"""The GPU's kernels on Triton's interpreter, in a process of its own: Triton chooses its interpreter when imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TRITON = os.environ.get("OUTRIDER_TEST_TRITON")


@pytest.mark.skipif(TRITON is None, reason="needs Triton beside the environment: scripts/test installs it")
def test_the_kernels_of_the_gpu_on_the_interpreter() -> None:
    assert TRITON is not None
    path = os.pathsep.join(filter(None, (TRITON, os.environ.get("PYTHONPATH"))))
    tests = Path(__file__).with_name("triton_kernels.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", str(tests)],
        cwd=Path(__file__).parents[3],
        env=os.environ | {"PYTHONPATH": path, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
