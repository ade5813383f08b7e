"""Every error that Outrider raises on purpose.

    OutriderError
    ├── ConfigError            a setting is wrong or contradicts another
    │   ├── FootprintError     a drafter's declaration contradicts itself
    │   └── ExtensionError     a drafter or model family of another package cannot be used
    ├── ModelError             a model or checkpoint cannot be loaded, or its numbers are not finite
    ├── RequestError           a request is wrong; all others go on
    │   ├── AdmissionError     a request could never fit into the configured memory
    │   └── NotNowError        a request cannot be served now, but may be later
    ├── BusyError              another thread is inside the engine
    ├── OutOfPages             an arena has too few pages right now (the scheduler makes room or waits)
    ├── TransferError          KV could not be moved between workers or tiers
    ├── OutputError            standard output cannot be written to
    ├── TraceError             a simulation trace cannot be read or replayed
    └── InvariantViolation     the sanitizer saw a broken invariant

Messages name the offending value and say what to do next.
"""

from __future__ import annotations


class OutriderError(Exception):
    """Base of all errors that Outrider raises on purpose; the command line prints them as one line."""


class ConfigError(OutriderError, ValueError):
    """A setting is wrong or contradicts another."""


class FootprintError(ConfigError):
    """A drafter's declaration contradicts itself."""


class ExtensionError(ConfigError):
    """A drafter or model family of another package cannot be used."""


class ModelError(OutriderError):
    """A model or checkpoint cannot be loaded, or its numbers are not finite."""


class RequestError(OutriderError, ValueError):
    """A request is wrong; all others go on."""


class AdmissionError(RequestError):
    """A request could never fit into the configured memory."""


class NotNowError(RequestError):
    """A request cannot be served now, through no fault of its own; the same request may be served later."""


class BusyError(OutriderError, RuntimeError):
    """Another thread is inside the engine, which serves one at a time."""


class OutOfPages(OutriderError):
    """An arena has too few pages right now."""

    def __init__(self, arena: int, missing_pages: int) -> None:
        super().__init__(f"arena {arena} is short of {missing_pages} page(s)")
        self.arena = arena
        self.missing_pages = missing_pages


class TransferError(OutriderError):
    """KV could not be moved between workers or tiers."""


class OutputError(OutriderError):
    """Standard output cannot be written to."""


class TraceError(OutriderError):
    """A simulation trace cannot be read or replayed."""


class InvariantViolation(OutriderError):
    """The sanitizer saw a broken invariant. `invariant` is its name, I1 to I13."""

    def __init__(self, invariant: str, message: str) -> None:
        super().__init__(message)
        self.invariant = invariant
