"""The CUDA runtime by ctypes: memory, one stream's work, captured work. Nothing is loaded before `Cuda.open`.

A process needs the driver and libcudart, of CUDA 12 or 13: from the system, or from NVIDIA's pip packages.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Iterator, Sequence
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_ulonglong, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..common.errors import CapacityError, DeviceError
from ..common.foreign_errors import raise_if_foreign
from .out_of_memory import LESS_ON_A_GPU

UP, DOWN, WITHIN = 1, 2, 3
"""Directions of a copy: host to device, device to host, on the device (`cudaMemcpyKind`)."""

NAMES = ("libcudart.so.13", "libcudart.so.12", "libcudart.so")
"""The system's, newest first."""

DRIVER = "libcuda.so.1"

PACKAGES = (("cu13", "lib", "libcudart.so.13"), ("cuda_runtime", "lib", "libcudart.so.12"))
"""Where the pip packages nvidia-cuda-runtime and nvidia-cuda-runtime-cu12 have theirs, below `nvidia`."""

INSTALL = "pip install nvidia-cuda-runtime (CUDA 13) or nvidia-cuda-runtime-cu12"

OUT_OF_MEMORY, OLD_DRIVER, NO_DEVICE = 2, 35, 100
_MAJOR, _MINOR = 75, 76  # cudaDevAttrComputeCapability*
_NON_BLOCKING, _THREAD_LOCAL = 1, 1
_PROPERTIES = 1 << 14
"""Bytes for a `cudaDeviceProp` of any version, whose first 256 are the device's name."""

PROTOTYPES: dict[str, tuple[Any, ...]] = {
    "cudaDriverGetVersion": (POINTER(c_int),),
    "cudaRuntimeGetVersion": (POINTER(c_int),),
    "cudaGetDeviceCount": (POINTER(c_int),),
    "cudaGetDevice": (POINTER(c_int),),
    "cudaDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cudaGetDeviceProperties": (c_void_p, c_int),
    "cudaMalloc": (POINTER(c_void_p), c_size_t),
    "cudaFree": (c_void_p,),
    "cudaHostAlloc": (POINTER(c_void_p), c_size_t, c_uint),
    "cudaFreeHost": (c_void_p,),
    "cudaMemsetAsync": (c_void_p, c_int, c_size_t, c_void_p),
    "cudaMemcpyAsync": (c_void_p, c_void_p, c_size_t, c_int, c_void_p),
    "cudaStreamCreateWithFlags": (POINTER(c_void_p), c_uint),
    "cudaStreamDestroy": (c_void_p,),
    "cudaStreamSynchronize": (c_void_p,),
    "cudaStreamBeginCapture": (c_void_p, c_int),
    "cudaStreamEndCapture": (c_void_p, POINTER(c_void_p)),
    "cudaGraphInstantiateWithFlags": (POINTER(c_void_p), c_void_p, c_ulonglong),
    "cudaGraphDestroy": (c_void_p,),
    "cudaGraphExecDestroy": (c_void_p,),
    "cudaGraphLaunch": (c_void_p, c_void_p),
}
"""Arguments of every call; each returns a `cudaError_t`."""


@dataclass(frozen=True)
class Gpu:
    """The device of this process."""

    name: str
    architecture: str
    """Compute capability as plans are named after it: sm86."""


@dataclass(frozen=True)
class Versions:
    """Of CUDA, as 13.0: the newest that the driver knows, and that of the runtime library."""

    driver: str
    runtime: str


