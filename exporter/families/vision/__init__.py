"""Vision towers: the `vision` graph from pixels to the rows of the language model, and the picture's preprocessing."""
