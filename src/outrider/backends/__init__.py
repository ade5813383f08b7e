"""Backends: one folder for each way of computing a model, behind the interface in `base`.

Torch-free, so that the command line can name a backend's activities without loading it.
"""

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Called with the name of an activity, the amount that is done, and the total amount."""
COMPILING = "compiling kernels (once)"
"""The activity that a backend reports while it compiles kernels that it caches on disk."""
