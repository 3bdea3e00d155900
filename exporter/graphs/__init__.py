"""From torch modules to small, plain ONNX graphs whose weights are references into one shared file."""
