"""Size and import time of a runtime-only installation in a new virtual environment: `pip install .`, and the lean one
of `requirements-lean.txt`.

    python -m benchmarks.installation
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path
from typing import Any

from benchmarks.machine import save

ROOT = Path(__file__).parents[1]
NOT_COUNTED = ("pip", "setuptools", "pkg_resources", "_distutils_hack")
IMPORT = (
    "import time; b=time.perf_counter(); from vlmexport.runtime import Session; print(time.perf_counter()-b)"
)


def installed(*arguments: str | Path) -> dict[str, Any]:
    """What `pip install` with these arguments gives."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = Path(folder) / ("Scripts" if sys.platform == "win32" else "bin") / "python"
        begin = time.perf_counter()
        command = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        subprocess.run([*command, "-c", ROOT / "constraints.txt", *arguments, ROOT], check=True)
        seconds = time.perf_counter() - begin
        site = next(Path(folder).glob("[Ll]ib*/**/site-packages"))
        sizes = {
            entry.name: sum(
                f.stat().st_size
                for f in (entry.rglob("*") if entry.is_dir() else [entry])
                if f.is_file() and f.suffix != ".pyc"
            )
            for entry in site.iterdir()
            if not entry.name.startswith(NOT_COUNTED)
        }
        times = [float(subprocess.check_output([python, "-c", IMPORT], cwd=folder)) for _ in range(7)]
    biggest = sorted(sizes.items(), key=lambda item: -item[1])[:6]
    return {
        "megabytes_without_pip_and_bytecode": round(sum(sizes.values()) / 1e6, 1),
        "packages": sum(name.endswith(".dist-info") for name in sizes),
        "largest_megabytes": {name: round(size / 1e6, 1) for name, size in biggest},
        "install_seconds": round(seconds, 1),
        "import_seconds": {
            "first": round(times[0], 3),
            "median_of_the_rest": round(statistics.median(times[1:]), 3),
        },
    }


def main() -> None:
    result = {
        "script": "benchmarks/installation.py",
        **installed(),
        "lean": installed("--no-deps", "-r", ROOT / "requirements-lean.txt"),
    }
    print(json.dumps(result, indent=1))
    print(save("installation", result))


if __name__ == "__main__":
    main()
