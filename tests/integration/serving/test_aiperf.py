"""NVIDIA's AIPerf, as its users run it, against `vlmexport serve`: its figures of latency and of speculation are there."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn")

from tests.support.own_environment import own_environment
from tests.support.running_server import WAIT, RunningServer


@pytest.mark.slow
def test_aiperf_reads_latency_and_acceptance(tiny_bundle: Callable[[str], Any], tmp_path: Path) -> None:
    """Streamed, with a client of its own; texts repeat themselves, so that prompt lookup drafts."""
    environment = own_environment("aiperf", ["aiperf==0.13.0"])
    bundle = tiny_bundle("llama").path
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    shutil.copy(bundle / "tokenizer.json", tokenizer)
    (tokenizer / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    extra = {
        "temperature": 0,
        "max_tokens": 40,
        "ignore_eos": True,
        "draft": "prompt-lookup",
        "draft_length": 3,
    }
    with RunningServer(bundle, "--served-name", "tiny") as server:
        command = [
            str(environment / "bin" / "aiperf"), "profile", "--model", "tiny", "--url", server.url, "--endpoint-type", "chat",
            "--streaming", "--tokenizer", str(tokenizer), "--use-server-token-count", "--synthetic-input-tokens-mean", "8",
            "--concurrency", "4", "--request-count", "12", "--extra-inputs", json.dumps(extra), "--ui-type", "none",
            "--output-artifact-dir", str(tmp_path / "found"),
        ]  # fmt: skip
        run = subprocess.run(command, capture_output=True, text=True, timeout=3 * WAIT, cwd=tmp_path)
        assert run.returncode == 0, run.stdout + run.stderr
        served = server.metric("vlmexport:request_success_total", finished_reason="length")
        drafts = server.metric("vlmexport:spec_decode_num_drafts_total")
    found = json.loads(next((tmp_path / "found").rglob("profile_export_aiperf.json")).read_text())
    assert served >= 12 and drafts > 0
    assert found["request_count"]["avg"] == 12
    assert found["output_sequence_length"]["avg"] == 40
    assert found["time_to_first_token"]["avg"] > 0
    assert "Spec Decode" in run.stdout and "Acceptance Length" in run.stdout
    assert found["spec_decode_steps"]["avg"] > 0
    assert found["total_accepted_draft_tokens"]["avg"] + 12 <= found["total_output_tokens"]["avg"]
