"""What `benchmarks/calibration.py` makes of counters and rates."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from vlmexport.runtime.bundle.manifest import DraftInfo
from vlmexport.runtime.bundle.stored_costs import StoredChoice
from vlmexport.runtime.speedup.budget import Budget
from vlmexport.runtime.speedup.cost_model import CostTable, Curve, DraftCosts
from vlmexport.runtime.speedup.predict import AcceptanceCounts
from vlmexport.runtime.speedup.stats import Stats
from vlmexport.runtime.tuning.ab_runs import Arm, Turn

from benchmarks import calibration as script

TABLE = CostTable(
    Curve({1: 1.0, 3: 1.2, 5: 1.6}), {"heads": DraftCosts(once=0.1), "slow": DraftCosts(propose=2.0)}
)


def seen(draft: str, *accepted: int) -> AcceptanceCounts:
    """A hundred cycles of the longest chain; how many of them accepted the first token, the second …"""
    depth = len(accepted)
    return AcceptanceCounts(draft, Budget.chain(depth), {(depth, depth): 100}, list(accepted))


def test_a_choice_is_judged_where_it_was_not_made() -> None:
    far, near = seen("heads", 90, 85, 80, 75), seen("heads", 90, 20, 0, 0)
    alike = script.counted(TABLE, [far], [far])
    assert alike["chosen"] == alike["best"] == "heads × 4" and alike["of_best"] == 1.0
    assert alike["predicted"] == alike["speedup"] == pytest.approx(4.3 / 1.7, abs=1e-4)
    other = script.counted(TABLE, [far], [near])
    assert (other["chosen"], other["best"]) == ("heads × 4", "heads × 2")
    assert other["speedup"] == pytest.approx(2.1 / 1.7, abs=1e-4)
    assert other["best_speedup"] == pytest.approx(2.1 / 1.3, abs=1e-4)
    assert other["of_best"] == pytest.approx(1.3 / 1.7, abs=1e-4)


def test_plain_decoding_is_a_choice() -> None:
    poor, good = seen("slow", 10), seen("heads", 90)
    found = script.counted(TABLE, [poor], [poor])
    assert (found["chosen"], found["best"], found["of_best"]) == ("plain", "plain", 1.0)
    missed = script.counted(TABLE, [poor], [good])
    assert (missed["chosen"], missed["best"]) == ("plain", "heads × 1") and missed["of_best"] < 1


def turn(number: int, plain: float, other: float, tokens: int = 8) -> Turn:
    """A request of 9 tokens: seconds plain and in another way, and how many of its tokens a cycle kept."""
    slow, fast = (
        Stats(tokens=9, cycles=cycles, total_seconds=seconds)
        for cycles, seconds in ((8, plain), (8 // tokens, other))
    )
    return Turn(number, slow, fast)


def turns(even: float, odd: float, requests: int = 12, tokens: int = 8) -> list[Turn]:
    """Speed-ups of every second request and of the others; the machine is twice as slow for the latter."""
    return [
        turn(n, 1.0, 1 / even, tokens) if n % 2 == 0 else turn(n, 2.0, 2 / odd, tokens)
        for n in range(requests)
    ]


CHOICE = StoredChoice(draft="heads", draft_length=2, speedup=2.0, tokens_per_cycle=5.0, interval=[1.9, 2.1])


def test_the_choice_is_compared_with_the_best_and_with_its_prediction() -> None:
    """Each beside plain decoding: a turn in which the machine was twice as slow changes no ratio. The best is the one of
    every second request, judged by the others."""
    found = {
        "plain": turns(1.0, 1.0),
        "heads × 2": turns(1.9, 1.9, tokens=4),
        "heads × 4": turns(2.1, 2.0),
        "heads × 8": turns(0.5, 4.0),
    }
    result = script.compare(CHOICE, turns(2.0, 2.0), found, 0.9)
    assert (result["best"], result["of_best"]) == ("heads × 4", 0.95)
    assert (result["measured"], result["of_prediction"]) == (1.9, 0.95)
    assert (result["tokens_ratio"], result["time_ratio"]) == (0.8, pytest.approx(0.95 / 0.8, abs=1e-3))
    assert result["of_prediction_interval"] == [0.95, 0.95]
    assert not result["discarded"] and set(result["judged"].values()) == {True}
    assert "95.0 % of it, within 5 %" in script.verdict(result["of_best"])
    assert "not within" in script.verdict(0.9)
    stricter = script.compare(CHOICE, [], found, 0.96)
    assert stricter["judged"]["prediction, 0.96"] is False and stricter["of_prediction_interval"] is None


@pytest.mark.parametrize("plain", [0.96, 1.04])
def test_a_run_on_a_machine_that_is_not_steady_is_not_judged(plain: float) -> None:
    found = {"plain": turns(plain, plain), "heads × 2": turns(1.9, 1.9)}
    result = script.compare(CHOICE, turns(2.0, 2.0), found, 0.9)
    assert result["discarded"] and result["judged"] is None and result["plain_of_plain"] == plain


def test_first_requests_rule_out_candidates() -> None:
    found = {
        "plain": [turn(0, 1.0, 1.0)],
        "tree": [turn(0, 1.0, 2.0)],
        "heads × 2": [turn(0, 1.0, 0.6)],
        "heads × 4": [turn(0, 1.0, 0.5)],
    }
    assert script.close_to_best(found, set()) == {"plain", "heads × 2", "heads × 4"}
    assert script.close_to_best(found, {"tree"}) == {"plain", "tree", "heads × 2", "heads × 4"}


def test_every_drafting_method_appears_once() -> None:
    draft = DraftInfo.parse({"name": "heads", "kind": "medusa", "heads": 4, "ranks": 10}, "draft")
    manifest = SimpleNamespace(drafts=[draft], widest_tree=16, exact_trees=True)
    ways = script.every_way(manifest, [Arm("heads", Budget(4, 4)), Arm("heads", Budget(6, 3))])
    trees = [f"heads, tree of {n}, {d} deep" for n, d in ((6, 3), (8, 4), (15, 4))]
    assert sorted(ways) == sorted(["plain", *trees, *(f"heads × {n}" for n in range(1, 5))])
    assert ways[trees[0]] == {"draft": "heads", "draft_length": 3, "draft_nodes": 6}


def test_both_parts_are_cut_alike() -> None:
    cut = [script.parts(list(range(count)), 5) for count in (64, 80, 10)]
    assert [[len(part) for part in each] for each in cut] == [[12, 13, 13, 13, 13], [16] * 5, [2] * 5]
    assert [number for part in cut[0] for number in part] == list(range(64))
