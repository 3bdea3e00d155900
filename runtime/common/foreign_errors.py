"""Whose an exception is: a library's, which becomes an error of ours, or the program's own, which passes untouched.

A program's exception gets into a call of a library in two ways: a signal handler raises it while the library works (a
timeout by SIGALRM), or code of the caller that the library calls does (a stream, a policy). Its class says nothing: a
handler may raise `TimeoutError`, which is an `OSError`, or a bare `RuntimeError`. Its traceback does: behind our frame,
which called the library, stands a frame that is neither ours, nor the library's, nor the standard library's.

What C code raises leaves no frame, so that it counts as the library's. So does what a handler raises that is written in C.
"""

from __future__ import annotations

import functools
import signal
import sys
import traceback
from pathlib import PurePath
from types import CodeType, FrameType
from typing import Any

from .optional_deps import MODULES

_OURS = __name__.partition(".")[0]

_LIBRARIES = frozenset(
    (
        _OURS, *sys.stdlib_module_names, "numpy", "PIL", "tokenizers", "jinja2", "markupsafe", "onnxruntime", "typer",
        "click", "rich", "filelock", "tensorrt", "tensorrt_rtx", "tensorrt_bindings", "tensorrt_libs", "tensorrt_rtx_libs",
        "huggingface_hub", "tqdm", "regex", "requests", "httpx", "yaml", "torchvision", "sympy",
        *(module for modules in MODULES.values() for module in modules),
    )
)  # fmt: skip
"""Top-level modules whose exceptions are a library's."""

_INSTALLED = frozenset(("site-packages", "dist-packages"))
"""Folders of installed packages."""

_TEMPLATES = ("<template>", "<unknown>")
"""File names of the code that jinja2 makes of a chat template, and of the tracebacks that it writes anew."""


def raise_if_foreign(error: BaseException) -> None:
    """Raise `error` again unless a library or we raised it. To be called first where a library's exception is
    translated or dropped, in the frame that called the library."""
    if is_foreign(error):
        raise error


def is_foreign(error: BaseException) -> bool:
    """Whether the program that uses us raised `error`: see the module. Of an exception that a library raised from
    another one (`raise … from`), both count."""
    if from_signal_handler(error):  # also one of a program that is installed beside the libraries
        return True
    current: BaseException | None = error
    while current is not None:
        # From the frame that caught it, which is ours, or a library's in the case of a cause.
        if not all(_known(frame) for frame, _ in traceback.walk_tb(current.__traceback__)):
            return True
        current = current.__cause__
    return False


def from_signal_handler(error: BaseException) -> bool:
    """Whether a signal handler raised `error`: for calls of the caller's own code whose other exceptions are ours to
    translate. Handlers are known while they are installed; those that are written in C are not found."""
    handlers = {_code(signal.getsignal(number)) for number in signal.valid_signals()}
    return any(frame.f_code in handlers for frame, _ in traceback.walk_tb(error.__traceback__))


def _code(handler: Any) -> CodeType | None:
    """The code of a function, a method, a `partial` of one, or of an object that can be called."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    code = getattr(handler, "__code__", None)  # also of a method
    return code if code is not None else getattr(getattr(type(handler), "__call__", None), "__code__", None)  # noqa: B004


def _known(frame: FrameType) -> bool:
    name, file = frame.f_globals.get("__name__"), frame.f_code.co_filename
    if isinstance(name, str) and name.partition(".")[0] in _LIBRARIES:
        return True
    # Frames of Cython (PyAV) belong to no module; their file is the one that was compiled, "av/container/core.pyx".
    if file in _TEMPLATES or (name is None and file.partition("/")[0] in _LIBRARIES):
        return True
    # What libraries build on is theirs, too: nobody can list it.
    return not _INSTALLED.isdisjoint(PurePath(file).parts)
