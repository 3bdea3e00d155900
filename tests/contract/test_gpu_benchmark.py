"""`benchmarks/gpu.py` and the tests that need a GPU, on GPUs that are not there."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vlmexport.runtime.bundle.folder import Bundle
from vlmexport.runtime.common.errors import DeviceError
from vlmexport.runtime.engines import create as really
from vlmexport.runtime.session import session

from benchmarks import gpu
from tests.contract import test_gpu
from tests.support.engines import emulated
from tests.support.engines.emulated import EmulatedCuda
from tests.support.programs import environment, program


@pytest.fixture
def copied(tiny_bundle: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bundle:
    """A bundle of a tiny Llama that sessions run on emulated engines."""
    bundle = Bundle.open(Path(shutil.copytree(tiny_bundle("llama").path, tmp_path / "bundle")))
    made: dict[str, Callable[[], Any]] = {
        "cuda": lambda: EmulatedCuda(bundle.path, bundle.manifest),
        "tensorrt": lambda: emulated.Emulated.of(bundle.path, bundle.manifest),
    }

    def create(bundle: Any, device: str, *rest: Any) -> Any:
        return made[device]() if device in made else really(bundle, device, *rest)

    monkeypatch.setattr(session.engines, "create", create)
    return bundle


@pytest.mark.parametrize("device", ["cuda", "tensorrt"])
def test_every_draft_is_an_arm(copied: Bundle, device: str) -> None:
    found = gpu.measure(copied.path, device, 8, 1, [0.5], [2.24], bandwidth=100e9, budget=0.0)
    # A draft over a second graph of the target's weights has no plan.
    drafts = [
        draft for draft in copied.manifest.drafts if device == "cuda" or draft.kind != "draft-and-verify"
    ]
    names = [draft.name for draft in drafts]
    forced = gpu.acceptance_for(2.24, 5)
    arms = [("none", None), *((name, a) for name in names for a in (None, 0.5, forced))]
    assert [(row["draft"], row["acceptance"]) for row in found["arms"]] == arms
    assert (found["machine"], found["engine"]) == ("a GPU that is not there", device)
    assert found["arms"][0]["speedup"] == 1 and {"1", "2"} <= found["passes_ms"].keys()
    for row in found["arms"]:
        if row["acceptance"] is not None:
            assert row["predicted"] > 0 and row["bound"] > 0
    assert found["plain_of_bandwidth"] > 0
    head, _, *table, share = gpu.lines(found)
    assert head == f"a GPU that is not there, {device}, {copied.manifest.model.source}, 8 tokens"
    assert len(table) == len(arms) and "of what 100 GB/s allow" in share


@pytest.mark.parametrize("device", ["cuda", "tensorrt"])
def test_gpu_test_requirements(copied: Bundle, device: str) -> None:
    test_gpu.as_on_a_cpu(copied.path, test_gpu.says_one_thing(test_gpu.every_draft(copied.path, device)))
    narrow = test_gpu.every_draft(copied.path, device, test_gpu.VERIFY_WIDTH)
    assert len(narrow) > 3 and test_gpu.says_one_thing(narrow)
    with pytest.raises(AssertionError):
        test_gpu.says_one_thing({"none": [[1]], "wrong": [[2]]})


def test_accepted_tokens_as_acceptance() -> None:
    a = gpu.acceptance_for(2.24, 5)
    assert sum(a**k for k in range(1, 6)) == pytest.approx(2.24)
    for accepted in (0, 5, 6):
        with pytest.raises(ValueError, match="less than 5"):
            gpu.acceptance_for(accepted, 5)


def test_bandwidth_by_the_name_of_a_gpu() -> None:
    for name, wanted in (
        ("NVIDIA H100 80GB HBM3", 3350e9),
        ("NVIDIA GeForce RTX 4090", 1008e9),
        ("NVIDIA A100-SXM4-80GB", 2039e9),
        ("a GPU that is not there", None),
    ):
        assert gpu.published_bandwidth(name) == wanted


def test_impossible_step_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "out" / "gpu.json"
    asked = argparse.Namespace(minutes=1.0, device="cpu", bandwidth=None, save=False, output=output)
    half = gpu.Half(asked)

    def no_driver() -> Any:
        raise DeviceError("no NVIDIA GPU was found")

    half.step("a", no_driver)
    half.step("b", lambda: 3)
    half.step("wrong", lambda: [][0])
    half._end = 0.0
    half.step("c", lambda: 4)
    assert [row.get("result") for row in half.steps] == [None, 3, None, None]
    said = capsys.readouterr().out
    assert "a: not done: no NVIDIA GPU was found" in said and "IndexError" in said
    assert half.steps[2]["not_done"] == "IndexError: list index out of range"
    assert "test_gpu_benchmark.py" in "".join(half.steps[2]["traceback"])
    assert half.steps[3]["not_done"] == "the 1 minutes are over"
    assert json.loads(output.read_text())["steps"] == half.steps


@pytest.mark.parametrize("status", [0, 1])
def test_tests_that_fail_are_kept(monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    """The machine on which they failed is not there any more when somebody asks why."""
    done = subprocess.CompletedProcess([], status, "x" * 30000 + "\n1 failed", "y" * 5000)
    monkeypatch.setattr(gpu.subprocess, "run", lambda *_, **__: done)
    asked = argparse.Namespace(minutes=1.0, device="cpu", bandwidth=None, save=False, output=None)
    found = gpu.Half(asked).lossless()
    assert (found["status"], found["said"]) == (status, "1 failed")
    assert [len(found.get(name, "")) for name in ("stdout", "stderr")] == (
        [20000, 4000] if status else [0, 0]
    )


@pytest.mark.slow
def test_every_step_is_rehearsed(tmp_path: Path) -> None:
    """Every step of the half hour, with tiny shapes, on an emulated Jetson: builds, plans, T(q), forced acceptance; what is not
    there (CUDA's provider, SmolLM2, a GPU of TensorRT-RTX) is said."""
    line = program("tests.support.emulated_jetson", "10.16.1.11", "-m", "benchmarks.gpu")
    options = ["--rehearse", "--folder", tmp_path, "--tokens", "8", "--repeats", "1", "--budget", "0"]
    done = subprocess.run(
        [*line, *options, "--minutes", "60"], env=environment(), capture_output=True, text=True, timeout=3000
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = {row["step"]: row["not_done"] for row in json.loads(done.stdout[done.stdout.rindex("\n[") :])}
    assert [step for step, why in rows.items() if why is None and step.endswith("tensorrt")] == [
        "tiny-blip2-flant5: tensorrt", "tiny, qwen2.5-vl: tensorrt",
    ]  # fmt: skip
    assert "compiles for" in rows["TensorRT-RTX"] and "vispec at" in done.stdout
    assert not any(tmp_path.iterdir()), "bundles are deleted"
