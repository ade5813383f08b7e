"""The runner: carries out step plans on tensors."""
