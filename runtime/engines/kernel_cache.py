"""Kernels that TensorRT-RTX compiled, kept between processes in a folder that the user names: a file for each plan.

They are programs for the GPU, like plans: a folder of one's own. TensorRT compares what it is given with its version, the GPU
and the driver, and compiles anew where they differ.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from ..common.atomic_files import atomic_write
from ..common.errors import OptionError
from ..common.foreign_errors import raise_if_foreign
from ..common.paths import path_text

log = logging.getLogger(__name__)

LIMIT = 1 << 30
"""Bytes of a file that is read."""


class KernelCache:
    """The files of one folder. One that cannot be read or written costs time, and nothing else."""

    def __init__(self, folder: Path):
        """Makes the folder. Raises `OptionError` where that cannot be."""
        self._folder = Path(folder)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except (OSError, ValueError) as error:  # also a name that no folder can have
            raise_if_foreign(error)
            why = getattr(error, "strerror", None) or error
            raise OptionError(f"kernel cache {path_text(folder)}: cannot be made ({why})") from error
        self._held: dict[Path, tuple[Any, bytes]] = {}

    def attach(self, config: Any, plan_sha256: str) -> None:
        """Let contexts that are made with `config` take kernels of a plan from its file, and keep new ones for it."""
        path = self._folder / f"{plan_sha256}.kernels"
        if path not in self._held:
            cache, data = config.create_runtime_cache(), b""
            try:
                if path.is_file() and path.stat().st_size <= LIMIT:
                    data = path.read_bytes()
            except OSError as error:
                raise_if_foreign(error)
                log.warning("kernel cache %s cannot be read: %s", path, error)
            if data and not cache.deserialize(data):
                log.debug("kernel cache %s is of another GPU, driver or TensorRT", path)
                data = b""
            self._held[path] = (cache, data)
        config.set_runtime_cache(self._held[path][0])

    def save(self) -> None:
        """Write the files of plans for which kernels were compiled."""
        for path, (cache, before) in self._held.items():
            now = bytes(memoryview(cache.serialize()))
            if now == before:
                continue
            try:
                with atomic_write(path) as out:
                    out.write(now)
            except OSError as error:
                raise_if_foreign(error)
                log.warning("kernel cache %s cannot be written: %s", path, error)
        self._held.clear()
