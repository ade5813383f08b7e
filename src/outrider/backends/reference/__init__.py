"""The reference backend: plain PyTorch on any device. It defines what is correct."""
