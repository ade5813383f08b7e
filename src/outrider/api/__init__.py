"""The engine for use from Python: `LLM` for one caller, `AsyncLLM` for many."""
