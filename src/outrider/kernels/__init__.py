"""Kernels: one per file, each with a plain reference that it is tested against."""

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much is ready, and how much there is."""
COMPILING = "compiling kernels (once)"
"""What is reported as being done while kernels are compiled, which is only until they are kept on disk."""
LOADING = "loading kernels"
