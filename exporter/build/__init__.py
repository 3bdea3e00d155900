"""`vlmexport build`: a model and its drafts become a bundle."""
