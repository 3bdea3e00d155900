"""The page of what is supported, from the registries of families, drafts, engines and devices."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

from vlmexport.exporter.common.aliases import ALIASES
from vlmexport.exporter.drafts import KINDS
from vlmexport.runtime import families

from docs.generate.markdown import cell, table

ROOT = Path(__file__).resolve().parents[2]


def pages() -> dict[str, str]:
    """One page."""
    named = [
        (
            f"`{name}`",
            _said(families.__name__, module),
            ", ".join(f"`{a.name}`" for a in ALIASES if a.family == name),
        )
        for name, (module, _) in families.FAMILIES.items()
    ]
    drafts = [
        (f"`{name}`", _first(ROOT / "exporter" / "drafts" / _path(module)))
        for name, (module, _) in KINDS.items()
    ]
    engines = [
        (f"`{path.stem}`", _first(path))
        for path in sorted((ROOT / "runtime" / "engines").glob("*.py"))
        if path.stem != "base" and "def _bind(" in path.read_text("utf-8")
    ]
    aliases = [
        (f"`{a.name}`", f"`{a.family}`", f"`{a.hub_id}`" if a.hub_id else cell(a.description))
        for a in ALIASES
    ]
    parts = [
        "# Supported models, drafts and engines",
        "These tables come from the registries of the code. What was verified, and how, is in [What was verified](verified.md).",
        "## Families",
        table(("family", "is", "names of `vlmexport models`"), named),
        "## Names",
        "Names that stand for a model in `--model`. A folder or a hub id of a supported class does as well.",
        table(("name", "family", "model"), aliases),
        "## Drafts",
        "[Choose a draft](../how-to/choose-a-draft.md) says what each is good for.",
        table(("draft", "is"), drafts),
        "## Engines",
        "An engine executes the graphs of a bundle: [the interface](engines.md).",
        table(("module", "is"), engines),
    ]
    return {"reference/supported.md": "\n\n".join(parts) + "\n"}


def _path(module: str) -> str:
    return module.replace(".", "/") + ".py"


def _said(package: str, module: str) -> str:
    return _sentence(importlib.import_module(f"{package}.{module}").__doc__ or "")


def _first(path: Path) -> str:
    """The first line of a module's docstring; the module is not imported."""
    return _sentence(ast.get_docstring(ast.parse(path.read_text("utf-8"))) or "")


def _sentence(text: str) -> str:
    return cell(text.strip().split("\n\n")[0])
