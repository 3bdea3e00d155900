"""What a result was made by."""

from __future__ import annotations

import datetime
import platform
import shlex
import sys
from importlib import metadata
from typing import Any


def provenance() -> dict[str, Any]:
    """Command, versions, time; no paths of the interpreter and no user names."""
    versions = {"python": platform.python_version()}
    for name in ("vlmexport", "torch", "transformers", "accelerate"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "unknown"
    command = ["vlmexport" if sys.argv[0].endswith(("vlmexport", ".py")) else sys.argv[0], *sys.argv[1:]]
    return {
        "command": shlex.join(command),
        "versions": versions,
        "machine": f"{platform.system()} {platform.machine()}",
        "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }
