"""Damaged drafts, opened as `build --draft` opens them."""

from __future__ import annotations

import json
import random
from pathlib import Path

from cases import Case
from mutate import json_text, linked_copy, mutate_bytes, mutate_file, mutate_json

from .base import command
from .checkpoints import _mutate_header


class Seeds:
    """A trained draft and its target."""

    def __init__(self, folder: Path):
        import tiny_bundles
        import tiny_models

        self._model, self._draft = folder / "target", folder / "draft"
        if not self._model.is_dir():
            tiny_models.checkpoint("llama", self._model)
        if not self._draft.is_dir():
            tiny_bundles.untrained_draft(self._model, 1, self._draft)

    def make(self, rng: random.Random, folder: Path) -> Case:
        draft = linked_copy(self._draft, folder / "draft")
        path = rng.choice(sorted(path for path in draft.iterdir() if path.is_file()))
        if path.suffix == ".json" and rng.random() < 0.8:
            mutate_file(path, rng, lambda data, rng: json_text(mutate_json(json.loads(data), rng), rng))
        elif path.suffix == ".safetensors" and rng.random() < 0.7:
            mutate_file(path, rng, _mutate_header)
        else:
            mutate_file(path, rng, mutate_bytes)
        output = folder / "bundle"
        return Case(command("build", "--model", self._model, "--draft", draft, "-o", output, "--dry-run"))


def prepare(folder: Path) -> Seeds:
    """A trained draft and its target."""
    return Seeds(folder)
