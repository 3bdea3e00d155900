"""What a result was made by."""

from __future__ import annotations

import datetime
import platform
import shlex
import sys
from importlib import metadata
from pathlib import Path
from typing import Any


def provenance() -> dict[str, Any]:
    """Command, versions, time; no paths of the interpreter and no user names."""
    versions = {"python": platform.python_version()}
    for name in ("vlmexport", "torch", "transformers", "accelerate"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "unknown"
    return {
        "command": shlex.join([*_program(), *sys.argv[1:]]),
        "versions": versions,
        "machine": f"{platform.system()} {platform.machine()}",
        "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def _program() -> list[str]:
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    if spec is not None:
        return ["python", "-m", spec.name.removesuffix(".__main__")]
    name = Path(sys.argv[0]).name
    return ["python", name] if name.endswith(".py") else [name]
