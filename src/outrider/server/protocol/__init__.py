"""What clients may send, as OpenAI's and vLLM's users know it; anything else is refused by name."""
