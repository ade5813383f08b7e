"""Options that take several numbers, as in `--batch 1,2,4`."""

from __future__ import annotations

from outrider.errors import ConfigError


def whole_numbers(text: str, option: str) -> tuple[int, ...]:
    """Returns the different numbers, from 1 on, that a text such as "1,2,4" lists; none for an empty text."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    for part in parts:
        if not part.isdecimal() or int(part) < 1:
            raise ConfigError(f"{option} takes whole numbers from 1 on such as 1,2,4, got {part!r}")
    return tuple(dict.fromkeys(map(int, parts)))
