"""Finding TensorRT: the full library or TensorRT-RTX, behind one small object."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

from ...runtime.common.errors import DeviceError, ExportError, OptionError
from ...runtime.common.foreign_errors import raise_if_foreign
from ...runtime.common.optional_deps import install_command
from ...runtime.engines.cuda import Cuda, Versions
from ...runtime.engines.tensorrt_library import import_library, make_logger, numbers

BACKENDS = ("tensorrt-rtx", "tensorrt")

TARGETS = {
    "sm75": "Turing (T4, RTX 20)",
    "sm80": "Ampere (A100)",
    "sm86": "Ampere (RTX 30, A10)",
    "sm89": "Ada (RTX 40, L4)",
    "sm120": "Blackwell (RTX 50)",
    "sm121": "Blackwell (GB10)",
}
"""Architectures that TensorRT-RTX compiles for on a CPU. Jetson Orin (sm87) and H100/H200 (sm90) are not among them."""

NATIVE = "native"
"""The target of the full TensorRT: the GPU it runs on."""


OLDEST = (10, 3)
"""Version of the full TensorRT whose operators the portable lowering keeps to (`exporter/lowering/opset.py`)."""


@dataclass(frozen=True)
class TensorRT:
    """A loaded library. `module` is `tensorrt` or `tensorrt_rtx_bindings`."""

    module: Any
    backend: str
    version: str

    @property
    def updates_caches(self) -> bool:
        """Whether it has the in-place cache update (from 10.15 on), without which plans are portable ones."""
        return hasattr(self.module, "IKVCacheUpdateLayer")

    @property
    def cross_compiles(self) -> bool:
        """Whether plans can be built for a named architecture without that GPU."""
        return hasattr(self.module, "ComputeCapability")

    def logger(self) -> Any:
        """A new logger that keeps errors instead of printing them."""
        return make_logger(self.module)


def load_tensorrt(backend: str = "tensorrt-rtx") -> TensorRT:
    """Imports the library of a backend.

    Raises OptionError for an unknown backend, ExportError when it is not installed, cannot be loaded or is too old.
    """
    if backend not in BACKENDS:
        raise OptionError(f"unknown backend {backend!r}; choose one of {', '.join(BACKENDS)}")
    try:
        module = import_library(backend)
        version = str(module.__version__)
    except ModuleNotFoundError as error:
        raise ExportError(
            f"--backend {backend} needs the module {error.name}: {install_command(backend)}"
            + ("" if backend == "tensorrt-rtx" else " (JetPack brings it along)")
        ) from error
    except (ImportError, OSError, AttributeError, RuntimeError) as error:
        raise_if_foreign(error)
        raise ExportError(
            f"{backend} is installed but cannot be loaded: {str(error).splitlines()[0]}"
        ) from error
    if backend == "tensorrt" and numbers(version, 2) < OLDEST:
        raise ExportError(
            f"{backend} {version} is older than {'.'.join(map(str, OLDEST))}, the oldest that plans are made for; JetPack 6.2 has that"
        )
    return TensorRT(module, backend, version)


def resolve_target(library: TensorRT, target: str) -> tuple[str, Any]:
    """(target name, compute capability or None). Full TensorRT accepts `native` or the architecture of its GPU.

    Raises OptionError naming the targets for one that cannot be built.
    """
    name = target.strip().lower().replace(".", "").replace("_", "")
    if library.cross_compiles:
        members = library.module.ComputeCapability.__members__
        known = [t for t in TARGETS if t.upper() in members]
        if name not in known:
            raise OptionError(
                f"unknown target {target!r} for {library.backend}; choose one of {', '.join(known)}"
            )
        return name, members[name.upper()]
    local = local_architecture()
    if local is None:
        raise ExportError(
            f"{library.backend} builds on the GPU that the plans are for, and no CUDA device was found here"
        )
    if name not in (NATIVE, local):
        raise OptionError(
            f"--target {target} cannot be built here: {library.backend} builds for this GPU, {local} (or `native`)"
        )
    return local, None


def local_cuda() -> Versions | None:
    """The CUDA of this machine, or None without a GPU."""
    try:
        return Cuda.open().versions()
    except DeviceError:
        return None


def local_architecture() -> str | None:
    """`sm<major><minor>` of CUDA device 0, or None without a driver."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    if cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), 0):
        return None
    cuda.cuDeviceGetAttribute(ctypes.byref(major), 75, device)  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
    cuda.cuDeviceGetAttribute(ctypes.byref(minor), 76, device)
    return f"sm{major.value}{minor.value}"
