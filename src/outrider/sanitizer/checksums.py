"""Level `bytes`: published pages are checksummed, and verified when they are hit or evicted.

The shadow believes what the runner reports; a kernel that writes where its plan did not say is caught here.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b

DIGEST_BYTES = 16


class Checksums:
    def __init__(self, read: Callable[[int, int], bytes]) -> None:
        """`read` returns the bytes of (group, page) as they are now."""
        self._read = read
        self._sums: dict[tuple[int, int], bytes] = {}

    def seal(self, group: int, page: int) -> None:
        """Require that the page stays as it is until it is forgotten."""
        self._sums[group, page] = self._digest(group, page)

    def holds(self, group: int, page: int) -> bool:
        """Whether the page is what it was when it was sealed; true for a page that was not."""
        sealed = self._sums.get((group, page))
        return sealed is None or sealed == self._digest(group, page)

    def forget(self, group: int, page: int) -> None:
        self._sums.pop((group, page), None)

    def clear(self) -> None:
        self._sums.clear()

    def __len__(self) -> int:
        return len(self._sums)

    def _digest(self, group: int, page: int) -> bytes:
        return blake2b(self._read(group, page), digest_size=DIGEST_BYTES).digest()
