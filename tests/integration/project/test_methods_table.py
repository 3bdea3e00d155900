"""FastVLM's comparison of methods of `benchmarks/`: what an exit writes alone, and a whole run at a small size."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks import papers_fastvlm_methods as script
from benchmarks import papers_fastvlm_seeds as seeds

MODEL = "tiny-vit-gpt2"


def test_an_exit_writes_what_its_layers_and_its_network_say() -> None:
    from vlmexport.calibration.targets.target import load_target

    target = load_target(MODEL, "cpu")
    held = script.records(target, "captions", "heldout", 2)
    plain = target.generate(held, 12)
    with script.exited(target, target.num_layers, nn.Identity()):
        assert target.generate(held, 12) == plain
    (draft, *_) = script.networks(target)
    with script.exited(target, draft.layer, draft.network):
        assert target.num_layers == draft.layer
        told = target.generate(held, 12)
    assert target.num_layers == 12
    assert target.generate(held, 12) == plain
    # What it writes is what the draft proposes behind its own text.
    for record, ids in zip(held, told, strict=True):
        rows, _ = target.rows([replace(record, tokens=ids)], [draft.layer])
        with torch.no_grad():
            best = target.head(draft.network(rows.trunk)).argmax(-1)
        assert best.tolist() == rows.tokens.tolist()


def test_gains_by_weights_are_those_of_the_counts() -> None:
    from vlmexport.runtime.speedup.stats import Stats

    stats = Stats(requests=1, tokens=9, cycles=4, proposed=8, evaluated=6, accepted=4)
    assert script.Method("", "", 0.25).by_weights(stats) == stats.tau / 1.5


@pytest.mark.slow
def test_a_small_run(tmp_path: Path) -> None:
    from vlmexport.calibration.targets.target import load_target

    target = load_target(MODEL, "cpu")
    bundle = tmp_path / MODEL
    methods, drafts = script.ready(target, bundle), script.networks(target)
    found = script.measured(target, bundle, methods, drafts, scenes=3, chosen=1)
    rows = found["captions"]
    verified = [row for row in rows.values() if "draft" in row]
    assert {row["draft"] for row in verified} == {
        "early-exit@3", "early-exit@6", "imitation@3", "imitation@6", "draft-and-verify",
    }  # fmt: skip
    assert all(row["differ"] == 0 and 1 <= row["tau"] <= row["draft_length"] + 1 for row in verified)
    assert rows["unverified: 3 layers alone"]["BLEU-4"] < rows["plain"]["BLEU-4"]
    timed = script.times(target, bundle, found, scenes=1, rounds=1, threads=None)
    assert timed["tasks"]["captions"].keys() == {
        "plain",
        *(name for name, row in rows.items() if "draft" in row),
    }


def test_rows_of_seeds_are_put_together() -> None:

    def one(lengths: tuple[int, ...], alpha: float, bleu: float) -> dict[str, object]:
        counts = {"draft": "imitation@3", "share": 0.3, "differ": 0, "tau": 2.0, "by_weights": 1.5}
        drafted = {
            f"imitation, n = 3, d = {d}": counts | {"draft_length": d, "alpha": alpha + d / 100}
            for d in lengths
        }
        alone = {"BLEU-4": bleu, "by_weights": 4.0}
        return {"captions": {"plain": {"BLEU-4": 0.5}, **drafted, "unverified: 3 layers alone": alone}}

    # The second seed's own length is the paper's.
    rows = seeds.over_seeds([one((4, 8), 0.7, 0.1), one((8,), 0.8, 0.3)])["captions"]
    assert rows.keys() == {
        "imitation, n = 3, its own d",
        "imitation, n = 3, d = 8",
        "unverified: 3 layers alone",
    }
    own, paper, alone = rows.values()
    assert own["draft_length"] == [4, 8]
    assert own["alpha"] == pytest.approx([0.74, 0.88])
    assert own["mean_alpha"] == pytest.approx(0.81)
    assert paper["alpha"] == pytest.approx([0.78, 0.88])
    assert alone["mean_BLEU-4"] == pytest.approx(0.2)
    assert "mean_by_weights" not in alone
