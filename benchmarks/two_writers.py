"""Two processes that change one bundle's manifest at once, while a third reads it, again and again.

    python -m benchmarks.two_writers --runs 200

Each run is of its own bundle, which holds no model. Two forks store CHANGES entries each, of pass times and of acceptance
in turn, while the parent opens the bundle as often as it can. A run is right when every reader found a whole manifest with
its checksum, every entry is there, and nothing else is left in the folder. What went wrong is printed and saved.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.machine import save
from tests.support.forks import forked

CHANGES = 60
"""Of one process."""

SEEN = {
    "shapes": [[4, 4, 9]],
    "accepted": [6, 3],
    "discarded": 0,
    "requests": 1,
    "data": "d",
    "date": "2026-01-01",
}


def change(bundle: Path, writer: str, rng: random.Random) -> int:
    """What one process stores; its exit status."""
    from vlmexport.runtime.bundle.manifest_changes import store_costs

    for number in range(CHANGES):
        if number % 2:
            store_costs(bundle, [], [{"draft": writer, "nodes": number, "depth": 1, **SEEN}])
        else:
            store_costs(
                bundle, [{"machine": f"{writer}{number}", "threads": 1, "plain": {"1": rng.random()}}]
            )
    return 0


def run(bundle: Path, seed: int) -> tuple[list[str], int]:
    """(what went wrong, how often the bundle was read)."""
    from vlmexport.runtime.bundle.folder import Bundle
    from vlmexport.runtime.common.errors import VlmexportError

    writers = [partial(change, bundle, writer, random.Random(f"{seed}{writer}")) for writer in "AB"]
    children, wrong, reads = [forked(writer) for writer in writers], [], 0
    while children:
        try:
            Bundle.open(bundle, check="sha256")
            reads += 1
        except VlmexportError as error:
            wrong.append(f"a reader: {error}")
        for child in list(children):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                children.remove(child)
                if status:
                    wrong.append(f"a writer ends with {status}")
    manifest = Bundle.open(bundle, check="sha256").manifest
    stored = {entry["machine"] for entry in manifest.costs} | {
        f"{entry['draft']}{entry['nodes']}" for entry in manifest.acceptance
    }
    missing = {f"{writer}{number}" for writer in "AB" for number in range(CHANGES)} - stored
    wrong += [f"{name} is not there" for name in sorted(missing)]
    wrong += [f"{path.name} is left" for path in bundle.iterdir() if path.name.startswith(".")]
    return wrong, reads


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=200)
    options = parser.parse_args()
    from tests.support import handmade_bundle

    begin, reads, failures = time.monotonic(), 0, []
    with tempfile.TemporaryDirectory() as folder:
        whole = handmade_bundle.write_bundle(Path(folder) / "whole")
        for number in range(options.runs):
            bundle = Path(shutil.copytree(whole, Path(folder) / "bundle"))
            wrong, read = run(bundle, number)
            reads += read
            if wrong:
                failures.append({"run": number, "wrong": wrong})
                print(f"run {number}: {wrong}", flush=True)
            shutil.rmtree(bundle)
    result: dict[str, Any] = {
        "runs": options.runs, "changes": 2 * CHANGES * options.runs, "reads": reads, "failures": failures,
        "seconds": round(time.monotonic() - begin, 1),
    }  # fmt: skip
    path = save("two-writers", result, "filelock")
    print(
        f"{options.runs} runs, {result['changes']} changes, {reads} reads, {len(failures)} failures: {path}"
    )


if __name__ == "__main__":
    main()
