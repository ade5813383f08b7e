"""Training of drafters: a corpus written by the target itself, the networks, the loop, and export."""
