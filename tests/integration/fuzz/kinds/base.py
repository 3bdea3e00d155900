"""What the kinds share: commands as cases, and where seeds come from."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable
from pathlib import Path


def command(*arguments: object) -> Callable[[], int]:
    """A command of `vlmexport` in this process."""

    def serve() -> int:
        from vlmexport.runtime.cli import main

        return main([str(argument) for argument in arguments])

    return serve


def answer_of(*arguments: object) -> str:
    """What a command prints that must succeed; for references."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        status = command(*arguments)()
    assert status == 0, f"{arguments} ends with {status}"
    return printed.getvalue()


def call(function: Callable[[], object]) -> Callable[[], int]:
    """A function of the API as a command: its own errors are one line and status 2, as a command makes them."""

    def serve() -> int:
        from vlmexport.runtime.common.errors import VlmexportError
        from vlmexport.runtime.images.quiet import quiet_log

        quiet_log()
        try:
            function()
        except VlmexportError as error:
            sys.stderr.write(f"vlmexport: {' '.join(str(error).split())}\n")
            return 2
        return 0

    return serve


def picture(path: Path, size: tuple[int, int] = (41, 30), mode: str = "RGB") -> Path:
    """A small picture with edges; the format is that of the suffix."""
    import numpy as np
    from PIL import Image

    values = np.random.default_rng(7).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    values[5:12, 8:30] = (200, 30, 30)
    Image.fromarray(values).convert(mode).save(path)
    return path
