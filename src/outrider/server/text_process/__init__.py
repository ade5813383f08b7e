"""Processes that render chat templates and tokenise: what takes too long there is killed, and stalls nobody."""
