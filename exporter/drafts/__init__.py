"""Drafts as networks and folders: what proposes tokens to a target, bound to it by its fingerprint."""
