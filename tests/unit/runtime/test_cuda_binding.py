"""The binding of the CUDA runtime: what arrives at the library, and what an error says. No GPU is needed."""

from __future__ import annotations

import ctypes
from ctypes import CFUNCTYPE, c_int, c_void_p
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from vlmexport.runtime.common.errors import CapacityError, DeviceError
from vlmexport.runtime.engines import cuda as binding
from vlmexport.runtime.engines.cuda import DOWN, PROTOTYPES, UP, Cuda, Gpu, Versions

MADE = 0x7F00
"""What every call gives that gives a number."""

ATTRIBUTES = {75: 8, 76: 7}


class Library:
    """C functions with CUDA's arguments, which note what they were given; `codes` says which of them fail."""

    def __init__(self, **codes: int) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self._codes = codes
        for name, arguments in PROTOTYPES.items():
            setattr(self, name, CFUNCTYPE(c_int, *arguments)(self._noting(name)))
        words = self._words = ctypes.create_string_buffer(b"out of luck")
        self.cudaGetErrorString = CFUNCTYPE(c_void_p, c_int)(lambda code: ctypes.addressof(words))

    def _noting(self, name: str) -> Any:
        def called(*arguments: Any) -> int:
            self.calls.append((name, *(each for each in arguments if not hasattr(each, "contents"))))
            for each in arguments:
                if hasattr(each, "contents"):
                    each[0] = ATTRIBUTES.get(arguments[1], 0) if name == "cudaDeviceGetAttribute" else MADE
            if name == "cudaGetDevice":
                arguments[0][0] = 0
            if name == "cudaGetDeviceProperties":
                ctypes.memmove(arguments[0], b"Orin\0", 5)
                self.calls.pop()
            return self._codes.get(name, 0)

        return called


def test_arguments_reach_the_cuda_library() -> None:
    library = Library()
    cuda = Cuda(library)
    stream = cuda.create_stream()
    assert stream == cuda.allocate("a", 100) == cuda.allocate_host("b", 7) == MADE
    cuda.copy(1, 2, 3, UP, stream)
    cuda.copy(4, 5, 1 << 33, DOWN, stream)
    cuda.fill(6, 0, 9, stream)
    cuda.synchronise(stream)
    cuda.begin_capture(stream)
    assert cuda.end_capture(stream) == MADE
    cuda.launch(11, stream)
    cuda.free_captured(11)
    cuda.free(12)
    cuda.free_host(13)
    cuda.destroy_stream(stream)
    assert library.calls == [
        ("cudaStreamCreateWithFlags", 1),
        ("cudaMalloc", 100),
        ("cudaHostAlloc", 7, 0),
        ("cudaMemcpyAsync", 1, 2, 3, 1, MADE),
        ("cudaMemcpyAsync", 4, 5, 1 << 33, 2, MADE),
        ("cudaMemsetAsync", 6, 0, 9, MADE),
        ("cudaStreamSynchronize", MADE),
        ("cudaStreamBeginCapture", MADE, 1),
        ("cudaStreamEndCapture", MADE),
        ("cudaGraphInstantiateWithFlags", MADE, 0),
        ("cudaGraphDestroy", MADE),
        ("cudaGraphLaunch", 11, MADE),
        ("cudaGraphExecDestroy", 11),
        ("cudaFree", 12),
        ("cudaFreeHost", 13),
        ("cudaStreamDestroy", MADE),
    ]


def test_gpu_properties() -> None:
    assert Cuda(Library()).gpu() == Gpu("Orin", "sm87")


def test_versions_of_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library()

    def told(number: int) -> Any:
        def call(place: Any) -> int:
            place[0] = number
            return 0

        return CFUNCTYPE(c_int, ctypes.POINTER(c_int))(call)

    library.cudaDriverGetVersion, library.cudaRuntimeGetVersion = told(13010), told(12060)
    assert Cuda(library).versions() == Versions("13.1", "12.6")
    with pytest.raises(DeviceError, match="cudaDriverGetVersion failed"):
        Cuda(Library(cudaDriverGetVersion=3)).versions()


def test_out_of_memory_names_the_purpose() -> None:
    cuda = Cuda(Library(cudaMalloc=2, cudaHostAlloc=2))
    with pytest.raises(
        CapacityError,
        match=r"no memory for 'key_cache.0' \(3.0 GB\); load with a smaller max_length.* --max-batch or in fp16",
    ):
        cuda.allocate("key_cache.0", 3_000_000_000)
    with pytest.raises(CapacityError, match="no memory for 'staging'"):
        cuda.allocate_host("staging", 8)


def test_other_errors_quote_cuda() -> None:
    cuda = Cuda(Library(cudaStreamSynchronize=700, cudaMalloc=700))
    with pytest.raises(DeviceError, match=r"cudaStreamSynchronize failed: out of luck \(700\)"):
        cuda.synchronise(1)
    with pytest.raises(DeviceError, match=r"cudaMalloc failed: out of luck \(700\)"):
        cuda.allocate("a", 1)


def test_failed_instantiation_frees_the_capture() -> None:
    library = Library(cudaGraphInstantiateWithFlags=1)
    with pytest.raises(DeviceError, match="cudaGraphInstantiateWithFlags"):
        Cuda(library).end_capture(1)
    assert library.calls[-1] == ("cudaGraphDestroy", MADE)


@pytest.mark.parametrize(
    ("code", "said"),
    [(35, "no NVIDIA driver, or it is older than"), (100, "no NVIDIA GPU was found; `nvidia-smi`"),
     (3, r"no NVIDIA GPU was found \(out of luck \(3\)\)")],
)  # fmt: skip
def test_a_machine_without_a_gpu(monkeypatch: pytest.MonkeyPatch, code: int, said: str) -> None:
    monkeypatch.setattr(binding.ctypes, "CDLL", lambda place: Library(cudaGetDeviceCount=code))
    with pytest.raises(DeviceError, match=said) as caught:
        Cuda.open()
    assert "\n" not in str(caught.value)


def test_a_machine_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binding.ctypes, "CDLL", Mock(side_effect=OSError("no such library")))
    with pytest.raises(
        DeviceError, match=r"\(libcudart.so.13, .*\) was not found: pip install nvidia-cuda-runtime"
    ):
        Cuda.open()


def test_the_pip_packages_are_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for parts in binding.PACKAGES:
        path = tmp_path.joinpath("nvidia", *parts)
        path.parent.mkdir(parents=True)
        path.touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    places = list(binding._places())
    assert places[:3] == list(binding.NAMES)
    assert {Path(place).name for place in places[3:]} == {"libcudart.so.13", "libcudart.so.12"}


def test_the_library_of_this_machine_has_every_call() -> None:
    for place in binding._places():
        try:
            library = ctypes.CDLL(place)
        except OSError:
            continue
        Cuda(library)
        return
    pytest.skip("needs libcudart (no GPU)")
