"""What all tests have in common: a cache directory that is the run's own."""

from __future__ import annotations

import os
import shutil
import tempfile

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Has everything that a run keeps in the user's cache directory kept in one that ends with the run. The processes
    that tests start share it, pytest-xdist's workers too: what steps cost is measured once for each model."""
    if hasattr(config, "workerinput"):
        return
    before, directory = os.environ.get("XDG_CACHE_HOME"), tempfile.mkdtemp(prefix="outrider-tests-")
    os.environ["XDG_CACHE_HOME"] = directory

    def give_back() -> None:
        shutil.rmtree(directory, ignore_errors=True)
        if before is None:
            del os.environ["XDG_CACHE_HOME"]
        else:
            os.environ["XDG_CACHE_HOME"] = before

    config.add_cleanup(give_back)
