"""Structured output: an adapter between our requests and llguidance, which computes the tokens that may come next."""
