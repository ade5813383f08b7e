"""Older processors have half the lanes or lack an instruction, and tiles of their own: the same tests as on those."""

import os
import subprocess
import sys

import pytest

from outrider.kernels.vector import LANES, PAIRS_ADDED

FEATURES = "+avx,+avx2,+fma,+f16c,+sse4.2,+popcnt,+bmi,+bmi2,+lzcnt,+movbe,+cx16"
WITHOUT = "-avx512f,-avx512bw,-avx512vl,-avx512dq"
# Naming an older processor is not enough: the features of the one at hand would stay.
OLDER = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": f"{FEATURES},{WITHOUT}"}


FIRST_WIDE = {
    "NUMBA_CPU_NAME": "skylake-avx512",
    "NUMBA_CPU_FEATURES": f"{FEATURES},{WITHOUT.replace('-', '+')},-avx512vnni",
}


def run_as_on(processor: dict[str, str], files: list[str], *, check: str) -> None:
    environment = os.environ | processor
    subprocess.run(
        [sys.executable, "-c", f"from outrider.kernels.vector import LANES, PAIRS_ADDED; assert {check}"],
        env=environment,
        check=True,
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *files]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.skipif(LANES == 8, reason="all other tests run with 8 lanes here")
def test_everything_holds_with_eight_lanes() -> None:
    files = ["tests/kernels/test_greatest.py", "tests/kernels/test_packed.py", "tests/layers/test_cpu_program.py"]
    run_as_on(OLDER, files, check="LANES == 8 and not PAIRS_ADDED")


@pytest.mark.skipif(not PAIRS_ADDED or LANES == 8, reason="all other tests run without VNNI here")
def test_packed_products_are_the_same_without_vnni() -> None:
    run_as_on(FIRST_WIDE, ["tests/kernels/test_packed.py"], check="LANES == 16 and not PAIRS_ADDED")
