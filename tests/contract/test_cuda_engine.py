"""The engine of ONNX Runtime's CUDA provider: how it is opened, and what it asks the provider for. Its calls are a column of
the contract suite, on a CUDA that is not there, computed by the CPU provider."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnxruntime as ort
import pytest
from engines.emulated import EmulatedCuda
from engines.fake_cuda import STREAM, FakeCuda
from vlmexport.runtime.cli import main
from vlmexport.runtime.engines import create
from vlmexport.runtime.engines.cuda import Cuda
from vlmexport.runtime.engines.onnxruntime_cuda import PROVIDER, OnnxRuntimeCuda
from vlmexport.runtime.errors import BundleError, DeviceError


def test_without_the_provider(
    tiny_bundle: Callable, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(ort, "get_available_providers", lambda: ["CPUExecutionProvider"])
    bundle = tiny_bundle("llama").bundle
    with pytest.raises(DeviceError, match=r"has no CUDAExecutionProvider: .*pip install onnxruntime-gpu"):
        create(bundle, "cuda")
    capsys.readouterr()
    assert main(["run", str(bundle.path), "--prompt", "a", "--device", "cuda"]) == 2
    said = capsys.readouterr().err.strip()
    assert said.endswith("pip install onnxruntime-gpu") and "\n" not in said


def test_what_the_provider_is_asked_for(tiny_bundle: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products as exact as the types are, in the engine's own stream; graphs in the types of the bundle."""
    monkeypatch.setattr(ort, "get_available_providers", lambda: [PROVIDER])
    monkeypatch.setattr(Cuda, "open", FakeCuda)
    engine = create(tiny_bundle("llama-bfloat16").bundle, "cuda")
    assert isinstance(engine, OnnxRuntimeCuda)
    assert engine.providers() == [
        (PROVIDER, {"device_id": "0", "use_tf32": "0", "user_compute_stream": str(STREAM)})
    ]
    assert engine.dtype("segment.0", "key_cache.0") == "bfloat16"
    assert engine.graphs["segment.0"].file == "segment.0.onnx"
    engine.close()


def test_calls_beyond_the_most_are_dropped(tiny_bundle: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vlmexport.runtime.engines.calls.MAX_CALLS", 1)
    tiny = tiny_bundle("llama")
    engine = EmulatedCuda(tiny.path, tiny.bundle.manifest)
    graph = next(name for name in engine.graphs if name.startswith("imitation"))
    size = int(engine.interface(graph).inputs[0].shape[2])
    for width in (1, 2):
        given, made = (
            engine.allocate(name, 4 * width * size, True).view((1, width, size), "float32")
            for name in ("in", "out")
        )
        engine.bind(graph, {"hidden": given}, {"hidden_out": made}).run()
        assert np.isfinite(engine.read(made)).all()
    assert len(engine._calls) == 1
    engine.close()
    assert not {where for _, where in engine.cuda._blocks.values()} - {"host"}


def test_a_graph_that_is_not_as_the_manifest_says(tiny_bundle: Callable) -> None:
    tiny = tiny_bundle("llama")
    engine = EmulatedCuda(tiny.path, tiny.bundle.manifest)
    engine.graphs = {**engine.graphs, "head": engine.graphs["embed"]}
    engine.graphs["head"].inputs[0].dtype, kept = "int32", engine.graphs["head"].inputs[0].dtype
    try:
        with pytest.raises(BundleError, match="inputs differ from manifest field"):
            engine.load("head")
    finally:
        engine.graphs["head"].inputs[0].dtype = kept
