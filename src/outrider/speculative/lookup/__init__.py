"""Look-up: finds what a text copies from itself, or from finished texts of the same tenant. Standard library only."""

from outrider.speculative.lookup.config import LookupConfig
from outrider.speculative.lookup.lookup import Lookup
from outrider.speculative.lookup.match import Match, draft_probability

__all__ = ["Lookup", "LookupConfig", "Match", "draft_probability"]
