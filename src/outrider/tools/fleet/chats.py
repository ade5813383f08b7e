"""Chats to send to a cluster, and the right answers, from one engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from outrider.tools.fleet.client import Message

QUESTIONS = (
    "Give me five tips for a first visit to a large museum.",
    "Write a short story about a fox that finds a lighthouse.",
    "Explain how bread rises, step by step.",
    "What should I pack for three days in the mountains?",
    "Write a Python function that reverses the words of a sentence.",
    "Name the planets and say one thing about each.",
    "How do I learn to swim as an adult?",
    "Describe a market in the early morning.",
    "What is the difference between weather and climate?",
    "Plan a simple dinner for four friends.",
)
PARAGRAPH = (
    "The old harbour lies behind two breakwaters, and its quay has been rebuilt three times. Boats that come in at "
    "night follow the green light, tie up at the northern steps and wait for the pilot, who lives above the bakery. "
)
ENGINE: dict[str, Any] = {"kv_cache_memory_bytes": 256 << 20, "max_model_len": 2048}
"""Settings of all engines here: small, since several share this machine."""


class Chat(NamedTuple):
    messages: list[Message]
    settings: dict[str, Any]


def chats(number: int, *, tokens: int, long_every: int = 4) -> list[Chat]:
    """Returns different chats, half of them greedy and half with a seed; some have a long prompt."""
    found = []
    for index in range(number):
        question = f"{QUESTIONS[index % len(QUESTIONS)]} (variant {index})"
        if index % long_every == long_every - 1:
            question = f"Note {index}. {PARAGRAPH * 20}\n\n{question}"
        seeded = {"temperature": 0.8, "top_p": 0.95, "seed": 1000 + index}
        settings = {"max_tokens": tokens, **({"temperature": 0.0} if index % 2 == 0 else seeded)}
        found.append(Chat([{"role": "user", "content": question}], settings))
    return found


def right_answers(wanted: Sequence[Chat]) -> list[str]:
    """Returns what a single engine with the default drafter writes."""
    from outrider import LLM, SamplingParams

    llm = LLM(speculative_config={"method": "dflash"}, **ENGINE)
    params = [SamplingParams(**chat.settings) for chat in wanted]
    answers = llm.chat([chat.messages for chat in wanted], params)
    return [answer.outputs[0].text for answer in answers]
