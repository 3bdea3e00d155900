"""Damaged drafts, opened as `build --draft` opens them."""

from __future__ import annotations

import json
import random
from pathlib import Path

from tests.integration.fuzz.cases import Case
from tests.integration.fuzz.mutate import linked_copy, mutate_model_file

from .base import command
from .traces import chosen, warm, with_traces


class Seeds:
    """Trained drafts of every kind, one of them as others publish it, and their target."""

    def __init__(self, folder: Path):
        from tests.support import tiny_bundles, tiny_models

        warm()
        self._model = folder / "target"
        if not self._model.is_dir():
            tiny_models.checkpoint("llama", self._model)
        self._drafts = [folder / name for name in ("imitation", "medusa", "published")]
        imitation, medusa, published = self._drafts
        if not imitation.is_dir():
            tiny_bundles.untrained_draft(self._model, 1, imitation)
        if not medusa.is_dir():
            tiny_bundles.untrained_heads(self._model, medusa, "trimmed")
        if not published.is_dir():
            _publish(tiny_bundles.untrained_heads(self._model, folder / "own"), published)

    def make(self, rng: random.Random, folder: Path) -> Case:
        whole = rng.choice(self._drafts)
        chosen(self._model, "--draft", self._drafts[0])
        draft = linked_copy(whole, folder / "draft")
        path = rng.choice(sorted(path for path in draft.iterdir() if path.is_file()))
        mutate_model_file(path, rng)
        output = folder / "bundle"
        serve = command("build", "--model", self._model, "--draft", draft, "-o", output, "--dry-run")
        return Case(with_traces(self._model, serve))


def _publish(draft: Path, folder: Path) -> None:
    """The heads of `draft` as the authors of Medusa write theirs."""
    from safetensors.torch import load_file, save_file

    folder.mkdir()
    save_file(load_file(draft / "draft.safetensors"), folder / "medusa_lm_head.safetensors")
    config = {"medusa_num_heads": 3, "medusa_num_layers": 2, "base_model_name_or_path": "target"}
    (folder / "config.json").write_text(json.dumps(config), "utf-8")


def prepare(folder: Path) -> Seeds:
    """Trained drafts of every kind and their target."""
    return Seeds(folder)
