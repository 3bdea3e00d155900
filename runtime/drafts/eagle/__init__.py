"""Drafts with a layer of their own that goes on from the target's features (EAGLE), and what they share."""
