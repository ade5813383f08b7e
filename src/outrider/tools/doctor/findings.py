"""Findings of `outrider doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Status(Enum):
    OK = "ok"
    NOTE = "note"
    """Works, but could be better."""
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    name: str
    text: str
    status: Status = Status.OK
    advice: str | None = None
    """What the user can do about it."""

    def as_json(self) -> dict[str, str | None]:
        return {"name": self.name, "text": self.text, "status": self.status.value, "advice": self.advice}


def bytes_text(count: int) -> str:
    """Returns a readable size: 1.5 GiB, 45.0 KiB."""
    size = float(count)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError
