"""The process that runs the engine: orders in, step reports out, nothing else."""
