"""Matrices as integers with a scale for every block of inputs: the arithmetic, and how one matrix is described."""
