"""The table of FastVLM's stages in `benchmarks/`: what a row says, and a whole run at a small size."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import machine
from benchmarks import papers_fastvlm_stages as script


def result(stage: str, seed: int, alpha: float, texts: list[str]) -> dict[str, Any]:
    told = {"facts": alpha, "plans": 0.5, "tokens": 90.0, "perplexity_over_floor": 1.1}
    return {
        "stage": stage, "seed": seed, "alpha": alpha, "tau": 4 * alpha, "different": seed, "captions": told, "texts": texts,
    }  # fmt: skip


def test_rows_are_means_over_seeds() -> None:
    found = [
        result("frozen", 0, 0.5, ["a", "b"]), result("joint", 0, 0.75, ["a", "x"]),
        result("frozen", 1, 0.6, ["a", "b"]), result("joint", 1, 0.7, ["y", "z"]),
    ]  # fmt: skip
    frozen, joint = script.summary(found)
    assert (frozen["stage"], frozen["seeds"], frozen["alpha"], frozen["spread"]) == ("frozen", 2, 0.55, 0.1)
    assert (frozen["different"], frozen["captioned"], frozen["captions"]["facts"]) == (1, 4, 0.55)
    assert (frozen["same_captions"], joint["same_captions"]) == (1.0, 0.25)
    assert script.summary(found[1::2])[0]["same_captions"] is None, "nothing to compare with"
    columns = [line.count("|") for line in script.table([frozen, joint]).splitlines()]
    assert len(columns) == 4 and len(set(columns)) == 1, "a row has as many columns as its head"


@pytest.mark.slow
def test_a_small_table_is_made_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "RESULTS", tmp_path / "results")
    words = "table --seeds 1 --captions 8 --validation 2 --steps 4 --fine-tune 2 --batch-size 4 --scenes 2"
    monkeypatch.setattr(sys, "argv", [*words.split(), "--folder", str(tmp_path)])
    script.main()
    found = json.loads((tmp_path / "results/papers-fastvlm-stages-tiny-vit-gpt2.json").read_text())
    assert [row["stage"] for row in found["rows"]] == ["frozen", "fine-tuned", "joint", "both"]
    assert all(run["different"] == 0 and "texts" not in run for run in found["runs"])
    assert len({run["target"] for run in found["runs"]}) == 4, "every stage but the first changes the target"
    monkeypatch.setattr(script, "train", lambda *_: pytest.fail("what is there is kept"))
    script.main()
