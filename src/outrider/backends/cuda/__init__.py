"""The CUDA backend: the reference's arithmetic so far, with a fused draw written in Triton."""
