"""Whole clusters under test: scripts/demo-cluster and `outrider bench cluster`."""
