"""Moving KV between workers: the torch-free logic. There is no transport yet; the simulation has a virtual one."""
