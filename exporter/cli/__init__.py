"""The commands `models`, `build` and `verify`."""

from .app import register

__all__ = ["register"]
