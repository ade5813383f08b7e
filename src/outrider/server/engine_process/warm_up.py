"""A first generation before clients connect, so that kernels are compiled and memory is mapped by then."""

from __future__ import annotations

from outrider.engine.engine import Engine
from outrider.errors import RequestError
from outrider.sampling import SamplingParams

PROMPT_TOKENS = 3
"""Fewer tokens than a page holds, so that nothing of the prompt stays in the prefix cache."""


def warm_up(engine: Engine) -> None:
    """Generate greedily, and by sampling with log-probabilities; each with drafts if the engine speculates."""
    tokens = min(engine.k + 4, engine.max_model_len - PROMPT_TOKENS)
    prompt = [token % engine.model.spec.vocab_size for token in range(PROMPT_TOKENS)]
    for number, params in enumerate(
        (
            SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True),
            SamplingParams(temperature=1, top_p=0.9, top_k=20, seed=0, max_tokens=tokens, ignore_eos=True, logprobs=1),
        )
    ):
        try:
            engine.add_request(f"warm-up-{number}", prompt, params, compute_prompt=True)
        except RequestError:
            # The context is too short for this request, but not for shorter ones.
            continue
    if engine.grammars is not None:
        engine.grammars.prepare()
    while engine.has_work:
        engine.step()
    engine.reset_prefix_cache()
    engine.clear_counts()
