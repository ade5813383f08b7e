"""The checker: a shadow of every slot, and the invariants. `tools/sim` has the faults that prove each check fires."""

from outrider.sanitizer.checks import Sanitizer
from outrider.sanitizer.report import Mode

__all__ = ["Mode", "Sanitizer"]
