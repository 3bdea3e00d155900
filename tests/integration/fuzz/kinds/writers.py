"""Two processes that change one manifest at once, while a third reads it."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tests.integration.fuzz.cases import Case
from tests.support.forks import forked

from .base import command
from .merged_reports import ACCEPTANCE, COSTS

WRITERS = ("costs", "acceptance", "reseal", "merge")
MOST = 3
"""Changes of one process."""


class Seeds:
    """A bundle without a model."""

    def __init__(self, folder: Path):
        from tests.support import handmade_bundle

        self._bundle = folder / "bundle"
        if not self._bundle.is_dir():
            handmade_bundle.write_bundle(self._bundle)

    def make(self, rng: random.Random, folder: Path) -> Case:
        bundle = Path(shutil.copytree(self._bundle, folder / "bundle"))
        fingerprint = json.loads((bundle / "manifest.json").read_bytes())["model"]["fingerprint"]
        changes: list[list[Callable[[], object]]] = []
        machines: set[str] = set()
        budgets: set[tuple[str, int]] = set()
        for writer in "AB":
            own: list[Callable[[], object]] = []
            for number in range(rng.randint(1, MOST)):
                machine = f"{writer}{number}" if rng.random() < 0.8 else "both"
                nodes = rng.randint(4, 40)
                entry, seen = {**COSTS, "machine": machine}, {**ACCEPTANCE[0], "nodes": nodes}
                kind = rng.choice(WRITERS)
                if kind in ("costs", "merge"):
                    machines.add(machine)
                if kind in ("acceptance", "merge"):
                    budgets.add((seen["draft"], nodes))
                if kind == "merge":
                    report = folder / f"{writer}{number}.json"
                    found = {"fingerprint": fingerprint, "costs": entry, "acceptance": [seen]}
                    report.write_text(json.dumps(found), "utf-8")
                    own.append(command("tune", bundle, "--merge", report))
                else:
                    own.append(_change(kind, bundle, entry, seen))
            changes.append(own)

        def serve() -> int:
            children = [forked(partial(_all, own)) for own in changes]
            while children:
                _read(bundle)
                for child in list(children):
                    found, status = os.waitpid(child, os.WNOHANG)
                    if found:
                        children.remove(child)
                        assert status == 0, f"a writer ends with {status}"
                time.sleep(0.005)
            last = _read(bundle)
            assert {each["machine"] for each in last.costs} == machines, "a machine is missing"
            assert {(each["draft"], each["nodes"]) for each in last.acceptance} == budgets, (
                "a draft is missing"
            )
            left = [path.name for path in bundle.iterdir() if path.name.startswith(".")]
            assert not left, f"{left} is left"
            return 0

        return Case(serve)


def _change(kind: str, bundle: Path, entry: dict[str, Any], seen: dict[str, Any]) -> Callable[[], object]:
    def change() -> None:
        from vlmexport.runtime.bundle.manifest_changes import reseal, store_costs

        if kind == "reseal":
            reseal(bundle)
        else:
            store_costs(bundle, [entry] if kind == "costs" else [], [seen] if kind == "acceptance" else [])

    return change


def _read(bundle: Path) -> Any:
    from vlmexport.runtime.bundle.folder import Bundle

    return Bundle.open(bundle, check="sha256").manifest


def _all(own: list[Callable[[], object]]) -> int:
    with contextlib.redirect_stdout(io.StringIO()):
        for change in own:
            assert not change(), "a change is refused"
    return 0


def prepare(folder: Path) -> Seeds:
    """A bundle without a model."""
    return Seeds(folder)
