"""Pacing: how much a batch speculates at each step, chosen from what steps cost and what drafts are worth."""
