"""Answer memory: what was answered before is proposed again."""
