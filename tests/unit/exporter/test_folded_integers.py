"""Bundles of integer weights have folded graphs for a CPU, in float32 too, and the CPU engine loads them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vlmexport.exporter.pipeline import BuildRequest, build_bundle
from vlmexport.runtime import Session
from vlmexport.runtime.bundle.folder import Bundle


@pytest.mark.parametrize(
    ("weights", "precision", "loaded"),
    [
        (None, "float32", "segment.0.onnx"),
        (None, "float16", "segment.0.float32.onnx"),
        ("int8", "float32", "segment.0.folded.onnx"),
        ("int8", "float16", "segment.0.float32.folded.onnx"),
    ],
)
def test_what_a_cpu_loads(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, weights: str | None, precision: str, loaded: str
) -> None:
    folder = tmp_path / "bundle"
    model = str(tiny_checkpoint("llama"))
    request: dict[str, Any] = {} if weights is None else {"weights": weights}
    build_bundle(BuildRequest(model=model, output=folder, precision=precision, parity=False, **request))
    bundle = Bundle.open(folder)
    graph = bundle.manifest.graphs["segment.0"]
    assert (graph.float32_folded is not None) == (weights is not None and precision == "float16")
    with Session.load(bundle) as session:
        engine = session.decoder.engine
        assert engine.graphs["segment.0"].file == loaded
        assert engine.graphs["head"].file.replace(".float32", "") == "head.onnx"
        options: dict[str, Any] = {"prompt": "abcabcabc", "max_new_tokens": 24, "ignore_eos": True}
        drafted = session.generate(**options, draft="prompt-lookup", draft_length=5)
        assert drafted.tokens == session.generate(**options, speculative=False).tokens
