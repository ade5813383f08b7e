"""The arithmetic of a decoder layer behind one interface, with a plain PyTorch version as reference."""
