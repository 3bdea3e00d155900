"""From logits to tokens: processors, sampling, and which drafted tokens are accepted."""
