"""Bundles built once per test session from tiny random checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from vlmexport.exporter.pipeline import BuildRequest, build_bundle

from tests.support import kept_traces, tiny_models

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


@pytest.fixture(scope="session")
def tiny_bundle(
    tiny_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., tuple[Path, Path]]:
    """`tiny_bundle(name, layer, **options)` → (bundle, checkpoint), each built once."""
    made: dict[str, tuple[Path, Path]] = {}

    def get(name: str, layer: int = 1, **options: object) -> tuple[Path, Path]:
        key = f"{name}{layer}{sorted(options.items(), key=str)}"
        if key not in made:
            source = tiny_checkpoint(name, **options)
            out = tmp_path_factory.mktemp(name) / "bundle"
            build_bundle(BuildRequest(model=str(source), output=out, draft_layer=layer, parity=False))
            made[key] = out, source
        return made[key]

    return get
