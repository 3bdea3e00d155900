"""The commands `models`, `build`, `verify`, `fit` and `compile`."""

from .app import register

__all__ = ["register"]
