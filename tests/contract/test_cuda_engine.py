"""The engine of ONNX Runtime's CUDA provider: how it is opened, and what it asks the provider for. Its calls are a column of
the contract suite, on a CUDA that is not there, computed by the CPU provider."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import onnxruntime as ort
import pytest
from vlmexport.exporter.graphs.argmax import build_answers
from vlmexport.runtime.cli import main
from vlmexport.runtime.common.errors import BundleError, CapacityError, DeviceError
from vlmexport.runtime.engines import argmax as answers
from vlmexport.runtime.engines import create
from vlmexport.runtime.engines.cuda import Cuda
from vlmexport.runtime.engines.onnxruntime import session_options
from vlmexport.runtime.engines.onnxruntime_cuda import PROVIDER, OnnxRuntimeCuda
from vlmexport.runtime.measure.timing import GraphTimer, sampled_seconds

from tests.support import lossless
from tests.support.as_library import as_library
from tests.support.engines.emulated import EmulatedCuda
from tests.support.engines.fake_cuda import STREAM, FakeCuda
from tests.support.rig import Rig


def test_without_the_provider(
    tiny_bundle: Callable, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(ort, "get_available_providers", lambda: ["CPUExecutionProvider"])
    bundle = tiny_bundle("llama").bundle
    with pytest.raises(DeviceError, match=r"has no CUDAExecutionProvider: .*pip install 'onnxruntime-gpu"):
        create(bundle, "cuda")
    capsys.readouterr()
    assert main(["run", str(bundle.path), "--prompt", "a", "--device", "cuda"]) == 2
    said = capsys.readouterr().err.strip()
    assert said.endswith("pip install 'onnxruntime-gpu[cuda,cudnn]'") and "\n" not in said


def test_cpu_fallback_is_refused(
    tiny_bundle: Callable, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    """ONNX Runtime makes it without a word where a library of the provider is missing."""
    really, asked, loaded = ort.InferenceSession, [], []

    def on_the_cpu(path: str, options: Any, providers: Any, **more: Any) -> Any:
        assert loaded, "libraries of pip are loaded before the first session"
        asked.append((providers[0][0], more))
        return really(path, options, providers=["CPUExecutionProvider"])

    def preload() -> None:
        loaded.append(True)
        print("Failed to load libcublasLt.so.13")

    monkeypatch.setattr(ort, "get_available_providers", lambda: [PROVIDER])
    monkeypatch.setattr(ort, "preload_dlls", preload, raising=False)
    monkeypatch.setattr(ort, "InferenceSession", on_the_cpu)
    monkeypatch.setattr(ort, "set_default_logger_severity", lambda level: None)
    monkeypatch.setattr(Cuda, "open", FakeCuda)
    engine = create(tiny_bundle("llama").bundle, "cuda")
    for graph in ("segment.0", "commit"):
        with pytest.raises(DeviceError, match=r"cannot load its CUDAExecutionProvider") as caught:
            engine.load(graph)
        said = str(caught.value)
        assert said.endswith("pip install 'onnxruntime-gpu[cuda,cudnn]'") and "\n" not in said
    assert asked == [(PROVIDER, {"enable_fallback": 0})] * 2
    engine.close()
    out, err = capfd.readouterr()
    assert "Failed to load" not in out + err


def test_options_given_to_the_provider(tiny_bundle: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products as exact as the types are, in the engine's own stream; graphs in the types of the bundle."""
    monkeypatch.setattr(ort, "get_available_providers", lambda: [PROVIDER])
    monkeypatch.setattr(ort, "set_default_logger_severity", lambda level: None)
    monkeypatch.setattr(Cuda, "open", FakeCuda)
    engine = create(tiny_bundle("llama-bfloat16").bundle, "cuda")
    assert isinstance(engine, OnnxRuntimeCuda)
    asked = {"device_id": "0", "use_tf32": "0", "user_compute_stream": str(STREAM)}
    assert engine.providers(captures=False) == [(PROVIDER, asked)]
    assert engine.providers(captures=True) == [(PROVIDER, asked | {"enable_cuda_graph": "1"})]
    assert engine.dtype("segment.0", "key_cache.0") == "bfloat16"
    assert engine.graphs["segment.0"].folded == "segment.0.folded.onnx"
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


# --- what the head says without its logits ---


