"""What a grammar leaves no choice about is proposed."""
