"""Prompt lookup: what followed the last tokens before."""
