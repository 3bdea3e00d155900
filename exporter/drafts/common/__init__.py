"""What draft kinds share: folders, tensors, networks, parity."""
