"""Models: one decoder described by a spec, recipes for model families, weights from files."""
