"""Reports that `tune --merge` is given: any JSON in any field of a real one, or of a manifest."""

from __future__ import annotations

import copy
import json
import random
import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.integration.fuzz.cases import Case
from tests.integration.fuzz.mutate import json_text, mutate_bytes, mutate_json, paths

from .base import command

MACHINE = "Intel(R) Xeon(R)"
COSTS = {
    "machine": MACHINE, "threads": 1, "date": "2026-01-01T00:00:00Z", "cache": 64, "host": 0.0001,
    "plain": {"1": 0.01, "2": 0.011, "4": 0.012, "8": 0.02},
    "drafts": {
        "imitation@1": {"tail": {"1": 0.005, "4": 0.006}, "trunk": 0.005, "once": 0.001, "tree_host": {"8": 0.001}},
        "early-exit@1": {"propose": 0.002, "host": 0.0001},
    },
    "choice": {
        "draft": "imitation@1", "draft_length": 4, "draft_nodes": 7, "speedup": 1.5, "tokens_per_cycle": 2.5,
        "break_even": 1.4, "interval": [1.3, 1.7],
    },
}  # fmt: skip
ACCEPTANCE = [
    {
        "draft": draft, "nodes": nodes, "depth": 4, "shapes": [[0, 0, 1], [nodes, 4, 30]], "accepted": [25, 16, 9, 4],
        "discarded": 2, "ranks": [[[20, 30], [4, 30]], [[12, 20]]] if nodes > 4 else [], "requests": 3, "data": "data.jsonl",
        "date": "2026-01-01T00:00:00Z",
    }
    for draft, nodes in (("imitation@1", 4), ("imitation@1", 7), ("early-exit@1", 4))
]  # fmt: skip


class Seeds:
    """A bundle without a model, and reports of it."""

    def __init__(self, folder: Path):
        from tests.support import handmade_bundle

        self._bundle = folder / "bundle"
        if not self._bundle.is_dir():
            handmade_bundle.write_bundle(self._bundle)
        manifest = handmade_bundle.read(self._bundle)
        whole = {"costs": COSTS, "acceptance": ACCEPTANCE, "machine": {"cpu": MACHINE, "cores": 2}}
        self._reports = [
            {"schema_version": 1, "fingerprint": manifest["model"]["fingerprint"], **whole},
            {"model": manifest["model"], "costs": [COSTS], "acceptance": ACCEPTANCE},
        ]

    def make(self, rng: random.Random, folder: Path) -> Case:
        bundle = Path(shutil.copytree(self._bundle, folder / "bundle"))
        before = (bundle / "manifest.json").read_bytes()
        options: list[object] = []
        for number in range(rng.choice((1, 1, 2))):
            path = folder / f"report-{number}.json"
            path.write_bytes(_mutant(rng.choice(self._reports), rng))
            options += ["--merge", path]
        serve = command("tune", bundle, *options)

        def merge() -> int:
            status = serve()
            if status:
                assert (bundle / "manifest.json").read_bytes() == before, "refused, and written all the same"
            else:
                _use(bundle)
            return status

        return Case(merge)


def _mutant(report: dict[str, Any], rng: random.Random) -> bytes:
    """Mostly a mutant of what is stored of it: the fingerprint stays, or nothing behind it would be reached."""
    kind = rng.random()
    if kind < 0.1:
        return mutate_bytes(json.dumps(report).encode(), rng)
    if kind < 0.2:
        return json_text(mutate_json(report, rng), rng)
    out = copy.deepcopy(report)
    field = rng.choice(("costs", "acceptance"))
    if kind < 0.5:
        _renumber(out, field, rng)
    else:
        out[field] = mutate_json(out[field], rng)
    return json.dumps(out).encode("utf-8", "surrogatepass")


def _renumber(report: dict[str, Any], field: str, rng: random.Random) -> None:
    """Other numbers where there are numbers: each may be one by itself, and all together say what nobody measured."""
    numbers = [place for place in paths(report[field], (field,)) if _is_number(_at(report, place))]
    for *way, last in rng.sample(numbers, rng.randint(1, 4)):
        _at(report, way)[last] = rng.choice((0, 1, 2, 3, 7, 64, 4096, 1 << 53, 1e-9, 0.5, 1e4))


def _at(document: Any, way: Iterable[Any]) -> Any:
    for key in way:
        document = document[key]
    return document


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


class _Drafting:
    """A sequence as a policy sees it."""

    def __init__(self, name: str) -> None:
        self.proposer = _Named(name)


class _Named:
    def __init__(self, name: str) -> None:
        self.name = name


def _use(bundle: Path) -> None:
    """What a session, `inspect` and `tune` do with what is stored."""
    from vlmexport.runtime.bundle.folder import Bundle
    from vlmexport.runtime.bundle.stored_acceptance import stored_acceptance
    from vlmexport.runtime.bundle.stored_costs import bundle_here, every_costs, pick_costs
    from vlmexport.runtime.session.session import Session
    from vlmexport.runtime.speedup.predict import choose

    opened = Bundle.open(bundle, check="sha256")
    manifest = opened.manifest
    for entry in every_costs(manifest):
        session = Session.__new__(Session)
        session.bundle = bundle_here(opened, entry.machine, entry.threads)
        session.threads, session._machine, session._controllers = entry.threads, entry.machine, {}
        session._padded_to = 1
        for learn in ("session", "request"):
            policy = session._controller(learn, None)
            for draft in manifest.drafts:
                policy.allot([_Drafting(draft.name)])
        costs = pick_costs(manifest, entry.machine, entry.threads)
        choose(replace(costs, least=1), [each.observed for each in stored_acceptance(manifest)])
    inspect: Callable[[], int] = command("inspect", bundle)
    assert inspect() == 0, "inspect refuses what was merged"


def prepare(folder: Path) -> Seeds:
    """A bundle without a model, and reports of it."""
    return Seeds(folder)
