"""Moving KV between workers: torch-free logic here, transports in files of their own."""
