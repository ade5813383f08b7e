"""Stop strings: found in a growing text, with what might be the beginning of one held back."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = tuple(strings)
        self._longest = max(map(len, self._strings), default=0)

    def __bool__(self) -> bool:
        return bool(self._strings)

    def find(self, text: str, searched: int) -> tuple[int, str] | None:
        """Returns the place and the string of the earliest match that ends after text[:searched].

        Matches that end before were found by earlier calls. Those may have been ignored, so they must not be
        found again: each string looks back by its own length, not by that of the longest one.
        """
        best: tuple[int, str] | None = None
        for string in self._strings:
            place = text.find(string, max(0, searched - len(string) + 1))
            if place >= 0 and (best is None or place < best[0]):
                best = (place, string)
        return best

    def safe_length(self, text: str) -> int:
        """Returns how much of the text can be shown: its end may be the beginning of a stop string."""
        for held in range(min(self._longest - 1, len(text)), 0, -1):
            tail = text[len(text) - held :]
            if any(string.startswith(tail) for string in self._strings):
                return len(text) - held
        return len(text)
