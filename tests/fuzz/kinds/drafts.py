"""Damaged drafts, opened as `build --draft` opens them."""

from __future__ import annotations

import random
from pathlib import Path

from cases import Case
from mutate import linked_copy, mutate_model_file

from .base import command
from .traces import chosen, warm, with_traces


class Seeds:
    """A trained draft and its target."""

    def __init__(self, folder: Path):
        import tiny_bundles
        import tiny_models

        warm()
        self._model, self._draft = folder / "target", folder / "draft"
        if not self._model.is_dir():
            tiny_models.checkpoint("llama", self._model)
        if not self._draft.is_dir():
            tiny_bundles.untrained_draft(self._model, 1, self._draft)

    def make(self, rng: random.Random, folder: Path) -> Case:
        chosen(self._model, "--draft", self._draft)
        draft = linked_copy(self._draft, folder / "draft")
        path = rng.choice(sorted(path for path in draft.iterdir() if path.is_file()))
        mutate_model_file(path, rng)
        output = folder / "bundle"
        serve = command("build", "--model", self._model, "--draft", draft, "-o", output, "--dry-run")
        return Case(with_traces(self._model, serve))


def prepare(folder: Path) -> Seeds:
    """A trained draft and its target."""
    return Seeds(folder)
