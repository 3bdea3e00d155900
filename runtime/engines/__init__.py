"""Engines: one file per way of executing a bundle's graphs. `create` picks one by device name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import NO_ONNX_RUNTIME, OptionError

if TYPE_CHECKING:
    from ..bundle.folder import Bundle
    from .base import Engine

DEVICES = ("cpu",)
"""Device names that `create` understands."""


def create(bundle: Bundle, device: str, threads: int | None = None) -> Engine:
    """The engine for `device`. Raises `OptionError` for an unknown device, and for one whose package is missing."""
    if device == "cpu":
        try:
            from .onnxruntime import OnnxRuntimeCpu
        except ModuleNotFoundError as error:
            if error.name != "onnxruntime":
                raise
            raise OptionError(f"device {device!r}: {NO_ONNX_RUNTIME}") from error

        return OnnxRuntimeCpu(bundle.path, bundle.manifest, threads=threads)
    raise OptionError(f"unknown device {device!r}; choose one of: {', '.join(DEVICES)}")
