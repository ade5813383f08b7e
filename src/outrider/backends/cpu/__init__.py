"""The CPU backend: row-exact kernels compiled by Numba, over weights in the form in which files store them."""
