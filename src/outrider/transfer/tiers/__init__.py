"""Tiers behind the device: memory of the host, and stores that workers share."""
