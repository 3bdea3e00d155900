"""What a cycle may draft, what passes cost, what drafts keep, and the speed-up that follows."""
