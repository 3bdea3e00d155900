"""Pieces of a cycle that runs on a device: its memory, the draft's part, the changes of logits."""
