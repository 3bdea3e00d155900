"""A target's own answers, to train drafts on."""
