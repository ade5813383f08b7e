"""Data only: drafters for SmolLM2-135M-Instruct, one directory each."""
