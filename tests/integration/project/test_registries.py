"""Whatever is registered is also proven: a family, a draft kind or an engine without its rows fails here.

| registered | must have |
|---|---|
| family of the exporter | a checkpoint in the parity table, a line in the docs |
| family of the runtime | an exporter, a bundle in the contract table, graphs in PyTorch, a target in the training table |
| family that reads several pictures | configurations of the sweep, a ViSpec draft in the contract table |
| draft kind of the exporter | a proposer of the runtime, a row in the contract table, a line in the docs |
| draft kind that is trained | an objective, a row in the training table, a line in docs/how-to |
| draft kind that is searched | a search, a line in docs/how-to |
| engine | a column of the contract table |
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

import pytest
from vlmexport.calibration import objectives, search
from vlmexport.exporter import drafts
from vlmexport.exporter.families import registry
from vlmexport.runtime import drafts as proposers
from vlmexport.runtime import families

from tests.support import lossless, rig, tiny_bundles, tiny_models, training_targets
from tests.support.engines import torch_reference
from tests.unit.exporter import test_request_sweep

ROOT = Path(__file__).resolve().parents[3]
TESTS = ROOT / "tests"
HOW_TO = sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs" / "how-to").glob("*.md"))
Tables = Mapping[str, Callable[[], Collection[str]]]


def missing(registered: Iterable[str], tables: Tables) -> list[str]:
    """A sentence for every registered name that a table lacks."""
    return [
        f"{name} is not in {table}"
        for table, rows in tables.items()
        for name in registered
        if name not in rows()
    ]


@functools.cache
def _family(checkpoint: str) -> str:
    """The family of a tiny checkpoint of `tiny_models.BUILDERS`."""
    model, _ = tiny_models.BUILDERS[checkpoint]()
    return registry.architectures()[type(model).__name__]


def _families_named_in(path: str) -> set[str]:
    """Families of the tiny checkpoints whose names stand, quoted, in a test file."""
    text = (TESTS / path).read_text("utf-8")
    return {_family(name) for name in tiny_models.BUILDERS if f'"{name}"' in text}


def _words(*paths: str) -> set[str]:
    """Words of documents, in small letters; names with hyphens and points count as words."""
    text = " ".join((ROOT / path).read_text("utf-8") for path in paths)
    return set(re.findall(r"[a-z0-9]+(?:[.-][a-z0-9]+)*", text.lower()))


def _exported_families() -> list[str]:
    return [family.name for family in registry.FAMILIES]


def _families_of_several_pictures() -> list[str]:
    """Families of the runtime that lay out any number of pictures."""
    found = []
    for name in _exported_families():
        if name in families.FAMILIES:
            names = type(families.get_family(name)).prepare.__code__.co_names
            found += [name] if "views_of" in names else []
    return found


def _trained_kinds() -> list[str]:
    return [
        kind.name for kind in drafts.draft_kinds() if kind.trained and not kind.searched and not kind.native
    ]


def _searched_kinds() -> list[str]:
    return [kind.name for kind in drafts.draft_kinds() if kind.searched]


def _engines() -> list[str]:
    """Modules of runtime/engines that execute graphs."""
    folder = ROOT / "runtime" / "engines"
    return [
        p.stem
        for p in sorted(folder.glob("*.py"))
        if p.stem not in ("base", "__init__") and "def _bind(" in p.read_text("utf-8")
    ]


def _engine_columns() -> set[str]:
    """Modules of runtime/engines that the contract's rig makes engines from, itself or on a device that is not there."""
    folder = Path(rig.__file__).parent
    text = "".join((folder / name).read_text("utf-8") for name in ("rig.py", "engines/emulated.py"))
    return {name for name in _engines() if f"runtime.engines.{name} import" in text}


