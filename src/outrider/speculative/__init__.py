"""Speculation: drafters, their registry, and the rule by which drafts are accepted."""
