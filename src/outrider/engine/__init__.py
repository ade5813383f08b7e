"""The engine: requests in, text out, one step at a time."""
