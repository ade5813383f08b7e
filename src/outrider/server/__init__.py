"""`outrider serve`: an HTTP front end, an engine process behind it, and processes that turn text into tokens.

    client ──HTTP──▶ front end ──typed messages, ZMQ──▶ engine process ──▶ Engine.step()
                        └──pipes──▶ text processes: chat templates and tokenizer, killed when they take too long

The front end never imports torch and never waits for a step; a step never waits for a client.
"""
