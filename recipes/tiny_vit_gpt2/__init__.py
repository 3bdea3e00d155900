"""Recipe of ``tiny-vit-gpt2``: a trained image tower as a ViT, and a GPT-2 that learns to read its rows."""
