"""Bodies of requests, as in OpenAI's and vLLM's APIs; unknown fields are refused by name."""
