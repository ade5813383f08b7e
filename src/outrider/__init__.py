"""Outrider: LLM inference built around speculative decoding.

This module imports nothing, so that the torch-free parts (`outrider.kv` and what is built on it)
can be imported without paying for the rest.
"""

__version__ = "0.1.0"