def test_the_shipped_graph_is_what_its_source_makes() -> None:
    shipped = Path(answers.__file__).with_name(answers.FILE).read_bytes()
    assert shipped == build_answers().SerializeToString(), "python -m vlmexport.exporter.graphs.argmax FILE"


def test_answers_are_the_first_of_the_highest_and_whether_it_is_a_number() -> None:
    rng = np.random.default_rng(3)
    logits = rng.integers(-4, 4, (64, 700)).astype(np.float32)  # ties in every row
    nan, high, low = 3, 4, 5
    logits[nan, 500], logits[high, 600], logits[low] = np.nan, np.inf, -np.inf
    logits[6], logits[7, ::2] = 2.0, -np.inf
    path = Path(answers.__file__).with_name(answers.FILE)
    session = ort.InferenceSession(
        str(path), session_options(pooled=False), providers=["CPUExecutionProvider"]
    )
    best, finite = session.run(None, {"logits": logits, "places": answers.places(700)})
    sound = [row for row in range(64) if row not in (nan, high, low)]
    assert best[sound].tolist() == logits[sound].argmax(-1).tolist() and best[high] == 600
    assert finite.tolist() == [row in sound for row in range(64)]
    assert (best.dtype, finite.dtype) == (np.int64, np.bool_)


def test_vocabulary_limit_of_the_argmax() -> None:
    with pytest.raises(ValueError, match=r"16777217 tokens are more than float32 counts"):
        answers.places((1 << 24) + 1)


# --- calls that are captured ---


def generated(rig: Rig, limit: int = 20) -> Any:
    """A request with drafts on the trunk, which must come out as the oracle has it."""
    request = rig.request(51)
    run = lossless.generate(rig, request, limit, proposer=lossless.DRAFTS["early-exit"](rig, ()), length=3)
    assert run.tokens == rig.oracle.greedy(request, limit)
    return run


@pytest.mark.parametrize("family", ["t5", "llama"])
def test_a_cycle_replays_its_calls(rigs: Callable, family: str) -> None:
    """Once every length of a draft has come, only the prompt is run as it is."""
    rig: Rig = rigs(family, "cuda")
    generated(rig)
    sessions = rig.engine._sessions
    before = {name: (each.runs, each.replays) for name, each in sessions.items()}
    run = generated(rig)
    for name, each in sessions.items():
        runs, replays = each.runs - before[name][0], each.replays - before[name][1]
        assert runs - replays <= 2, f"{name}: {runs} runs, {replays} of them replays"
        if name == "mask":
            assert replays >= run.stats.proposed + run.stats.cycles, "of the trunk and the tail"
    assert rig.engine.captures_calls


def test_row_moves_are_not_replayed(rigs: Callable) -> None:
    """ONNX Runtime runs a graph several times before it is captured."""
    rig: Rig = rigs("llama", "cuda")
    roles = {info.role for name, info in rig.manifest.graphs.items() if not rig.engine.repeatable(name)}
    assert roles == {"commit"}, "what a cycle runs again and again is captured, drafts too"
    assert not rig.engine._session("commit").captures and rig.engine._session("segment.0").captures


def test_calls_outside_of_programs_are_not_captured(rigs: Callable) -> None:
    """What was captured stays as long as its call, and a prompt comes in any width."""
    rig: Rig = rigs("llama", "cuda")
    rig.start(rig.request(51))
    rig.settle()
    assert any(each.runs for each in rig.engine._sessions.values())
    assert not any(each.captured for each in rig.engine._sessions.values())


def test_captured_graph_is_freed_with_its_call(rigs: Callable) -> None:
    rig: Rig = rigs("llama", "cuda")
    generated(rig)
    engine: EmulatedCuda = rig.engine
    assert sum(len(each.captured) for each in engine._sessions.values()) > 10
    rig.decoder = None  # type: ignore[assignment]
    engine._calls.clear()
    gc.collect()
    engine.synchronise()
    assert not any(each.captured for each in engine._sessions.values())
    rig.fresh()


def test_passes_are_timed_as_decoding_runs_them(tiny_bundle: Callable) -> None:
    tiny = tiny_bundle("llama")
    engine = EmulatedCuda(tiny.path, tiny.bundle.manifest)
    timer = GraphTimer(tiny.bundle, engine, cache=20, source=1)
    calls = timer.repeated(["segment.0"], timer.calls(["segment.0"], 2))
    sampled_seconds({"pass": calls}, budget=0.0, wait=timer.wait)
    session = engine._session("segment.0")
    assert (session.runs, session.replays) == (25, 24)
    engine.close()


