"""The dry run against a real build of the same request."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from vlmexport.exporter.checkpoint.tensors import TensorFiles
from vlmexport.exporter.cli.tables import dry_run_tables
from vlmexport.exporter.pipeline import BuildRequest, build_bundle
from vlmexport.exporter.pipeline.dry_run import dry_run
from vlmexport.runtime.bundle.folder import Bundle
from vlmexport.runtime.common.errors import OptionError
from vlmexport.runtime.measure.inspection import facts


@pytest.mark.parametrize("name", ["llama", "blip2-t5", "llava", "qwen2.5-vl"])
def test_the_plan_is_what_the_build_writes(tiny_checkpoint: Callable, tmp_path: Path, name: str) -> None:
    request = BuildRequest(
        model=str(tiny_checkpoint(name)),
        output=tmp_path / "bundle",
        draft_layer=1,
        max_length=80,
        parity=False,
    )
    told: list[tuple[str, int, int]] = []
    found = dry_run(request, lambda *call: told.append(call))
    assert told == [("graphs", done, len(found.graphs)) for done in range(len(found.graphs) + 1)]
    assert list(tmp_path.iterdir()) == []
    report = build_bundle(request)
    assert [(g.name, g.nodes, g.bytes) for g in found.graphs] == [
        (g.name, g.nodes, g.bytes) for g in report.graphs
    ]
    assert (found.parameters, found.draft_parameters) == (report.parameters, report.draft_parameters)
    assert found.weight_bytes == report.weight_bytes == (tmp_path / "bundle/weights.bin").stat().st_size
    assert (found.cuts, found.drafts, found.speculative) == (report.cuts, report.drafts, report.speculative)
    tokenizer = (tmp_path / "bundle/tokenizer.json").stat().st_size + (
        tmp_path / "bundle/manifest.json"
    ).stat().st_size
    assert found.bundle_bytes == report.bytes - tokenizer
    decoder = json.loads((tmp_path / "bundle/manifest.json").read_text("utf-8"))["decoder"]
    assert (
        found.kv_bytes_per_token
        == 2 * 4 * decoder["num_layers"] * decoder["num_kv_heads"] * decoder["head_dim"]
    )
    assert found.kv_bytes_per_sequence == found.kv_bytes_per_token * (80 + 16)
    assert found.kv_bytes == 16 * found.kv_bytes_per_sequence
    cross = found.cross_kv_bytes_per_row * (request.max_source if name == "blip2-t5" else 0)
    assert found.peak_memory.cache == found.kv_bytes_per_sequence + cross, (
        "of one sequence: what a session takes"
    )
    assert (found.cross_kv_bytes_per_row > 0) == (name == "blip2-t5")
    assert found.seconds > 0
    shown = facts(Bundle.open(request.output))
    keys = ("bytes_per_token", "bytes_per_image", "bytes_per_sequence")
    assert [getattr(found, f"kv_{key}") for key in keys] == [shown["kv"][key] for key in keys]
    assert (found.parameters, found.weight_bytes) == (shown["model"]["parameters"], shown["weights"]["bytes"])
    rows = shown["text"]["image_rows"] or shown["limits"].get("max_image_rows") or 0
    per_row = found.cross_kv_bytes_per_row or found.kv_bytes_per_token
    assert found.kv_bytes_per_image == rows * per_row and (rows > 0) == (name != "llama")
    assert dry_run_tables(found)


def test_a_dry_run_reads_no_weights(
    tiny_checkpoint: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(self: TensorFiles, name: str) -> None:
        raise AssertionError(f"the dry run reads {name}")

    monkeypatch.setattr(TensorFiles, "read", read)
    found = dry_run(
        BuildRequest(model=str(tiny_checkpoint("llama-tied")), output=tmp_path / "b", draft_layer=1)
    )
    assert found.parameters > 0


def test_a_dry_run_raises_what_the_build_would(tiny_checkpoint: Callable, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"choose 1\.\.1"):
        dry_run(BuildRequest(model=str(tiny_checkpoint("llama")), output=tmp_path / "b", draft_layer=9))


def test_parity_memory_decides_how_parity_runs(tiny_checkpoint: Callable, tmp_path: Path) -> None:
    plans = [
        dry_run(
            BuildRequest(
                model=str(tiny_checkpoint("llama")), output=tmp_path / "b", draft_layer=1, parity_memory=m
            )
        )
        for m in (0, 1 << 30)
    ]
    assert [p.parity for p in plans] == ["layer by layer", "whole"]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="reads /proc")
def test_peak_memory_is_near_the_estimate(tiny_checkpoint: Callable, tmp_path: Path) -> None:
    """Measured in fresh processes: within 40 % (the base of a process dominates a tiny model)."""
    model = tiny_checkpoint("blip2-t5")
    found = dry_run(BuildRequest(model=str(model), output=tmp_path / "b", draft_layer=1))
    build = f"main(['build', '--model', {str(model)!r}, '--draft-layer', '1', '-o', {str(tmp_path / 'b')!r}, '--json'])"
    run = f"main(['run', {str(tmp_path / 'b')!r}, '--image', {_picture(tmp_path)!r}, '--prompt', 'the cup', '--json'])"
    for line, estimate in ((build, found.peak_memory.build), (run, found.peak_memory.run)):
        code = (
            f"import re, sys; from vlmexport.runtime.cli import main; status = {line};"
            "peak = re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1];"  # of this program, not its parent's
            "sys.stderr.write(f'PEAK {int(peak) * 1024}\\n'); sys.exit(status)"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        peak = int(done.stderr.rpartition("PEAK ")[2])
        assert 0.6 < peak / estimate < 1.4, (line, peak, estimate)


def _picture(folder: Path) -> str:
    from PIL import Image

    path = folder / "red.png"
    Image.new("RGB", (40, 40), (200, 0, 0)).save(path)
    return str(path)
