"""Measurements of Outrider itself, each a module that needs no terminal."""
