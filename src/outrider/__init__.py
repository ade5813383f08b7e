"""Outrider: LLM inference built around speculative decoding.

The names below are imported when they are first used, so that the parts without PyTorch (`outrider.kv` and what is
built on it) can be imported quickly.
"""

# As in `typing`, whose import would take longer than all else that the command line does before it handles Ctrl-C.
TYPE_CHECKING = False
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
