"""Tiny models and their drafts for vlmexport: files, no code."""
