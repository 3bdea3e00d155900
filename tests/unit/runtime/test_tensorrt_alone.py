"""`device="tensorrt"` without ONNX Runtime and torch, as on Python 3.10 (JetPack 6): from graphs to plans to tokens, in
processes that refuse to import either. CUDA and TensorRT are not there; numpy computes the plans."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("onnx", reason="compiling plans needs [compile]")
pytest.importorskip("onnx_ir", reason="compiling plans needs [compile]")

from vlmexport.runtime.bundle.folder import Bundle
from vlmexport.runtime.bundle.plans import planned
from vlmexport.runtime.measure.pass_costs import runnable
from vlmexport.runtime.session.session import Session

from tests.support import handmade_bundle, handmade_llama
from tests.support.programs import environment, program

JETPACKS = {"native": "10.16.1.11", "portable": "10.3.0.30"}
"""Lowering that a version of TensorRT gets."""

GENERATE = """
import json, sys
from vlmexport.runtime import Session
from vlmexport.runtime.engines.tensorrt import TensorRTEngine
bundle, requests = sys.argv[1], json.loads(sys.argv[2])
with Session.load(bundle, device="tensorrt") as session:
    assert isinstance(session.decoder.engine, TensorRTEngine)
    said = [session.generate(**request).tokens for request in requests]
    launches = session.decoder.engine.cuda.counts.launches
from tests.support.engines.plan_runs import ByNumpy
print(json.dumps({"said": said, "launches": launches, "computed": ByNumpy.ran,
                  "there": sorted({"onnxruntime", "torch", "transformers"} & set(sys.modules))}))
"""


def alone(version: str, *line: str | Path) -> str:
    """What a program prints on a Jetson that is not there, without ONNX Runtime."""
    command = program("tests.support.emulated_jetson", "--without-onnxruntime", version, *line)
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def generated(folder: Path, lowering: str, requests: list[dict[str, Any]], tmp_path: Path) -> dict[str, Any]:
    """Plans for a bundle, in a process; and what another one makes of requests with them."""
    version = JETPACKS[lowering]
    alone(version, "vlmexport", "compile", folder, "--backend", "tensorrt", "--plan-precision", "fp32")
    assert {plan["lowering"] for plan in Bundle.open(folder).manifest.plans} == {lowering}
    script = tmp_path / "generate.py"
    script.write_text(GENERATE)
    return json.loads(alone(version, script, folder, json.dumps(requests)))


@pytest.mark.parametrize("lowering", JETPACKS)
def test_tokens_of_a_model_written_by_hand(tmp_path: Path, lowering: str) -> None:
    """On Python 3.10, too."""
    folder, weights = handmade_llama.write(tmp_path / "bundle")
    drafts = [draft.name for draft in Bundle.open(folder).manifest.drafts]
    requests = [
        {"prompt": prompt, "max_new_tokens": 14, "ignore_eos": True, "draft": draft}
        for prompt, draft in [("a", "none"), *(("the cup", draft) for draft in ("none", *drafts))]
    ]
    ids = handmade_bundle.byte_level_tokenizer().encode
    wanted = [handmade_llama.greedy(weights, ids(request["prompt"]).ids, 14) for request in requests]
    assert len(set(wanted[1])) > 4, "text that varies"
    found = generated(folder, lowering, requests, tmp_path)
    assert found["said"] == wanted
    assert found["there"] == [] and found["computed"] > 50 and found["launches"] > 0
    if importlib.util.find_spec("onnxruntime") is not None:
        with Session.load(folder) as session:
            assert [session.generate(**request).tokens for request in requests] == wanted


@pytest.mark.slow  # numpy takes seconds for what ONNX Runtime does in moments
@pytest.mark.parametrize(("family", "lowering"), [("llama", "native"), ("t5-text", "portable")])
def test_tokens_of_a_cpu_session(tiny_bundle: Callable, tmp_path: Path, family: str, lowering: str) -> None:
    folder = Path(shutil.copytree(tiny_bundle(family).path, tmp_path / "bundle"))
    manifest = Bundle.open(folder).manifest
    with_plans = runnable(manifest.drafts, planned(manifest))
    assert {draft.kind for draft in manifest.drafts} - {draft.kind for draft in with_plans} == {
        "draft-and-verify"
    }
    drafts = ["none", *(draft.name for draft in with_plans)]
    requests = [{"prompt": "the red cup", "max_new_tokens": 10, "draft": draft} for draft in drafts]
    with Session.load(folder) as session:
        wanted = [session.generate(**request).tokens for request in requests]
    found = generated(folder, lowering, requests, tmp_path)
    assert found["said"] == wanted
    assert found["there"] == [] and found["computed"] > 50 and found["launches"] > 0
