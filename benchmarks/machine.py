"""What a figure was measured on, and where result files go."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def processor() -> str:
    """Its name, without vlmexport, which is not in every environment that is measured."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if "model name" in line]
    return names[0] if names else platform.processor()


def describe(*packages: str) -> dict[str, Any]:
    """Processor, cores, the GPU that PyTorch has, versions of ``packages`` and the git revision."""
    revision = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent
    ).stdout.strip()
    versions = {}
    for package in ("vlmexport", "numpy", "onnxruntime", *packages):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return {
        "cpu": processor(),
        "cores": len(os.sched_getaffinity(0)),
        **_torch_gpu(),
        "python": platform.python_version(),
        "versions": versions,
        "revision": revision,
        "measured": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }


def _torch_gpu() -> dict[str, str]:
    """The GPU that PyTorch finds, of a process that uses PyTorch."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return {}
    return {"gpu": torch.cuda.get_device_name()}


def stored(name: str, key: str) -> Any:
    """What an earlier run wrote under `key` of ``results/<name>.json``; {} where there is none."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text("utf-8")).get(key, {}) if path.exists() else {}


def save(name: str, result: dict[str, Any], *packages: str) -> Path:
    """Write ``results/<name>.json`` with the machine beside the figures."""
    return write(RESULTS / f"{name}.json", result, *packages)


def write(path: Path, result: dict[str, Any], *packages: str) -> Path:
    """Write ``path`` with the machine beside the figures."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": describe(*packages), **result}, indent=1) + "\n")
    return path
