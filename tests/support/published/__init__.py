"""Checkpoints of published layouts, written small: what test_published.py, the campaigns and the table read."""
