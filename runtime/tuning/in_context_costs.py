"""A table of pass times as they are within decoding, where caches are colder than in repetition, and what cycles take
beside the graphs."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import replace
from statistics import mean

from ..speedup.cost_model import FREE, CostTable, DraftCosts
from ..speedup.predict import AcceptanceCounts
from .ab_runs import Arm

LEAST_SECONDS = 1e-9
"""In place of nothing, or less, that cycles took beyond their passes."""


def within_decoding(
    table: CostTable, plain: Arm, drafting: Sequence[Arm], combined: Container[str] = ()
) -> CostTable:
    """The table with what passes take within decoding, and with what cycles take outside the graphs; of a draft, as its
    chain and each of its trees showed it.

    Passes are taken to be as much slower as those of plain decoding were, or, of a draft that splits the layers, its own.
    `drafting`: every draft's longest chain first. `combined`: drafts of which the table has what they take where they run,
    though they run in some cycles only; what their chains show says in how many.
    """
    whole, inside = plain.cycle_seconds
    table = table.scaled(inside / table.token_seconds()) if inside else table
    costs, beside = dict(table.drafts), max(0.0, whole - table.token_seconds())
    for arm in drafting:
        seen = arm.observed
        if not seen.is_chain:
            continue
        mine, (whole_cycle, inside_cycle) = costs.get(seen.draft, FREE), arm.cycle_seconds
        if inside_cycle and mine.tail is not None:  # no pass is the target's own
            mine = mine.scaled(inside_cycle / seen.cycle_seconds(table, seen.budget.depth))
        if seen.draft in combined:
            mine = mine.scaled(_share_of_cycles(table, mine, seen, whole_cycle))
        costs[seen.draft] = mine
        passes = seen.cycle_seconds(replace(table, drafts=costs), seen.budget.depth)
        plainly = (
            seen.shapes.get((0, 0), 0) / seen.cycles
        )  # where nothing was found: those have the host of plain cycles
        host = whole_cycle - passes - plainly * beside
        costs[seen.draft] = replace(mine, host=max(0.0, host / (1 - plainly)) if plainly < 1 else 0.0)
    for name, trees in _trees(drafting).items():
        alone = replace(table, drafts={name: replace(costs[name], host=0.0)})
        beyond: dict[int, list[float]] = {}
        for arm in trees:
            seen = arm.observed
            passes = seen.cycle_seconds(alone, seen.budget.depth)
            beyond.setdefault(seen.budget.nodes, []).append(arm.cycle_seconds[0] - passes)
        tree_host = {nodes: max(mean(seconds), LEAST_SECONDS) for nodes, seconds in beyond.items()}
        costs[name] = replace(costs[name], tree_host=tree_host)
    return replace(table, drafts=costs, host=beside)


def _share_of_cycles(table: CostTable, costs: DraftCosts, seen: AcceptanceCounts, whole: float) -> float:
    """The share of its passes that a draft ran, by the `whole` seconds of its cycles; 0 to 1."""
    without, always = (
        seen.cycle_seconds(replace(table, drafts={seen.draft: each}), seen.budget.depth)
        for each in (FREE, costs)
    )
    return min(1.0, max(0.0, (whole - without) / (always - without))) if always > without else 1.0


def _trees(arms: Sequence[Arm]) -> dict[str, list[Arm]]:
    """By draft, those that got trees."""
    trees: dict[str, list[Arm]] = {}
    for arm in arms:
        if not arm.observed.is_chain:
            trees.setdefault(arm.observed.draft, []).append(arm)
    return trees
