"""Predictions and the choice among drafts: against the speed model, and against plain counting."""

from __future__ import annotations

import random
from typing import Any

import pytest
from vlmexport.runtime.bundle.stored_acceptance import StoredAcceptance
from vlmexport.runtime.common.errors import OptionError
from vlmexport.runtime.measure.virtual_clock import decoding
from vlmexport.runtime.speedup.budget import Budget
from vlmexport.runtime.speedup.cost_model import CostTable, Curve, DraftCosts
from vlmexport.runtime.speedup.predict import AcceptanceCounts, choose, choose_by_reward, predict, predictions
from vlmexport.runtime.speedup.stats import Stats
from vlmexport.runtime.tuning.merging import merge_reports

FLAT = Curve({1: 1.0, 40: 1.0})
STEEP = Curve({1: 1.0, 2: 2.0, 40: 40.0})


def played(depth: int, alpha: float, cycles: int = 4000, seed: int = 0) -> Stats:
    """Counters of chains of `depth` whose tokens are each right with chance `alpha`."""
    rng, stats = random.Random(seed), Stats()
    for _ in range(cycles):
        accepted = 0
        while accepted < depth and rng.random() < alpha:
            accepted += 1
        stats.count(depth, accepted, min(accepted + 1, depth))
    stats.tokens = 1 + stats.accepted + stats.cycles
    return stats


def chain(draft: str, depth: int, alpha: float) -> AcceptanceCounts:
    return AcceptanceCounts.of(draft, Budget.chain(depth), played(depth, alpha))


def table(plain: Curve, host: float = 0.0, **drafts: DraftCosts) -> CostTable:
    return CostTable(plain, drafts, host)


def test_full_chain_prediction_equals_recorded_cycles() -> None:
    stats = played(6, 0.7)
    stats.discarded, stats.tokens = 50, stats.tokens - 50
    costs = table(Curve({1: 1.0, 7: 1.9}), 0.2, a=DraftCosts(propose=0.05, once=0.1))
    found = predict(costs, AcceptanceCounts.of("a", Budget.chain(6), stats))
    assert found.speedup == pytest.approx(decoding(costs, "a", stats).speedup)


@pytest.mark.parametrize("depth", [1, 3, 8])
def test_shorter_chain_is_predicted_from_the_longest(depth: int) -> None:
    costs = table(Curve({1: 1.0, 9: 1.7}), a=DraftCosts(propose=0.05))
    found = predict(costs, chain("a", 8, 0.75), depth)
    assert found.budget == Budget.chain(depth)
    assert found.speedup == pytest.approx(costs.speedup("a", [0.75], depth), rel=0.03)


def test_chain_is_predicted_from_the_shortest_recorded_chain() -> None:
    costs = table(Curve({1: 1.0, 9: 1.7}), a=DraftCosts(propose=0.05))
    long, short = chain("a", 8, 0.75), chain("a", 4, 0.5)
    found = {entry.budget.depth: entry for entry in predictions(costs, [long, short])}
    assert len(found) == 8
    for depth, seen in ((1, short), (3, short), (4, short), (5, long), (8, long)):
        assert found[depth] == predict(costs, seen, depth)


def test_cycles_that_drafted_less_cost_less() -> None:
    """A draft that finds something every second time: half of the cycles are plain ones."""
    stats = played(4, 1.0, cycles=100)
    for _ in range(100):
        stats.count(0, 0, 0)
    costs = table(STEEP)
    found = predict(costs, AcceptanceCounts.of("a", Budget.chain(4), stats))
    assert found.tokens_per_cycle == pytest.approx(3.0)
    assert found.break_even == pytest.approx((5.0 + 1.0) / 2)
    assert predict(costs, AcceptanceCounts.of("a", Budget.chain(4), stats), 1).break_even == pytest.approx(
        1.5
    )


def test_draft_pays_only_above_break_even() -> None:
    costs = table(Curve({1: 1.0, 4: 1.8}), 0.1, a=DraftCosts(once=0.3))
    for alpha in (0.1, 0.3, 0.5, 0.9):
        for found in predictions(costs, [chain("a", 6, alpha)]):
            assert (found.speedup > 1) == (found.tokens_per_cycle > found.break_even)


