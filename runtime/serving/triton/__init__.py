"""A bundle behind Triton Inference Server: `repository` writes the files, `model` runs in its python backend."""
