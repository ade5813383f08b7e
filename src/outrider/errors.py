"""Every error that Outrider raises on purpose.

    OutriderError
    ├── ConfigError            a setting is wrong or contradicts another
    │   └── FootprintError     a drafter's declaration contradicts itself
    ├── ModelError             a model or checkpoint cannot be loaded
    ├── RequestError           one request is wrong; every other request goes on
    │   ├── AdmissionError     one request could never fit into the memory that was configured
    │   └── NotNowError        one request cannot be served now; the same one may be later
    ├── BusyError              another thread is inside the engine
    ├── OutOfPages             an arena has too few pages right now (the scheduler makes room or waits)
    ├── TransferError          KV could not be moved between workers or tiers
    ├── TraceError             a simulation trace cannot be read or replayed
    └── InvariantViolation     the sanitizer saw a broken invariant

Messages name the offending value and say what to do next.
"""

from __future__ import annotations


class OutriderError(Exception):
    """Base of everything below; the CLI prints it as one line."""


class ConfigError(OutriderError, ValueError):
    """A setting is wrong or contradicts another."""


class FootprintError(ConfigError):
    """A drafter's declaration contradicts itself."""


class ModelError(OutriderError):
    """A model or checkpoint cannot be loaded."""


class RequestError(OutriderError, ValueError):
    """One request is wrong; every other request goes on."""


class AdmissionError(RequestError):
    """One request could never fit into the memory that was configured."""


class NotNowError(RequestError):
    """One request cannot be served now, through no fault of its own; the same one may be later."""


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


class TraceError(OutriderError):
    """A simulation trace cannot be read or replayed."""


class InvariantViolation(OutriderError):
    """The sanitizer saw a broken invariant. `invariant` is its name, I1 to I9."""

    def __init__(self, invariant: str, message: str) -> None:
        super().__init__(message)
        self.invariant = invariant
