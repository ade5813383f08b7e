"""Triton kernels, one file each. Each gives what the operation of the same name of `backends/reference` gives, up to
rounding, and tests/backends/cuda compares the two on random shapes."""
