"""How much a cycle drafts: fixed, adaptive, or by the draft's confidence."""
