"""What a figure was measured on."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

from ..common.cpu_count import cores
from ..common.foreign_errors import raise_if_foreign

PACKAGES = ("vlmexport", "numpy", "onnxruntime", "onnxruntime-gpu")


def describe(computes: str | None = None) -> dict[str, Any]:
    """Processor, cores, load at the moment, system and versions; `gpu` where what `computes` is not the processor."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    load: float | None = None
    if hasattr(os, "getloadavg"):
        try:
            load = round(os.getloadavg()[0], 2)
        except OSError as error:
            raise_if_foreign(error)
    return {
        "cpu": processor(),
        "cores": cores(),
        "load": load,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": versions,
        **({} if computes in (None, processor()) else {"gpu": computes}),
    }


BUSY = "The machine was busy with other work: the figures are lower than it can do."


def busy(machine: dict[str, Any]) -> bool:
    """Whether a `describe`d machine had more to do than it has cores."""
    return machine["load"] is not None and machine["load"] > machine["cores"]


@functools.cache
def processor() -> str:
    """Name of the processor: what stored pass times are found by."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith(("model name", "Model")) and ":" in line:
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
