"""Bundles built once per test session from tiny random checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vlmexport.exporter.pipeline import BuildRequest, build_bundle

from tests.support import kept_traces, tiny_bundles, tiny_models

kept_traces.install()


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`tiny_checkpoint(name, **options)` → folder, each made once."""
    made: dict[str, Path] = {}

    def get(name: str, **options: object) -> Path:
        key = f"{name}{sorted(options.items(), key=str)}"
        if key not in made:
            made[key] = tiny_models.checkpoint(name, tmp_path_factory.mktemp(name) / "model", **options)
        return made[key]

    return get


def _untrained(name: str, source: Path, folder: Path) -> list[Path]:
    """Drafts of every trained kind for a decoder-only checkpoint."""
    found = [
        tiny_bundles.untrained_draft(source, 1, folder / "imitation"),
        tiny_bundles.untrained_heads(source, folder / "medusa"),
        tiny_bundles.untrained_layer(source, folder / "eagle"),
        tiny_bundles.untrained_wide(source, folder / "eagle3", (1, 1, 1)),
    ]
    if name in tiny_bundles.SEEING:
        found.append(tiny_bundles.untrained_vispec(source, folder / "vispec"))
    return found


@pytest.fixture(scope="session")
def tiny_bundle(
    tiny_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., tuple[Path, Path]]:
    """`tiny_bundle(name, layer, drafts, **options)` → (bundle, checkpoint), each built once; with untrained `drafts` of
    the kinds that a family takes."""
    made: dict[str, tuple[Path, Path]] = {}

    def get(name: str, layer: int = 1, drafts: bool = False, **options: object) -> tuple[Path, Path]:
        key = f"{name}{layer}{drafts}{sorted(options.items(), key=str)}"
        if key not in made:
            source = tiny_checkpoint(name, **options)
            folder = tmp_path_factory.mktemp(name)
            out = folder / "bundle"
            asked: dict[str, Any] = {"draft_layer": layer}
            if drafts:
                asked["drafts"] = [str(each) for each in _untrained(name, source, folder)]
            build_bundle(BuildRequest(model=str(source), output=out, parity=False, **asked))
            made[key] = out, source
        return made[key]

    return get
