"""What lies between a socket and a route: keys, sizes, JSON, event streams, errors."""
