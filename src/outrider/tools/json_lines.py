"""Files with one JSON object per line, as users write them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from outrider.errors import ConfigError


def json_objects(path: Path, text: str, expected: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields line number and fields of every object in `text`, read from `path`; empty lines are skipped.

    Malformed lines are refused with an error that names the line and ends with `expected`, as is a file without any.
    """
    empty = True
    # Not splitlines(): strings may contain other line separators than "\n" unescaped.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        empty = False
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError) as problem:
            raise ConfigError(f"{path}, line {number} is not valid JSON ({problem}); {expected}") from None
        if not isinstance(fields, dict):
            raise ConfigError(f"{path}, line {number} is not a JSON object; {expected}")
        yield number, fields
    if empty:
        raise ConfigError(f"{path} has no prompts; {expected}")
