"""Finding TensorRT, the full library or TensorRT-RTX, and keeping what it says of an error."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from ..common.foreign_errors import raise_if_foreign
from ..common.optional_deps import install_command

LEAN = "tensorrt_lean"
"""The module that runs plans which were built for it, and builds none."""

MODULES = {
    "tensorrt": (("tensorrt",),),
    # The first of the two loads the shared libraries that the bindings need.
    "tensorrt-rtx": (("tensorrt_rtx_libs", "tensorrt_rtx_bindings"), ("tensorrt_rtx",)),
}
"""Backend → modules that are imported together, in the order in which they are tried; the last of them has the API."""

DTYPES = {
    "FLOAT": "float32", "HALF": "float16", "BF16": "bfloat16", "INT32": "int32", "INT64": "int64", "BOOL": "bool",
    "INT8": "int8", "UINT8": "uint8",
}  # fmt: skip
"""TensorRT's name of a type → the manifest's."""


def installed(backend: str) -> bool:
    """Whether a module of the backend is here; nothing is imported."""
    return (backend == "tensorrt" and _is_installed(LEAN)) or any(
        all(_is_installed(name) for name in names) for names in MODULES[backend]
    )


def import_library(backend: str, lean: bool = False) -> Any:
    """The module with a backend's API; with `lean` that of the lean runtime. Raises `ModuleNotFoundError` naming the first
    that is missing, and whatever its import raises."""
    missing: ModuleNotFoundError | None = None
    for names in ((LEAN,),) if lean else MODULES[backend]:
        try:
            return [importlib.import_module(name) for name in names][-1]
        except ModuleNotFoundError as error:
            missing = missing or error
    assert missing is not None
    raise missing


def numbers(version: str, count: int) -> tuple[int, ...]:
    """`10.3.0.30` → (10, 3, 0): the first `count`."""
    return tuple(int(part) if part.isdigit() else 0 for part in version.split(".")[:count])


def make_logger(trt: Any) -> Any:
    """A TensorRT logger that collects errors in `.errors` and prints nothing."""

    class Collector(trt.ILogger):
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR):
                self.errors.append(message)

    return Collector()


def first_error(messages: list[str]) -> str:
    """The message that explains a failure, in one line; complaints about a missing GPU are not it."""
    useful = [
        m
        for m in messages
        if "cudaError" not in m and "Begin node" not in m and "End node" not in m and m.strip()
    ]
    text = (useful or messages or ["no reason given"])[0]
    return " ".join(text.split())[:400]


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError) as error:
        raise_if_foreign(error)
        return False


def install_hint(backend: str) -> str:
    """How the full runtime of a backend is installed."""
    return install_command(backend) + ("" if backend == "tensorrt-rtx" else " (JetPack brings it along)")


def first_line(error: BaseException) -> str:
    """Of an error's text, or its class where it has none."""
    return (str(error).splitlines() or [type(error).__name__])[0]
