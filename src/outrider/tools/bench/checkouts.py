"""Checkouts of commits, and worker processes that run under them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from itertools import chain
from pathlib import Path
from typing import Any

from outrider.errors import ConfigError
from outrider.tools.bench.json_worker import JsonWorker, program_path

WORKER = "outrider.tools.bench.compare_worker"


@dataclass(frozen=True, slots=True)
class Checkout:
    side: str
    """BASE or HEAD."""
    commit: str
    path: Path

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": str(self.path / "src"), "COLUMNS": "1000"}

    def missing_packages(self) -> list[str]:
        """Packages that this commit's pyproject.toml names, extras included, and that are not installed."""
        project = tomllib.loads((self.path / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        wanted = [*project.get("dependencies", ()), *chain(*project.get("optional-dependencies", {}).values())]
        names = {re.split(r"[^\w.-]", requirement, maxsplit=1)[0] for requirement in wanted}
        return sorted(name for name in names if not _is_installed(name))

    def failed(self, what: str, log: str) -> ConfigError:
        last = "\n".join(log.strip().splitlines()[-8:])
        return ConfigError(f"{what} failed with {self.side.upper()} ({self.commit[:9]}); it ended with:\n{last}")


def _is_installed(package: str) -> bool:
    try:
        distribution(package)
    except PackageNotFoundError:
        return False
    return True


def git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigError(f"git {' '.join(arguments)} failed: {done.stderr.strip()}")
    return done.stdout.strip()


@contextmanager
def checkouts(revisions: Mapping[str, str]) -> Iterator[dict[str, Checkout]]:
    """One git worktree for each revision, in a temporary folder that is removed at the end."""
    commits = {side: git("rev-parse", "--verify", f"{name}^{{commit}}") for side, name in revisions.items()}
    with tempfile.TemporaryDirectory(prefix="outrider-compare-") as folder, ExitStack() as stack:
        found = {}
        for side, commit in commits.items():
            path = Path(folder) / side
            git("worktree", "add", "--detach", "--quiet", str(path), commit)
            stack.callback(git, "worktree", "remove", "--force", str(path))
            found[side] = Checkout(side, commit, path)
        yield found


class Worker(JsonWorker):
    """A process that runs compare_worker.py under one checkout."""

    def __init__(self, checkout: Checkout, settings: Mapping[str, Any]) -> None:
        self._checkout = checkout
        super().__init__(
            # By its path, because BASE may not have it.
            [sys.executable, program_path(WORKER), json.dumps(settings)],
            failed=lambda log: checkout.failed("a worker", log),
            environment=checkout.environment,
            folder=checkout.path,
        )

    def wait_ready(self) -> None:
        package = Path(self.answer()["package"])
        if not package.is_relative_to(self._checkout.path):
            raise ConfigError(
                f"the worker of {self._checkout.side.upper()} imported outrider from {package.parent}, not from its "
                "checkout; uninstall that copy, or install it editable with scripts/setup"
            )
