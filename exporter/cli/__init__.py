"""The commands `models`, `build`, `verify` and `fit`."""

from .app import register

__all__ = ["register"]
