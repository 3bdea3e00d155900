"""Pages of JSON documents, from their schemas: the manifest of a bundle, and what `--json` prints."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docs.generate.markdown import cell, code, table

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = (ROOT / "runtime" / "schemas", ROOT / "calibration" / "schemas")
DEEPEST = 2
"""Levels of fields that a page shows."""


def pages() -> dict[str, str]:
    """The manifest's page, and one for the output of all commands."""
    found = {
        path.stem: json.loads(path.read_text("utf-8")) for folder in FOLDERS for path in folder.glob("*.json")
    }
    manifest = found.pop("manifest-2")
    text = (
        f"# Manifest\n\n{cell(manifest['description'])}\n\nSchema: `runtime/schemas/manifest-2.json`. An example "
        f"is in [Bundle](bundle.md#the-manifest).\n\n{_fields(manifest)}\n"
    )
    output = ["# JSON output", "What commands print with `--json`, or write with `--report`."]
    for name, schema in sorted(found.items()):
        output += [
            f"## {name}",
            cell(schema.get("description") or schema.get("title", "")),
            _fields(schema, 1),
        ]
    return {"reference/manifest.md": text, "reference/json-output.md": "\n\n".join(output) + "\n"}


def _fields(schema: dict[str, Any], deepest: int = DEEPEST) -> str:
    return table(("field", "type", "meaning"), _rows(schema, "", deepest, schema))


def _rows(
    schema: dict[str, Any], before: str, left: int, root: dict[str, Any]
) -> Iterator[tuple[str, str, str]]:
    required = schema.get("required", [])
    for name, given in schema.get("properties", {}).items():
        field = _resolved(given, root)
        optional = "" if name in required else " (optional)"
        yield code(before + name) + optional, cell(_type(field)), cell(field.get("description", ""))
        if left > 1:
            inner = _resolved(field.get("items", field), root)
            mark = "[]." if "items" in field else "."
            yield from _rows(inner, f"{before}{name}{mark}", left - 1, root)


def _resolved(schema: Any, root: dict[str, Any]) -> dict[str, Any]:
    """A schema, or what its `$ref` in the same document names."""
    if not isinstance(schema, dict):
        return {}
    while "$ref" in schema:
        place: Any = root
        for part in schema["$ref"].removeprefix("#/").split("/"):
            place = place[part]
        schema = {**place, **{key: value for key, value in schema.items() if key != "$ref"}}
    return schema


def _type(schema: dict[str, Any]) -> str:
    if "const" in schema:
        return json.dumps(schema["const"])
    if "enum" in schema:
        return ", ".join(map(json.dumps, schema["enum"]))
    kind = schema.get("type", "")
    return " or ".join(kind) if isinstance(kind, list) else kind
