"""Kernels: one per file, each with a plain reference that it is tested against."""
