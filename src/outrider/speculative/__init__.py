"""Drafters: their torch-free footprints, and (with a model) their networks."""
