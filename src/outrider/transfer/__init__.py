"""Moving KV between workers: one torch-free driver, which the engine and the simulation run, and links beneath it."""
