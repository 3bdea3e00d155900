"""A real Triton Inference Server, with its python backend and its client."""
