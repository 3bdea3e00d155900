"""Makers of the bundled models: the scenes they learn from and the recipes."""
