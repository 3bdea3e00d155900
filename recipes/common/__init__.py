"""What the recipes of the bundled tiny models share: batches of fresh captions, the loop, the optimizer, checks, evaluation."""
