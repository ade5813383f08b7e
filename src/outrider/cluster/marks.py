"""Marks that tell a migrated request from a new one.

When a worker dies, Dynamo's front end sends the prompt and what was generated to another one, as if all of it were the
prompt. Most settings do not mind. Those of `inexact_after_migration` need to know which part was generated, and nothing
in the message says so. Only the request's id stays the same, so such a request leaves a mark in a directory that all
workers share: its id and its prompt. A worker that finds the mark of another prompt refuses to go on.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

STALE_S = 24 * 3600.0
"""Age at which the mark of a request that never ended is thrown away."""


class Marks:
    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        now = time.time()
        for mark in directory.iterdir():
            with suppress(OSError):
                if now - mark.stat().st_mtime > STALE_S:
                    mark.unlink()

    def is_continued(self, name: str, prompt: Sequence[int]) -> bool:
        """Leave a mark for a request; returns whether another worker has begun it with a shorter prompt."""
        digest = blake2b(array("q", prompt).tobytes(), digest_size=16).hexdigest()
        mark = self._mark(name)
        try:
            with mark.open("x", encoding="ascii") as file:
                file.write(digest)
            return False
        except FileExistsError:
            with suppress(FileNotFoundError):
                return mark.read_text(encoding="ascii") != digest
            return False

    def forget(self, name: str) -> None:
        """Remove the mark of a request that has ended."""
        self._mark(name).unlink(missing_ok=True)

    def _mark(self, name: str) -> Path:
        # Ids come from other processes.
        return self._directory / blake2b(name.encode(), digest_size=16).hexdigest()
