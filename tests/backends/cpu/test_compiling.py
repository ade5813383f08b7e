"""Progress says that kernels are compiled only while they are, not when they are read from disk."""

from __future__ import annotations

from pathlib import Path

import pytest

numba = pytest.importorskip("numba")

from outrider.backends import COMPILING  # noqa: E402
from outrider.backends.cpu.kernels.compiling import LOADING, Entry, Kernel, load_all, load_entry  # noqa: E402
from outrider.backends.cpu.kernels.vector import FLOAT32  # noqa: E402


def nothing(job: int, chunk: int, scratch: int) -> None:
    pass


def double(number: int) -> int:
    return number + number


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))


def test_only_kernels_that_are_not_on_disk_are_reported_as_compiled() -> None:
    def loaded() -> list[tuple[str, int]]:
        heard: list[tuple[str, int]] = []
        load_all([Kernel(nothing, FLOAT32)], lambda what, done, total: heard.append((what, done)))
        return heard

    assert loaded() == [(LOADING, 0), (COMPILING, 0), (COMPILING, 1)]
    assert loaded() == [(LOADING, 0), (LOADING, 1)]


def test_an_entry_is_reported_only_if_it_is_compiled() -> None:
    heard: list[str] = []
    for _ in range(2):
        load_entry(Entry(double, "int64(int64)"), lambda what, done, total: heard.append(what))
    assert heard == [COMPILING]
