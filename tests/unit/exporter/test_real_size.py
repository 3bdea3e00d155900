"""A checkpoint of more than a gigabyte, built with its layers compared one after the other, run and verified."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import real_size
from tests.support.programs import ROOT


@pytest.mark.slow
def test_a_checkpoint_of_a_gigabyte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `benchmarks/real_size.py` does with models of the papers' sizes, at 0.7 B parameters."""
    monkeypatch.chdir(ROOT)  # its parts run in processes of their own
    found = real_size.measure("llava, 0.7 B", tmp_path / "case", run=True)
    assert found["checkpoint_gb"] > 1.2 and found["dry_run_agrees"]
    assert found["verified"] and not found["failures"] and found["tokens"] == 8
    assert abs(found["build_peak"]["peak"] / found["build_peak"]["estimate"] - 1) < 0.15, found["build_peak"]
    assert abs(found["run_peak"]["peak"] / found["run_peak"]["estimate"] - 1) < 0.15, found["run_peak"]
    assert found["build_peak"]["peak"] < found["checkpoint_gb"] * 2, "float32 alone is twice the checkpoint"
    for form in ("float16", "linked"):
        assert found[form]["tokens_equal"] and found[form]["run_peak_of_float32"] <= 1.1, found[form]
        assert found[form]["bundle_of_checkpoint"] <= 1.05, found[form]
    assert found["linked"]["disk_of_checkpoint"] <= 0.05 < 0.9 <= found["float16"]["disk_of_checkpoint"]
    assert {"vision", "segment.0", "segment.1", "head"} <= set(found["parity"])
    for graph, row in found["parity"].items():
        if row["torch_difference"]:
            assert row["max_abs_difference"] < 4 * row["torch_difference"], graph
