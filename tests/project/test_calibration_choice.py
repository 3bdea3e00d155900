"""What `benchmarks/calibration.py` makes of counters and rates."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest
from vlmexport.runtime.speculate.budget import Budget
from vlmexport.runtime.speculate.choice import Observed
from vlmexport.runtime.speculate.costs import CostTable, Curve, DraftCosts

TABLE = CostTable(
    Curve({1: 1.0, 3: 1.2, 5: 1.6}), {"heads": DraftCosts(once=0.1), "slow": DraftCosts(propose=2.0)}
)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
    return importlib.import_module("calibration")


def seen(draft: str, *accepted: int) -> Observed:
    """A hundred cycles of the longest chain; how many of them accepted the first token, the second …"""
    depth = len(accepted)
    return Observed(draft, Budget.chain(depth), {(depth, depth): 100}, list(accepted))


def test_a_choice_is_judged_where_it_was_not_made(script: ModuleType) -> None:
    far, near = seen("heads", 90, 85, 80, 75), seen("heads", 90, 20, 0, 0)
    alike = script.counted(TABLE, [far], [far])
    assert alike["chosen"] == alike["best"] == "heads × 4" and alike["of_best"] == 1.0
    assert alike["predicted"] == alike["speedup"] == pytest.approx(4.3 / 1.7, abs=1e-4)
    other = script.counted(TABLE, [far], [near])
    assert (other["chosen"], other["best"]) == ("heads × 4", "heads × 2")
    assert other["speedup"] == pytest.approx(2.1 / 1.7, abs=1e-4)
    assert other["best_speedup"] == pytest.approx(2.1 / 1.3, abs=1e-4)
    assert other["of_best"] == pytest.approx(1.3 / 1.7, abs=1e-4)


def test_plain_decoding_is_a_choice(script: ModuleType) -> None:
    poor, good = seen("slow", 10), seen("heads", 90)
    found = script.counted(TABLE, [poor], [poor])
    assert (found["chosen"], found["best"], found["of_best"]) == ("plain", "plain", 1.0)
    missed = script.counted(TABLE, [poor], [good])
    assert (missed["chosen"], missed["best"]) == ("plain", "heads × 1") and missed["of_best"] < 1


def test_the_choice_is_compared_with_the_best(script: ModuleType) -> None:
    """Each beside plain decoding: a turn in which the machine was twice as slow changes no ratio. The best is the one of
    even turns, judged by odd ones."""
    speedups = {
        "session": (1.8, 1.8),
        "heads × 2": (1.9, 1.9),
        "heads × 4": (2.1, 2.0),
        "heads × 8": (0.5, 4.0),
    }
    pairs = {name: [(1.0, 1 / even), (2.0, 2 / odd)] for name, (even, odd) in speedups.items()}
    found = script.compare("heads × 2", 2.0, pairs)
    assert (found["best"], found["of_best"], found["session_of_best"]) == ("heads × 4", 0.95, 0.9)
    assert (found["measured"], found["of_prediction"]) == (1.9, 0.95)
    assert "95.0 % of it, within 5 %" in script.verdict(found["of_best"])
    assert "not within" in script.verdict(found["session_of_best"])


def test_what_a_first_look_rules_out(script: ModuleType) -> None:
    pairs = {
        "plain": [(1.0, 1.0)],
        "session": [(1.0, 2.0)],
        "heads × 2": [(1.0, 0.6)],
        "heads × 4": [(1.0, 0.5)],
    }
    assert script.contenders(pairs, "plain") == {"session", "plain", "heads × 2", "heads × 4"}
    assert script.contenders(pairs, "heads × 2") == {"session", "heads × 2", "heads × 4"}
