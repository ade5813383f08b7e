"""Processes that render chat templates and tokenize; a slow one is killed without delaying other requests."""
