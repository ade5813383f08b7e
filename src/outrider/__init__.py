"""Outrider: LLM inference built around speculative decoding.

Names below are imported when they are first used, so that the torch-free parts (`outrider.kv` and what is
built on it) can be imported without paying for the rest.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outrider.api.async_llm import AsyncLLM
    from outrider.api.llm import LLM
    from outrider.engine.outputs import RequestOutput
    from outrider.sampling import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "AsyncLLM", "RequestOutput", "SamplingParams"]

_HOMES = {
    "LLM": "outrider.api.llm",
    "AsyncLLM": "outrider.api.async_llm",
    "RequestOutput": "outrider.engine.outputs",
    "SamplingParams": "outrider.sampling",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'outrider' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
