"""Kernels: one per file, each with a plain reference that it is tested against."""

COMPILING = "compiling kernels (once)"
"""What is reported as being done while kernels are compiled, which is only until they are kept on disk."""
LOADING = "loading kernels"
