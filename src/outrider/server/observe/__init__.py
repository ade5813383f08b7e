"""Observability: metrics, the statistics in the log, traces."""
