"""Engines: one file per way of executing a bundle's graphs. `create` picks one by device name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import OptionError

if TYPE_CHECKING:
    from ..bundle.folder import Bundle
    from .base import Engine

DEVICES = ("cpu",)
"""Device names that `create` understands."""


def create(bundle: Bundle, device: str, threads: int | None = None) -> Engine:
    """The engine for `device`. Raises `OptionError` for an unknown device."""
    if device == "cpu":
        from .onnxruntime import OnnxRuntimeCpu

        return OnnxRuntimeCpu(bundle.path, bundle.manifest, threads=threads)
    raise OptionError(f"unknown device {device!r}; choose one of: {', '.join(DEVICES)}")
