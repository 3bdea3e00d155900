"""The bundle that `generate-data` exports for a target has room for its pictures beside prompt and answer."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_models
from vlmexport.calibration.generation.target_bundle import PROMPT, target_bundle


def test_rows_of_a_large_picture_fit_beside_prompt_and_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLMEXPORT_CACHE", str(tmp_path / "cache"))
    folder = tiny_models.checkpoint("llava-next", tmp_path / "model", max_position_embeddings=4096)
    limits = target_bundle(str(folder), 7, lambda _: None, parity=False).manifest.limits
    assert limits.max_image_rows == 24
    assert limits.max_length == PROMPT + 24 + 7
