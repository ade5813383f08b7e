"""Processors without AVX-512 have half the lanes, and tiles of their own: the same tests as on such a processor."""

import os
import subprocess
import sys

import pytest

from outrider.kernels.vector import LANES

FEATURES = "+avx,+avx2,+fma,+f16c,+sse4.2,+popcnt,+bmi,+bmi2,+lzcnt,+movbe,+cx16"
WITHOUT = "-avx512f,-avx512bw,-avx512vl,-avx512dq"
# Naming an older processor is not enough: the features of the one at hand would stay.
OLDER = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": f"{FEATURES},{WITHOUT}"}


@pytest.mark.skipif(LANES == 8, reason="all other tests run with 8 lanes here")
def test_everything_holds_with_eight_lanes() -> None:
    check = "from outrider.kernels.vector import LANES; assert LANES == 8"
    environment = os.environ | OLDER
    subprocess.run([sys.executable, "-c", check], env=environment, check=True)
    files = ["tests/kernels/test_greatest.py", "tests/kernels/test_packed.py", "tests/layers/test_cpu_program.py"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *files]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