class Cuda:
    """The calls that an engine makes. Addresses, streams and captured work are integers; streams are in order.

    Every method raises `DeviceError` with CUDA's own words where a call fails.
    """

    def __init__(self, library: Any):
        """`library` is a loaded libcudart, or what stands in for it."""
        self._library = library
        for name, arguments in PROTOTYPES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, c_int
        library.cudaGetErrorString.argtypes, library.cudaGetErrorString.restype = (c_int,), c_char_p

    @classmethod
    def open(cls) -> Cuda:
        """The CUDA runtime of this machine, with a device. Raises `DeviceError` naming what is missing."""
        for place in _places():
            try:
                cuda = cls(ctypes.CDLL(place))
            except (OSError, AttributeError) as error:  # not there, or of a CUDA that is too old
                raise_if_foreign(error)
                continue
            cuda._need_a_device(place)
            return cuda
        raise DeviceError(f"the CUDA runtime ({', '.join(NAMES)}) was not found: {INSTALL}")

    def gpu(self) -> Gpu:
        """The current device."""
        device, major, minor = c_int(), c_int(), c_int()
        self._call("cudaGetDevice", byref(device))
        self._call("cudaDeviceGetAttribute", byref(major), _MAJOR, device)
        self._call("cudaDeviceGetAttribute", byref(minor), _MINOR, device)
        properties = ctypes.create_string_buffer(_PROPERTIES)
        self._call("cudaGetDeviceProperties", properties, device)
        return Gpu(properties.value.decode("utf-8", "replace"), f"sm{major.value}{minor.value}")

    def versions(self) -> Versions:
        """What is here of CUDA."""
        versions = []
        for name in ("cudaDriverGetVersion", "cudaRuntimeGetVersion"):
            number = c_int()
            self._call(name, byref(number))
            versions.append(f"{number.value // 1000}.{number.value % 1000 // 10}")
        return Versions(*versions)

    # --- memory ---

    def allocate(self, name: str, nbytes: int) -> int:
        """Memory of the device at an address that is a multiple of 256; it holds anything. Raises `CapacityError`
        without memory."""
        return self._allocated("the GPU has", name, nbytes, "cudaMalloc", c_size_t(max(1, nbytes)))

    def free(self, address: int) -> None:
        """Give memory of the device back; waits for the device, so not in a capture."""
        self._call("cudaFree", address)

    def allocate_host(self, name: str, nbytes: int) -> int:
        """Page-locked memory of the host, which transfers need to be asynchronous or captured."""
        size = c_size_t(max(1, nbytes))
        return self._allocated("there is", name, nbytes, "cudaHostAlloc", size, 0)

    def free_host(self, address: int) -> None:
        """Give page-locked memory back."""
        self._call("cudaFreeHost", address)

    # --- work of a stream ---

    def create_stream(self) -> int:
        """A stream that does not wait for the default one."""
        return self._made("cudaStreamCreateWithFlags", _NON_BLOCKING)

    def destroy_stream(self, stream: int) -> None:
        """Give a stream back."""
        self._call("cudaStreamDestroy", stream)

    def synchronise(self, stream: int) -> None:
        """Wait until everything in the stream is done."""
        self._call("cudaStreamSynchronize", stream)

    def fill(self, address: int, value: int, nbytes: int, stream: int) -> None:
        """Set every byte of a part of the device's memory."""
        self._call("cudaMemsetAsync", address, value, nbytes, stream)

    def copy(self, target: int, source: int, nbytes: int, direction: int, stream: int) -> None:
        """Copy bytes. From memory of the host that is not page-locked they are taken before this returns; to such memory
        they have come when it returns."""
        self._call("cudaMemcpyAsync", target, source, nbytes, direction, stream)

    # --- captured work ---

    def begin_capture(self, stream: int) -> None:
        """Collect what this thread puts into the stream instead of doing it."""
        self._call("cudaStreamBeginCapture", stream, _THREAD_LOCAL)

    def end_capture(self, stream: int) -> int:
        """What was collected, ready to be launched."""
        graph, ready = c_void_p(), c_void_p()
        self._call("cudaStreamEndCapture", stream, byref(graph))
        try:
            self._call("cudaGraphInstantiateWithFlags", byref(ready), graph, 0)
        finally:
            self._call("cudaGraphDestroy", graph)
        return ready.value or 0

    def launch(self, captured: int, stream: int) -> None:
        """Put everything that was collected into the stream."""
        self._call("cudaGraphLaunch", captured, stream)

    def free_captured(self, captured: int) -> None:
        """Forget what was collected."""
        self._call("cudaGraphExecDestroy", captured)

    # --- kernels, by the driver ---

    def load_kernels(self, code: bytes, *names: str) -> dict[str, int]:
        """Functions by name of a program in PTX, which the driver compiles for its GPU."""
        driver = self._driver = _driver()
        module, functions = c_void_p(), {}
        _check(driver, "cuModuleLoadData", driver.cuModuleLoadData(byref(module), code + b"\0"))
        for name in names:
            function = c_void_p()
            code_of = driver.cuModuleGetFunction(byref(function), module, name.encode())
            _check(driver, f"cuModuleGetFunction of {name}", code_of)
            functions[name] = function.value or 0
        return functions

    def run_kernel(
        self, function: int, blocks: tuple[int, int], threads: int, arguments: Sequence[Any], stream: int
    ) -> None:
        """Put a kernel over `blocks` (x, y) of `threads` each into the stream; `arguments` are ctypes numbers, which are
        taken before this returns."""
        places = (c_void_p * len(arguments))(*(ctypes.addressof(each) for each in arguments))
        launched = self._driver.cuLaunchKernel(
            c_void_p(function), *blocks, 1, threads, 1, 1, 0, c_void_p(stream), places, None
        )
        _check(self._driver, "cuLaunchKernel", launched)

    # --- private ---

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            raise DeviceError(f"CUDA: {name} failed: {self._words(code)}")

    def _words(self, code: int) -> str:
        return f"{self._library.cudaGetErrorString(code).decode('utf-8', 'replace')} ({code})"

    def _made(self, name: str, *arguments: Any) -> int:
        handle = c_void_p()
        self._call(name, byref(handle), *arguments)
        return handle.value or 0

    def _allocated(self, who: str, what: str, nbytes: int, call: str, *arguments: Any) -> int:
        address = c_void_p()
        code = getattr(self._library, call)(byref(address), *arguments)
        if code == OUT_OF_MEMORY:
            raise CapacityError(f"{who} no memory for {what!r} ({nbytes / 1e9:.1f} GB); {LESS_ON_A_GPU}")
        if code:
            raise DeviceError(f"CUDA: {call} failed: {self._words(code)}")
        return address.value or 0

    def _need_a_device(self, place: str) -> None:
        count = c_int()
        code = self._library.cudaGetDeviceCount(byref(count))
        if code == 0 and count.value:
            return
        if code == OLD_DRIVER:
            raise DeviceError(
                f"there is no NVIDIA driver, or it is older than {place} needs: install the GPU's driver, or the CUDA runtime "
                f"that fits it: {INSTALL}"
            )
        reason = "" if code in (0, NO_DEVICE) else f" ({self._words(code)})"
        raise DeviceError(
            f"no NVIDIA GPU was found{reason}; `nvidia-smi` lists them; use device 'cpu' without one"
        )


def _driver() -> Any:
    try:
        driver = ctypes.CDLL(DRIVER)
    except OSError as error:
        raise_if_foreign(error)
        raise DeviceError(
            f"the NVIDIA driver ({DRIVER}) cannot be loaded: install the GPU's driver"
        ) from error
    driver.cuModuleLoadData.argtypes = (POINTER(c_void_p), c_char_p)
    driver.cuModuleGetFunction.argtypes = (POINTER(c_void_p), c_void_p, c_char_p)
    driver.cuLaunchKernel.argtypes = (c_void_p, *[c_uint] * 7, c_void_p, POINTER(c_void_p), POINTER(c_void_p))
    return driver


def _check(driver: Any, what: str, code: int) -> None:
    if code:
        words = c_char_p()
        driver.cuGetErrorString(code, byref(words))
        message = (words.value or b"unknown error").decode("utf-8", "replace")
        raise DeviceError(f"CUDA: {what} failed: {message} ({code})")


def _places() -> Iterator[str]:
    yield from NAMES
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or ()) if spec is not None else ():
        for parts in PACKAGES:
            path = Path(root).joinpath(*parts)
            if path.exists():
                yield str(path)
