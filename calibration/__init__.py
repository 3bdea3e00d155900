"""Everything learned or measured from data: drafts, draft layers, evaluation."""
