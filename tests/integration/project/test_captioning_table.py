"""The captioning table of `benchmarks/`: what it counts, what its bounds are of, and a whole run at a small size."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks import captioning_runs, captioning_times, machine
from benchmarks import papers_medusa_captioning as script


def result(kind: str, seed: int, tau: float, texts: list[str]) -> dict[str, Any]:
    return {
        "heads": 2, "kind": kind, "seed": seed, "tau": tau, "alpha": 0.5, "different": seed, "tokens": 10,
        "hits": [[0.6, 0.2, 0.1, 0.05], [0.4, 0.2, 0.1, 0.1]], "texts": texts,
        "captions": {"facts": tau / 4, "plans": 0.5, "tokens": 90.0, "perplexity_over_floor": 1.1},
    }  # fmt: skip


def test_the_order_of_two_kinds_needs_every_seed() -> None:
    assert script.below([2.0, 2.1], [2.1, 2.4]) == "confirmed"
    assert script.below([2.2, 2.3], [2.0, 2.1]) == "contradicted"
    assert script.below([2.0, 2.2], [2.1, 2.3]) == "undecided"
    assert script.below([2.0], []) == script.below([], [2.0]) == "undecided"


def test_rows_are_means_over_seeds() -> None:
    found = [
        result("Medusa-1", 0, 2.0, ["a", "b"]), result("Medusa-2", 0, 2.6, ["a", "x"]),
        result("Medusa-1", 1, 2.2, ["a", "b"]), result("Medusa-2", 1, 2.5, ["y", "z"]),
    ]  # fmt: skip
    one, two = script.summary(found)
    assert (one["kind"], one["seeds"], one["tau"], one["spread"]) == ("Medusa-1", 2, 2.1, 0.2)
    assert (one["different"], one["captioned"], one["tokens"], one["captions"]["facts"]) == (1, 4, 20, 0.525)
    assert (one["first"], one["first_three"]) == ([0.6, 0.4], [0.9, 0.7])
    assert (one["same_captions"], two["same_captions"]) == (1.0, 0.25)
    assert script.summary(found[1::2])[0]["same_captions"] is None, "nothing to compare with"
    assert script.taus(found, "Medusa-2", 2) == [2.6, 2.5] and script.taus(found, "Medusa-2", 4) == []
    printed = script.table([one, two]).splitlines()
    tables = [[line.count("|") for line in printed[a:b]] for a, b in ((0, 4), (5, 9))]
    assert all(len(set(columns)) == 1 for columns in tables), "a row has as many columns as its head"


def test_bounds_count_the_weights_that_a_step_reads() -> None:
    sizes = script.GPT2
    config = GPT2Config(
        n_embd=sizes.width, n_layer=sizes.layers, vocab_size=sizes.vocabulary, add_cross_attention=True
    )
    with torch.device("meta"):
        model = GPT2LMHeadModel(config)
    read = [
        p.numel()
        for name, p in model.transformer.h.named_parameters()
        if p.ndim > 1 and "crossattention.c_attn" not in name
    ]
    assert sizes.step == sum(read) + model.lm_head.weight.numel()
    assert sizes.bound(3.0, 0) == 3.0 > sizes.bound(3.0, 2) > sizes.bound(2.0, 2)
    assert script.paper([2])["bounds"]["2"] == {"by_tokens": 3, "by_weights": 1.912}


def test_arms_take_turns_after_a_round_that_warms_up() -> None:
    called: list[str] = []
    arms = {name: lambda name=name: called.append(name) or float(len(called)) for name in "abcd"}
    found = captioning_times.interleaved(arms, 3)
    assert sorted(called[:4]) == list("abcd") and len(called) == 16
    assert {tuple(called[at : at + 4]) for at in range(0, 16, 4)} != {tuple(called[:4])}
    assert found["a"] == [float(at + 1) for at, name in enumerate(called) if name == "a"][1:]
    assert captioning_times.ratios([2.0, 3.0, 8.0], [1.0, 1.0, 2.0]) == {
        "median": 3.0,
        "least": 2.0,
        "most": 4.0,
    }


@pytest.mark.slow
def test_a_small_table_is_made_kept_and_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine, "RESULTS", tmp_path / "results")
    words = [
        "table", "--folder", str(tmp_path), "--kinds", "medusa-1", "medusa-2", "--heads", "2", "--seeds", "1", "--captions", "8",
        "--validation", "2", "--steps", "6", "--batch-size", "4", "--scenes", "2",
    ]  # fmt: skip
    monkeypatch.setattr(sys, "argv", words)
    script.main()
    found = json.loads((tmp_path / "results" / "papers-medusa-captioning.json").read_text())
    frozen, joint = found["runs"]
    assert frozen["different"] == joint["different"] == 0 and frozen["target"] != joint["target"]
    assert [row["kind"] for row in found["rows"]] == ["Medusa-1", "Medusa-2"] and "texts" not in frozen
    monkeypatch.setattr(script, "train", lambda *_: pytest.fail("what is there is kept"))
    script.main()
    monkeypatch.setattr(
        sys, "argv", [*words, "--time", "--rounds", "1", "--timed-scenes", "1", "--samples", "2"]
    )
    script.main()
    timed = json.loads((tmp_path / "results" / "papers-medusa-captioning-times.json").read_text())["bundles"]
    kinds = captioning_runs.KINDS
    assert set(timed) == {f"{kind}-2-heads-{kinds[kind].rates}-seed-0" for kind in ("medusa-1", "medusa-2")}
    assert all(row["decode"]["median"] > 0 and row["bound"] > 0 for row in timed.values())
    assert "samples/s" in capsys.readouterr().out


@pytest.mark.slow
def test_rates_are_compared_on_validation_scenes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "RESULTS", tmp_path / "results")
    rates = captioning_runs.Rates
    swept = {"medusa-1": [rates(1e-3), rates(1e28)], "medusa-2": [rates(1e-2, 1e-3)]}
    monkeypatch.setattr(script, "SWEPT", swept)
    words = [
        "table", "--folder", str(tmp_path), "--sweep", "--heads", "1", "2", "--captions", "8", "--validation", "2",
        "--steps", "12", "--batch-size", "4", "--scenes", "2",
    ]  # fmt: skip
    monkeypatch.setattr(sys, "argv", words)
    script.main()
    found = json.loads((tmp_path / "results" / "papers-medusa-captioning-rates.json").read_text())["rows"]
    assert [(row["heads"], row["rate"], row["base_rate"]) for row in found] == [
        (2, 1e-3, None), (2, 1e28, None), (2, 1e-2, 1e-3),
    ]  # fmt: skip
    frozen, diverged, joint = found
    assert diverged["alpha"] is diverged["tau"] is diverged["perplexity_over_floor"] is None
    assert frozen["tokens"] > 50 and joint["perplexity_over_floor"] != frozen["perplexity_over_floor"]
    monkeypatch.setattr(script, "train", lambda *_: pytest.fail("what is there is kept"))
    script.main()
