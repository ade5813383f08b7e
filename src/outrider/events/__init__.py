"""KV events: what routers are told about the prefix cache. `servable` decides, `messages` writes, `publisher` sends."""
