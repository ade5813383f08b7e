"""The checker: a shadow of every slot, the invariants, and the faults that prove each check fires."""

from outrider.sanitizer.checks import Sanitizer
from outrider.sanitizer.report import Mode

__all__ = ["Mode", "Sanitizer"]
