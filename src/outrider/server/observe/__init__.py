"""What operators see: metrics, the line in the log, traces."""
