"""Implementations of `transfer.link.Link`, one file each."""
