"""Environments of their own for programs that do not fit the project's: in the user's cache, made once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from filelock import FileLock


def own_environment(name: str, wheels: Sequence[str], *options: str) -> Path:
    """The folder of an environment with these wheels; `options` of pip. Skips the test where they cannot be installed."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vlmexport-tests"
    cache.mkdir(parents=True, exist_ok=True)
    name = f"{name}-{sys.version_info.major}.{sys.version_info.minor}"
    folder, whole = cache / name, cache / f"{name}.txt"
    with FileLock(cache / f"{name}.lock"):
        if whole.exists() and whole.read_text("utf-8").split("\n") == [*wheels]:
            return folder
        whole.unlink(missing_ok=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        done = subprocess.run([*pip, *options, *wheels], capture_output=True, text=True, check=False)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["pip failed"])[-1]
            pytest.skip(f"{wheels[0]} cannot be installed: {last}")
        whole.write_text("\n".join(wheels), "utf-8")
    return folder
