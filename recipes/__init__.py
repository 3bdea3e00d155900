"""Recipes: how the bundled models are made."""
