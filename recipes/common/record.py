"""The record of a run that ships with the model: settings, history and learning curves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .evaluation import machine


def write_recipe(work: Path, folder: Path, settings: dict[str, Any], command: str) -> Path:
    """Writes ``folder/recipe.json`` from the logs in ``work``; returns its path."""
    record = {
        "command": command,
        "settings": settings,
        "machine": machine(),
        "vision_curve": _lines(work / "vision" / "log.jsonl"),
        "curve": _lines(work / "log.jsonl"),
        "last_curve": _lines(work / "last" / "log.jsonl"),
    }
    # Not every recipe has a last stage, and the vision side may come from elsewhere.
    record = {name: value for name, value in record.items() if value or not name.endswith("_curve")}
    path = folder / "recipe.json"
    lines = ",\n".join(f" {json.dumps(name)}: {_compact(value)}" for name, value in record.items())
    path.write_text("{\n" + lines + "\n}\n")
    return path


def _compact(value: Any) -> str:
    """JSON with one line per entry of a list."""
    if isinstance(value, list) and value:
        return "[\n  " + ",\n  ".join(json.dumps(v) for v in value) + "\n ]"
    return json.dumps(value)


def _lines(path: Path) -> list[dict[str, Any]]:
    """The log by step: where a run was resumed, the later line of a step counts. Empty without a log."""
    if not path.exists():
        return []
    by_step = {line["step"]: line for line in map(json.loads, path.read_text().splitlines())}
    return [by_step[step] for step in sorted(by_step)]
