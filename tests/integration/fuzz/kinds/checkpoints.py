"""Damaged checkpoints: `build --dry-run`, which reads everything that a build decides by, and whole builds of some."""

from __future__ import annotations

import random
from pathlib import Path

from tests.integration.fuzz.cases import Case
from tests.integration.fuzz.mutate import linked_copy, mutate_model_file

from .base import command
from .traces import chosen, warm, with_traces

NAMES = ("blip2-t5", "llama", "vit-gpt2", "blip2-opt")
BUILDS = 0.04
"""Share of the cases that are built: seconds each."""

TRACING = 180.0
"""Seconds that a dry run or a build may take: a mutant that changed nothing of weight traces a whole model."""


class Seeds:
    """Whole checkpoints of several families."""

    def __init__(self, folder: Path):
        from tests.support import tiny_models

        warm()
        self._checkpoints = [
            folder / name if (folder / name).is_dir() else tiny_models.checkpoint(name, folder / name)
            for name in NAMES
        ]

    def make(self, rng: random.Random, folder: Path) -> Case:
        whole = rng.choice(self._checkpoints)
        chosen(whole, "--draft-layer", 1)
        model = linked_copy(whole, folder / "model")
        files = sorted(path for path in model.iterdir() if path.is_file())
        documents = [path for path in files if path.suffix == ".json"]
        path = rng.choice((model / "config.json", *documents, *files))
        mutate_model_file(path, rng)
        arguments = ("build", "--model", model, "--draft-layer", 1, "-o", folder / "bundle")
        if rng.random() < BUILDS:
            return Case(with_traces(model, command(*arguments)), limit=TRACING)
        return Case(with_traces(model, command(*arguments, "--dry-run")), limit=TRACING)


def prepare(folder: Path) -> Seeds:
    """Whole checkpoints of several families."""
    return Seeds(folder)
