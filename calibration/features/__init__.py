"""What drafts learn from: a target's hidden states, live or cached."""
