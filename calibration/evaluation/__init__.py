"""What a draft is worth on held-out data."""
