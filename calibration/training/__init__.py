"""Training drafts against a frozen target."""
