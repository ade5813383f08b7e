"""The kernels for processors with half the lanes or without VNNI, run by the same tests on this processor."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.backends.cpu.kernels.vector import LANES, PAIRS_ADDED

FEATURES = "+avx,+avx2,+fma,+f16c,+sse4.2,+popcnt,+bmi,+bmi2,+lzcnt,+movbe,+cx16"
WITHOUT = "-avx512f,-avx512bw,-avx512vl,-avx512dq"
# Naming an older processor is not enough: Numba would keep the features of this one.
OLDER = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": f"{FEATURES},{WITHOUT}"}
FIRST_WIDE = {
    "NUMBA_CPU_NAME": "skylake-avx512",
    "NUMBA_CPU_FEATURES": f"{FEATURES},{WITHOUT.replace('-', '+')},-avx512vnni",
}


def run_as_on(processor: dict[str, str], files: list[str], *, check: str) -> None:
    environment = os.environ | processor
    subprocess.run(
        [sys.executable, "-c", f"from outrider.backends.cpu.kernels.vector import LANES, PAIRS_ADDED; assert {check}"],
        env=environment,
        check=True,
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command += [str(Path(__file__).with_name(name)) for name in files]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.skipif(LANES == 8, reason="all other tests run with 8 lanes here")
def test_kernels_are_right_with_eight_lanes() -> None:
    files = ["test_argmax.py", "test_coarse.py", "test_packed.py", "test_program.py"]
    run_as_on(OLDER, files, check="LANES == 8 and not PAIRS_ADDED")


@pytest.mark.skipif(not PAIRS_ADDED or LANES == 8, reason="all other tests run without VNNI here")
def test_packed_products_are_the_same_without_vnni() -> None:
    run_as_on(FIRST_WIDE, ["test_coarse.py", "test_packed.py"], check="LANES == 16 and not PAIRS_ADDED")
