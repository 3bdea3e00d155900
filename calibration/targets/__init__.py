"""The frozen target of a training."""
