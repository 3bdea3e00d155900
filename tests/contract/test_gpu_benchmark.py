"""`benchmarks/gpu.py` on GPUs that are not there: its arms, and what its table says of them."""

from __future__ import annotations

import importlib
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engines import emulated
from engines.emulated import EmulatedCuda
from vlmexport.runtime import session
from vlmexport.runtime.bundle.folder import Bundle

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("device", ["cuda", "tensorrt"])
def test_every_draft_is_an_arm(
    tiny_bundle: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    tiny = tiny_bundle("llama")
    bundle = Bundle.open(Path(shutil.copytree(tiny.path, tmp_path / "bundle")))
    made: dict[str, Callable[[], Any]] = {
        "cuda": lambda: EmulatedCuda(bundle.path, bundle.manifest),
        "tensorrt": lambda: emulated.Emulated.of(bundle.path, bundle.manifest),
    }
    asked: list[str] = []

    def create(_bundle: Any, device: str, *_: Any) -> Any:
        asked.append(device)
        return made[device]()

    monkeypatch.setattr(session.engines, "create", create)
    measure = importlib.import_module("gpu").measure
    head, *arms, bound = measure(bundle.path, device, 8, 1, [None, 0.5], bandwidth=100.0)
    assert asked == [device]
    assert head == f"a GPU that is not there, {device}, {bundle.manifest.model.source}, 8 tokens"
    names = [draft.name for draft in bundle.manifest.drafts]
    wanted = ["none", *(arm for name in names for arm in (name, f"{name} at 0.5"))]
    assert [re.sub(r" +[\d.]+ tokens/s.*", "", line) for line in arms] == wanted
    assert arms[0].endswith("1.00 ×")
    assert re.fullmatch(r"plain: \d+% of the \d+ tokens/s that 100 GB/s allow", bound)
