"""Bound calls of ONNX Runtime: the short way into its C++ session, and the public one where that is not there."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnxruntime", reason="the engine that is tested")

from vlmexport.runtime import Session
from vlmexport.runtime.engines import onnxruntime as engine


@pytest.fixture
def public_only(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """ONNX Runtime's Python package without the attributes that the short way needs; the bindings that were run."""
    whole, seen = engine._BoundCall.__init__, []

    def init(self: Any, owner: Any, file: str, session: Any, binding: Any, keep: Any) -> None:
        def run(given: Any) -> None:
            seen.append(given)
            session.run_with_iobinding(given)

        whole(self, owner, file, SimpleNamespace(run_with_iobinding=run), binding, keep)  # type: ignore[arg-type]

    monkeypatch.setattr(engine._BoundCall, "__init__", init)
    return seen


def tokens(path: Any) -> list[int]:
    with Session.load(path) as session:
        return session.generate_tokens(np.arange(5, 12).tolist(), max_new_tokens=12, ignore_eos=True).tokens


def test_public_onnxruntime_api_gives_the_same_tokens(
    tiny_bundle: Callable, request: pytest.FixtureRequest
) -> None:
    path = tiny_bundle("llama").path
    expected = tokens(path)
    seen = request.getfixturevalue("public_only")
    assert tokens(path) == expected and len(seen) > 12
