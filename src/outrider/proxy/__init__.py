"""The front end of workers that share their work: prefill workers compute prompts, decode workers write the answers.

The proxy speaks only HTTP. KV moves between the workers themselves, and what one of them says about it to another
passes through here as it is.
"""
