"""Grammars at work: compiled in a process of their own, and followed token by token."""