EXPORTED: Tables = {
    "the parity table (tests/unit/exporter/test_parity.py)": lambda: _families_named_in(
        "unit/exporter/test_parity.py"
    ),
    "the docs (docs/reference/models.md)": lambda: _words("docs/reference/models.md"),
}
RUN: Tables = {
    "the exporter": _exported_families,
    "the contract table (tests/support/rig.py)": lambda: {
        _family(tiny_bundles.BUNDLES[name].checkpoint) for name in (*rig.FAMILIES, *tiny_bundles.HOST_ALONE)
    },
    "the second implementation (tests/support/engines/torch_reference.py)": lambda: {
        family for family, _ in torch_reference.FAMILIES
    },
    "the training table (tests/support/training_targets.py)": lambda: {
        _family(name) for name in training_targets.KINDS
    },
}
SEVERAL: Tables = {
    "the sweep (tests/unit/exporter/test_request_sweep.py)": lambda: {
        _family(name) for name in test_request_sweep.CONFIGURATIONS
    },
    "the table of ViSpec drafts (SEEING in tests/support/tiny_bundles.py)": lambda: {
        _family(name) for name in tiny_bundles.SEEING
    },
}
DRAFTED: Tables = {
    "the runtime's proposers": lambda: proposers.KINDS,
    "the contract table (tests/support/lossless.py)": lambda: lossless.DRAFTS,
    "the docs (docs/how-to)": lambda: _words(*HOW_TO),
}
TRAINED: Tables = {
    "the trainer (objectives.KINDS)": lambda: objectives.KINDS,
    "the training table (tests/support/training_targets.py)": lambda: training_targets.TRAINED,
    "the docs (docs/how-to)": lambda: _words(*HOW_TO),
}
SEARCHED: Tables = {
    "the searches (search.KINDS)": lambda: search.KINDS,
    "the docs (docs/how-to)": lambda: _words(*HOW_TO),
}
ENGINES: Tables = {"the contract table (tests/support/rig.py)": _engine_columns}


def complaints() -> list[str]:
    """Everything that is registered and not proven."""
    return [
        *missing(_exported_families(), EXPORTED),
        *missing(families.FAMILIES, RUN),
        *missing(_families_of_several_pictures(), SEVERAL),
        *missing(drafts.KINDS, DRAFTED),
        *missing(_trained_kinds(), TRAINED),
        *missing(objectives.KINDS, {"the exporter's trained kinds": _trained_kinds}),
        *missing(_searched_kinds(), SEARCHED),
        *missing(search.KINDS, {"the exporter's searched kinds": _searched_kinds}),
        *missing(_engines(), ENGINES),
    ]


def test_every_registered_kind_has_tests() -> None:
    assert len(_engines()) >= 1
    assert {"llava", "qwen3-vl"} <= set(_families_of_several_pictures())
    assert complaints() == []


def test_a_new_draft_kind_without_rows_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(complaints())
    monkeypatch.setitem(drafts.KINDS, "phantom", ("imitation.imitation", "ImitationKind"))
    found = set(complaints()) - before
    assert found == {f"phantom is not in {table}" for table in DRAFTED}
    monkeypatch.setattr(drafts.draft_kind("imitation").__class__, "name", "phantom")
    found = set(complaints()) - before
    assert {f"phantom is not in {table}" for table in TRAINED} <= found
    assert "imitation is not in the exporter's trained kinds" in found


def test_a_new_family_without_rows_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(complaints())
    phantom = type("Phantom", (registry.FAMILIES[0],), {"name": "phantom", "architectures": ()})
    monkeypatch.setattr(registry, "FAMILIES", (*registry.FAMILIES, phantom))
    monkeypatch.setitem(families.FAMILIES, "ghost", "Ghost")
    found = set(complaints()) - before
    assert found == {
        *(f"phantom is not in {table}" for table in EXPORTED),
        *(f"ghost is not in {table}" for table in RUN),
    }


def test_a_new_engine_without_a_column_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    before, real = set(complaints()), _engines()
    monkeypatch.setattr(sys.modules[__name__], "_engines", lambda: [*real, "phantom"])
    (table,) = ENGINES
    assert set(complaints()) - before == {f"phantom is not in {table}"}
