"""Vision towers: the `vision` graph from pixels to embeddings of the language model, and the picture's preprocessing."""
