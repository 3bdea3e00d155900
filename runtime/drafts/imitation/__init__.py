"""Drafts on the target's own trunk: an imitation network, or an early exit."""
