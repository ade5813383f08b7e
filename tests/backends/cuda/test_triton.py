"""The GPU's kernels on Triton's interpreter, in a process of its own: Triton chooses its interpreter when imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TRITON = os.environ.get("OUTRIDER_TEST_TRITON")


NEEDS_TRITON = pytest.mark.skipif(
    TRITON is None, reason="needs Triton beside the environment: scripts/test installs it"
)
ROOT = Path(__file__).parents[3]
HERE = "tests/backends/cuda"
INTERPRETED = {
    "kernels": [f"{HERE}/triton_kernels.py"],
    "attention": [f"{HERE}/triton_attention.py"],
    "layers": [f"{HERE}/triton_layers.py"],
    "graphs": [f"{HERE}/triton_graphs.py"],
    "engine": [f"{HERE}/triton_engine.py"],
    "contract": ["tests/backends/test_contract.py", "-k", "cuda-interpreted"],
}


def pytest_with_triton(*arguments: str, interpret: bool) -> None:
    assert TRITON is not None
    path = os.pathsep.join(filter(None, (TRITON, os.environ.get("PYTHONPATH"))))
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *arguments],
        cwd=ROOT,
        env=environment | {"PYTHONPATH": path} | ({"TRITON_INTERPRET": "1"} if interpret else {}),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@NEEDS_TRITON
@pytest.mark.parametrize("tests", INTERPRETED.values(), ids=INTERPRETED)
def test_the_kernels_of_the_gpu_on_the_interpreter(tests: list[str]) -> None:
    pytest_with_triton(*tests, interpret=True)


@NEEDS_TRITON
def test_the_kernels_of_the_gpu_compiled_for_one() -> None:
    pytest_with_triton(f"{HERE}/triton_compiled.py", interpret=False)
