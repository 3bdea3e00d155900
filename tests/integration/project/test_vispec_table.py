"""ViSpec's table of `benchmarks/`: what its order is of, and a whole run at a small size."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import papers_vispec as script
from benchmarks import vispec_runs as runs


def run(arm: str, seed: int, tau: float) -> dict[str, Any]:
    return {
        "arm": arm,
        "seed": seed,
        "tau": {"tree, T = 0": tau},
        "rate": 1e-3,
        "parameters": 10,
        "texts": 4,
        "different": 0,
    }


def test_the_order_needs_every_seed() -> None:
    key = "tree, T = 0"
    rising = [
        run(arm, s, t + s / 10) for arm, t in (("medusa", 1.5), ("eagle", 2), ("vispec", 3)) for s in (0, 1)
    ]
    assert script.order(rising, key) == "confirmed"
    assert script.order([*rising, run("eagle", 2, 1.55)], key) == "undecided"
    falling = [run("medusa", 0, 2.0), run("eagle", 0, 1.5), run("vispec", 0, 3.0)]
    assert script.order(falling, key) == "contradicted"
    assert script.order(rising[:4], key) == "undecided", "an arm is missing"
    (one, *_) = script.summary(rising)
    assert (one["seeds"], one["tau"], one["spread"], one["texts"]) == (2, {key: 1.55}, {key: 0.1}, 8)
    lines = script.table(script.summary(rising)).splitlines()
    assert len({line.count("|") for line in lines}) == 1


@pytest.mark.slow
def test_a_small_run_goes_on_where_it_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from vlmexport.runtime.engines import onnxruntime

    from recipes.tiny_qwen2_5_vl.model import build_model, save_bundle
    from recipes.tiny_qwen2_5_vl.tokenizer import build_tokenizer

    for module in (script, runs):
        monkeypatch.setattr(module, "LONGEST", 12)  # a model that knows nothing never ends
    tokenizer = build_tokenizer()
    save_bundle(build_model(tokenizer).eval(), tokenizer, tmp_path / "model", 160)
    saved: list[dict[str, Any]] = []
    threads = onnxruntime._pool_threads or 1  # another test of this process may have begun its pool
    monkeypatch.setattr(script, "save", lambda name, result, *packages: saved.append(result))

    def measured(*arms: str) -> dict[str, Any]:
        words = (
            f"--model {tmp_path / 'model'} --folder {tmp_path / 'runs'} --seeds 1 --count 6 --validation 2"
        )
        words += f" --steps 4 --batch-size 3 --scenes 2 --threads {threads} --arms {' '.join(arms)}"
        monkeypatch.setattr(sys, "argv", ["papers_vispec", *words.split()])
        script.main()
        return saved[-1]

    measured("medusa", "vispec-short")
    kept = {path: path.read_text() for path in (tmp_path / "runs" / "counted").iterdir()}
    found = measured("medusa", "eagle", "vispec", "vispec-no-global", "vispec-short")
    assert all(path.read_text() == text for path, text in kept.items()) and len(kept) == 2
    assert [row["arm"] for row in found["rows"]] == [
        "medusa",
        "eagle",
        "vispec",
        "vispec-no-global",
        "vispec-short",
    ]
    assert all(row["texts"] == 8 and row["different"] == 0 for row in found["rows"])
    assert set(found["order"]) == {f"{way}, T = {t}" for way in ("chain", "tree") for t in (0, 1)}
    assert [row["rate"] for row in found["rows"]] == [3e-2, 1e-2, 1e-2, 1e-2, 1e-2]
    with pytest.raises(SystemExit):
        measured("medusa", "--rate", "1e-3")
    assert "another --folder" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        measured("medusa", "--rate", "low")
    assert "--rate: invalid numeral value: 'low'" in capsys.readouterr().err
    counted = json.loads((tmp_path / "runs" / "counted" / "vispec-seed-0.json").read_text())
    assert counted["parameters"] > 200_000 and counted["evaluation"]
