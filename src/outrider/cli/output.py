"""Standard output whose failures name themselves, so that they are not taken for those of any other file."""

from __future__ import annotations

import errno
from collections.abc import Iterable
from typing import Any, TextIO

from outrider.errors import OutputError

ADVICE = {
    errno.ENOSPC: "free some space and run the command again",
    errno.EPIPE: "the program that was reading it has ended",
}


class CheckedOutput:
    """A text stream that raises OutputError where `stream` raises OSError."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as problem:
            raise _failed(problem) from None

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as problem:
            raise _failed(problem) from None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _failed(problem: OSError) -> OutputError:
    advice = ADVICE.get(problem.errno or 0, "write it somewhere else")
    return OutputError(f"cannot write to standard output: {problem.strerror or problem}; {advice}")
