"""Integer weights that are chosen by what a model reads: which matrices, their integers, and what they cost in quality."""
