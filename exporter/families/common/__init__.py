"""What families, language models and vision towers share."""