def test_the_fastest_of_all_drafts_and_lengths_is_chosen() -> None:
    costs = table(Curve({1: 1.0, 20: 2.0}), dear=DraftCosts(propose=0.5), cheap=DraftCosts(propose=0.02))
    seen = [chain("dear", 10, 0.9), chain("cheap", 10, 0.8)]
    chosen = choose(costs, seen)
    every = predictions(costs, seen)
    assert chosen == every[0] and chosen.draft == "cheap" and len(every) == 20
    assert [entry.speedup for entry in every] == sorted((e.speedup for e in every), reverse=True)


def test_a_tree_is_chosen_where_width_is_free_and_a_chain_where_it_is_not() -> None:
    stats = Stats()
    for _ in range(100):
        stats.count(15, 3, 4, depth=4)
    tree = AcceptanceCounts.of("heads", Budget(15, 4), stats)
    seen = [chain("heads", 4, 0.7), tree]
    wide = choose(table(FLAT, heads=DraftCosts(once=0.05)), seen)
    assert wide is not None and wide.budget == Budget(15, 4)
    narrow = choose(table(Curve({1: 1.0, 5: 1.2, 16: 4.0}), heads=DraftCosts(once=0.05)), seen)
    assert narrow is not None and narrow.budget == Budget.chain(narrow.budget.depth)
    with pytest.raises(ValueError, match="tree of depth 4"):
        predict(table(FLAT), tree, 3)


def test_nothing_is_chosen_below_the_least_gain() -> None:
    costs = table(STEEP, a=DraftCosts(propose=0.2))
    seen = [chain("a", 5, 0.6)]
    assert choose(costs, seen) is None
    best = predictions(costs, seen)[0].speedup
    chosen = choose(costs, seen, least=best)
    assert chosen is not None and chosen.speedup == best
    assert choose(costs, []) is None


def test_host_time_lowers_the_speed_up() -> None:
    seen = [chain("a", 4, 0.9)]
    gains = [
        predict(table(FLAT, host, a=DraftCosts(propose=0.05, host=2 * host)), seen[0]).speedup
        for host in (0.0, 0.5)
    ]
    assert gains[0] > gains[1]


def test_the_reward_weighs_acceptance_against_layers() -> None:
    costs = table(FLAT, **{name: DraftCosts(FLAT, 0.1, 0.1) for name in ("early", "late")})
    seen = [chain("early", 4, 0.6), chain("late", 4, 0.8), chain("elsewhere", 4, 1.0)]
    layers = {"early": 3, "late": 6}
    for weight, name in ((0.01, "late"), (0.2, "early")):
        chosen = choose_by_reward(costs, seen, layers, weight)
        assert chosen is not None and chosen.draft == name
    assert choose_by_reward(costs, seen, {}, 0.1) is None


def test_acceptance_survives_the_manifest() -> None:
    seen = chain("a", 5, 0.5)
    entry = StoredAcceptance.of(seen, 3, "scenes", "2026-01-01T00:00:00Z").to_dict()
    again = StoredAcceptance.parse(entry, "acceptance[0]").observed
    assert predict(table(STEEP), again) == predict(table(STEEP), seen)
    assert again.alpha == pytest.approx(0.5, abs=0.03)


def test_devices_are_merged_and_another_model_is_refused() -> None:
    def costs_of(machine: str) -> dict[str, Any]:
        return {"machine": machine, "threads": 1, "date": "2026", "plain": {"1": 0.1}}

    def report(machine: str) -> dict[str, Any]:
        seen = StoredAcceptance.of(chain(machine, 4, 0.9), 3, "scenes", "2026").to_dict()
        return {"fingerprint": "f", "costs": costs_of(machine), "acceptance": [seen]}

    whole = {"model": {"fingerprint": "f"}, "costs": [costs_of("c"), costs_of("d")], "acceptance": []}
    costs, acceptance = merge_reports({"a": report("a"), "b": report("b"), "whole": whole}, "f")
    assert [entry["machine"] for entry in costs] == ["a", "b", "c", "d"] and len(acceptance) == 2
    with pytest.raises(OptionError, match="--merge a: 'f' is the fingerprint of another model"):
        merge_reports({"a": report("a")}, "g")
