"""The bounds of docs/results/papers/bounds.md: against arithmetic by hand, and each row as the script prints it."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import papers_bounds as bounds

ROOT = Path(__file__).resolve().parents[3]


def test_an_exit_by_hand():
    half = bounds.Exit(16, 32, 8)
    assert half.cycle == 5.0 and half.bound == pytest.approx(9 / 5) and half.limit == 2.0
    assert half.needed(1.85) is None and half.needed(1.8) == pytest.approx(1.0)
    # One token a cycle is kept whatever is drafted: five passes' worth of time for it.
    assert half.needed(1 / 5) == pytest.approx(0.0, abs=1e-9)
    alpha = half.needed(1.55)
    assert alpha is not None and bounds.kept(alpha, 8) == pytest.approx(1.55 * 5)
    assert bounds.kept(0.5, 3) == 1.875


def test_weights_by_hand():
    small = bounds.Llama(width=4, layers=2, feed_forward=8, vocabulary=10)
    assert (small.layer, small.head, small.step) == (160, 40, 360)
    assert (small.eagle_step, small.draft_step) == (160 + 32 + 40, 160 + 64 + 40)
    assert small.drafting("Medusa") == (5 * 16 + 40) / 360 and small.drafting("EAGLE-2") == 4 * 232 / 360
    grouped = bounds.Llama(width=4, layers=2, feed_forward=8, vocabulary=10, group=2)
    assert grouped.layer == 32 + 16 + 96, "keys and values of half the heads"
    assert bounds.VICUNA_7B.step == pytest.approx(6.6e9, rel=0.01), "Vicuna-7B without its embedding table"


def test_the_page_holds_what_the_script_prints():
    page = (ROOT / "docs" / "results" / "papers" / "bounds.md").read_text("utf-8").splitlines()
    for row in [*bounds.fastvlm(), *bounds.cells(), *bounds.vispec(), *bounds.comparison()]:
        assert row in page
