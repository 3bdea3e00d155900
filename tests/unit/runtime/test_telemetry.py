"""Nothing leaves the machine and nothing is left behind: ONNX Runtime's telemetry is off."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

SERVE = """
import sys, time
from vlmexport.runtime import Session
with Session.load(sys.argv[1]) as session:
    assert session.generate(prompt="a red cup", max_new_tokens=4, ignore_eos=True).tokens
time.sleep(1.0)  # reports are sent in the background
"""
DEFAULT = "import onnxruntime, sys, time\nonnxruntime.InferenceSession(sys.argv[1])\ntime.sleep(1.0)\n"


def run(code: str, home: Path, argument: Path, trace: Path | None = None) -> list[Path]:
    """Files that a fresh interpreter with a fresh home leaves there."""
    home.mkdir()
    # Nothing else: ONNX Runtime keeps still by itself where a variable (CI, TF_BUILD) tells of a build machine.
    kept = {name: value for name, value in os.environ.items() if name in ("PATH", "TMPDIR", "PYTHONPATH")}
    command = [sys.executable, "-c", code, str(argument)]
    if trace is not None:
        command = ["strace", "-f", "-qq", "-e", "trace=socket,connect", "-o", str(trace), *command]
    subprocess.run(command, env={**kept, "HOME": str(home)}, check=True, timeout=240)
    return [path for path in home.rglob("*") if path.is_file()]


def test_a_request_writes_nothing_under_the_home_folder(tiny_bundle: Callable, tmp_path: Path) -> None:
    bundle = tiny_bundle("llama").path
    assert run(SERVE, tmp_path / "quiet", bundle) == []
    # The same engine without us does: the check above can fail.
    left = run(DEFAULT, tmp_path / "default", bundle / "head.onnx")
    if not left:
        pytest.skip("ONNX Runtime leaves nothing here by itself: only that we leave nothing was seen")
    assert any("onnxruntime" in str(path).lower() for path in left)


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_a_request_opens_no_socket(tiny_bundle: Callable, tmp_path: Path) -> None:
    run(SERVE, tmp_path / "home", tiny_bundle("llama").path, tmp_path / "trace")
    assert "AF_INET" not in (tmp_path / "trace").read_text("utf-8")


def test_telemetry_can_be_enabled_by_the_user() -> None:
    code = "import os, vlmexport.runtime; print(os.environ['ORT_DISABLE_TELEMETRY'])"
    for given, expected in ((None, "1"), ("0", "0")):
        environment = {name: value for name, value in os.environ.items() if name != "ORT_DISABLE_TELEMETRY"}
        if given is not None:
            environment["ORT_DISABLE_TELEMETRY"] = given
        found = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
        )
        assert found.stdout.strip() == expected
