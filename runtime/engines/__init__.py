"""Engines: one file per way of executing a bundle's graphs. `create` picks one by device name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..common.errors import NO_ONNX_RUNTIME, DeviceError, OptionError
from ..common.foreign_errors import raise_if_foreign

if TYPE_CHECKING:
    from pathlib import Path

    from ..bundle.folder import Bundle
    from .base import Engine

DEVICES = ("cpu", "cuda", "tensorrt")
"""Device names that `create` understands."""


def create(
    bundle: Bundle, device: str, threads: int | None = None, kernel_cache: Path | None = None
) -> Engine:
    """The engine for `device`; `threads` are those of a CPU, `kernel_cache` is a folder for what TensorRT-RTX compiles.
    Raises `OptionError` for an unknown device, for one whose package is missing and for options of another device,
    `DeviceError` without a GPU that is asked for."""
    if kernel_cache is not None and device != "tensorrt":
        raise OptionError(
            f"kernel cache: {kernel_cache} asked for, but device {device!r} compiles no kernels; leave it out"
        )
    if device in DEVICES[1:] and bundle.manifest.decoder.linear_attention is not None:
        raise OptionError(
            f"device {device!r}: the decoder of this bundle has linear attention, which runs on device 'cpu' alone; load it there"
        )
    if device == "cpu":
        try:
            from .onnxruntime import OnnxRuntimeCpu
        except ModuleNotFoundError as error:
            if error.name != "onnxruntime":
                raise
            raise OptionError(f"device {device!r}: {NO_ONNX_RUNTIME}") from error
        except ImportError as error:
            raise _not_loadable(error) from error

        return OnnxRuntimeCpu(bundle.path, bundle.manifest, threads, bundle.reading)
    if device in DEVICES and threads is not None:
        raise OptionError(
            f"threads: {threads} asked for, but device {device!r} computes on a GPU; leave it out"
        )
    if device == "cuda":
        try:
            from .onnxruntime_cuda import OnnxRuntimeCuda
        except ModuleNotFoundError as error:
            if error.name != "onnxruntime":
                raise
            raise OptionError(
                f"device {device!r}: ONNX Runtime is not installed: pip install 'onnxruntime-gpu[cuda,cudnn]'"
            ) from error
        except ImportError as error:
            raise _not_loadable(error) from error

        return OnnxRuntimeCuda.open(bundle.path, bundle.manifest, bundle.reading)
    if device == "tensorrt":
        from .tensorrt import TensorRTEngine

        return TensorRTEngine.open(bundle, kernel_cache)
    raise OptionError(f"unknown device {device!r}; choose one of: {', '.join(DEVICES)}")


def _not_loadable(error: ImportError) -> DeviceError:
    """What to say of a package that is there, and whose library the system does not load: for want of memory, say."""
    raise_if_foreign(error)
    lines = str(error).splitlines() or [type(error).__name__]
    return DeviceError(f"ONNX Runtime is installed but cannot be loaded: {lines[0]}")
