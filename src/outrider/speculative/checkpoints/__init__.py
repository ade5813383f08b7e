"""Checkpoints of drafters: which public layouts are read, and what does not belong to a target is refused."""
