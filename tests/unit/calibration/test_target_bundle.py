"""The bundle that `generate-data` exports for a target has room for its pictures beside prompt and answer."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from vlmexport.calibration.generation.target_bundle import PROMPT, target_bundle

from tests.support import tiny_models


def test_rows_of_a_large_picture_fit_beside_prompt_and_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLMEXPORT_CACHE", str(tmp_path / "cache"))
    folder = tiny_models.checkpoint("llava-next", tmp_path / "model", max_position_embeddings=4096)
    limits = target_bundle(str(folder), 7, lambda _: None, parity=False).manifest.limits
    assert limits.max_image_rows == 24
    assert limits.max_length == PROMPT + 24 + 7


def test_concurrent_exports_share_one_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fcntl", reason="there are no such locks here")
    monkeypatch.setenv("VLMEXPORT_CACHE", str(tmp_path / "cache"))
    folder = str(tiny_models.checkpoint("llama", tmp_path / "model"))
    begun = threading.Barrier(2, timeout=60)
    said: list[str] = []

    def ask() -> Path:
        begun.wait()
        return target_bundle(folder, 4, said.append, parity=False).path

    with ThreadPoolExecutor(2) as pool:
        first, second = (future.result() for future in [pool.submit(ask), pool.submit(ask)])
    assert first == second and len(said) == 1
