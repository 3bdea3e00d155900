"""Layouts of quantized checkpoints: which tensors a matrix is made of, and what their bits mean. No file is read here."""