def test_sessions_go_before_their_stream(tiny_bundle: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even those of calls that somebody still holds."""
    tiny = tiny_bundle("llama")
    engine = EmulatedCuda(tiny.path, tiny.bundle.manifest)
    given, made = (engine.allocate(name, 256, True) for name in ("in", "out"))
    held = engine.bind(
        "mask",
        {
            value.name: given.view(tuple(1 for _ in value.shape), value.dtype)
            for value in engine.interface("mask").inputs
        },
        {
            value.name: made.view(tuple(1 for _ in value.shape), value.dtype)
            for value in engine.interface("mask").outputs[:1]
        },
    )
    program = engine.program([held], given.view((8,), "uint8"), made.view((8,), "uint8"))
    for _ in range(3):
        program.launch()
        program.wait()
    session = weakref.ref(engine._session("mask"))
    assert session().captured
    there = []
    monkeypatch.setattr(engine.cuda, "destroy_stream", lambda stream: there.append(session()))
    engine.close()
    assert there == [None] and program is not None


def test_uncapturable_calls_run_on_the_stream(rigs: Callable, caplog: pytest.LogCaptureFixture) -> None:
    rig: Rig = rigs("llama", "cuda")
    rig.engine._session("segment.1").broken = "operation not permitted when stream is capturing"
    generated(rig)
    assert not rig.engine.captures_calls
    assert "segment.1.folded.onnx cannot be captured" in caplog.text
    replays = sum(each.replays for each in rig.engine._sessions.values())
    generated(rig)
    assert sum(each.replays for each in rig.engine._sessions.values()) == replays
    rig.fresh()


def test_a_graph_that_onnx_runtime_does_not_capture(rigs: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """It refuses sessions with a node on the CPU when it is to capture them."""
    opened = EmulatedCuda.open_session

    @as_library("onnxruntime")
    def refusing(self: Any, path: Path, captures: bool) -> Any:
        if captures and path.name == "mask.onnx":
            raise RuntimeError("This session cannot use the graph capture feature as requested by the user")
        return opened(self, path, captures)

    monkeypatch.setattr(EmulatedCuda, "open_session", refusing)
    rig: Rig = rigs("llama", "cuda").fresh()
    generated(rig)
    generated(rig)
    assert rig.engine.captures_calls
    sessions = rig.engine._sessions
    assert not sessions["mask"].captured and sessions["segment.0"].replays


@pytest.mark.parametrize(
    "said",
    [
        "Failed to allocate memory for requested buffer of size 2147483648",
        "CUDA failure 2: out of memory ; GPU=0",
        "CUBLAS failure 3: CUBLAS_STATUS_ALLOC_FAILED",
    ],
)
def test_out_of_memory_names_the_remedy(rigs: Callable, monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    rig: Rig = rigs("llama", "cuda")

    failing = Mock(side_effect=RuntimeError(said))

    helps = r"smaller max_length or max_batch, or .*--max-length or --max-batch or in fp16"
    with monkeypatch.context() as patch:
        patch.setattr(rig.engine._session("segment.0"), "run_with_iobinding", failing)
        with pytest.raises(
            CapacityError, match=rf"no memory to run segment\.0\.folded\.onnx: {said[:20]}.*{helps}"
        ):
            generated(rig)
    rig.fresh()
    monkeypatch.setattr(rig.engine, "_sessions", {})
    monkeypatch.setattr(rig.engine, "open_session", failing)
    with pytest.raises(CapacityError, match=rf"no memory to load head\.onnx.*{helps}"):
        rig.engine.load("head")


def test_an_error_of_a_run_is_named(rigs: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    rig: Rig = rigs("llama", "cuda")

    failing = Mock(side_effect=RuntimeError("CUDA failure 700: an illegal memory access"))

    monkeypatch.setattr(rig.engine._session("segment.0"), "run_with_iobinding", failing)
    with pytest.raises(BundleError, match=r"cannot run segment\.0\.folded\.onnx: CUDA failure 700"):
        generated(rig)
    rig.fresh()
