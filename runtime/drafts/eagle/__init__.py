"""Drafts with a decoder layer of their own: EAGLE, EAGLE-3, ViSpec."""
