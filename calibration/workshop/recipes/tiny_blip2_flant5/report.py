"""The record of a run that ships with the model: settings and learning curves."""

from __future__ import annotations

import json
from pathlib import Path

from .evaluate import machine


def write_recipe(work: Path, folder: Path, settings: dict[str, object]) -> Path:
    """Writes ``folder/recipe.json`` from the logs in ``work``; returns its path."""
    record = {
        "command": "python -m vlmexport.calibration.workshop.recipes.tiny_blip2_flant5 --out DIR",
        "settings": settings,
        "machine": machine(),
        "vision_curve": _lines(work / "vision.jsonl"),
        "decoder_curve": _lines(work / "decoder.jsonl"),
    }
    path = folder / "recipe.json"
    rows = ",\n".join(f" {json.dumps(name)}: {_compact(value)}" for name, value in record.items())
    path.write_text("{\n" + rows + "\n}\n")
    return path


def _compact(value: object) -> str:
    """JSON with one line per entry of a list."""
    if isinstance(value, list):
        return "[\n  " + ",\n  ".join(json.dumps(v) for v in value) + "\n ]"
    return json.dumps(value)


def _lines(path: Path) -> list[dict[str, object]]:
    """The log by step: where a run was resumed, the later line of a step counts."""
    by_step = {line["step"]: line for line in map(json.loads, path.read_text().splitlines())}
    return [by_step[step] for step in sorted(by_step)]
