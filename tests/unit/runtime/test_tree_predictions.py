"""What trees would keep, by the ranks that were right in others: against counting, and against every tree there is."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from vlmexport.runtime.bundle.manifest import DraftInfo
from vlmexport.runtime.bundle.stored_acceptance import StoredAcceptance
from vlmexport.runtime.decoder.token_tree import TokenTree
from vlmexport.runtime.drafts.medusa.static_tree import grow, within
from vlmexport.runtime.measure.tree_search import OFFERED, expected_kept, observed_trees, rates
from vlmexport.runtime.sampling.verify import ranks, verify_draws
from vlmexport.runtime.speedup.budget import Budget
from vlmexport.runtime.speedup.cost_model import CostTable, Curve, DraftCosts
from vlmexport.runtime.speedup.predict import AcceptanceCounts
from vlmexport.runtime.speedup.stats import Stats

CHANCES = [[0.6, 0.2, 0.1], [0.5, 0.25, 0.05], [0.45, 0.2, 0.1]]
"""That a token of depth 1, 2, 3 is the one of rank 0, 1, 2."""
WIDE = Budget(3 + 9 + 27, 3)
WHOLE = [-1] * 3 + [parent for parent in range(12) for _ in range(3)]
"""All paths of three ranks, three deep."""


def played(order: list[int], budget: Budget, cycles: int, seed: int = 0) -> Stats:
    """Counters of a tree of these ranks, whose right token is of another rank each time; tokens are ranks."""
    rng, stats = random.Random(seed), Stats()
    parents, _, of_rank = within(order, budget)
    tree = TokenTree([0, *of_rank], [-1, *(parent + 1 for parent in parents)])
    for _ in range(cycles):
        right = [rng.choices((0, 1, 2, 99), [*depth, 1 - sum(depth)])[0] for depth in [*CHANCES, [0, 0, 0]]]
        verdict = verify_draws(tree, lambda node, depth: right[depth])  # noqa: B023
        stats.count(tree.proposed, len(verdict.path), verdict.evaluated, tree.depth)
        stats.count_ranks(ranks(tree, verdict.path))
    stats.tokens = 1 + stats.accepted + stats.cycles
    stats.check()
    return stats


def draft(tree: list[int] | None) -> Any:
    return DraftInfo.parse({"name": "heads", "kind": "medusa", "tree": tree}, "draft")


def test_rank_of_the_right_token_is_counted_among_siblings() -> None:
    tree = TokenTree([0, 5, 7, 6, 9, 8], [-1, 0, 1, 0, 3, 3])
    assert ranks(tree, []) == [(2, 2)]
    assert ranks(tree, [1]) == [(2, 0), (1, 1)]
    assert ranks(tree, [3, 5]) == [(2, 1), (2, 1)]
    stats = Stats()
    for path in ([], [1], [3, 5]):
        stats.count_ranks(ranks(tree, path))
    assert stats.ranks == {(0, 2, 2): 1, (0, 2, 0): 1, (1, 1, 1): 1, (0, 2, 1): 1, (1, 2, 1): 1}
    assert Stats.total([stats, stats]).ranks[0, 2, 1] == 2
    seen = AcceptanceCounts.of("heads", Budget(5, 2), stats)
    assert seen.ranks == [[(1, 3), (1, 3)], [(0, 2), (1, 1)]]
    entry = StoredAcceptance.of(seen, 1, "d", "t").to_dict()
    assert StoredAcceptance.parse(entry, "a").observed.ranks == seen.ranks
    del entry["ranks"]  # of a bundle that an earlier version calibrated
    assert StoredAcceptance.parse(entry, "a").observed.ranks == []


def test_hits_are_counted_only_where_children_exist() -> None:
    """A tree that gives fewer children to some nodes tells the same of the ranks it has."""
    for order, budget in ((WHOLE, WIDE), (grow([[-1.0, -2.0, -4.0]] * 3, 20), Budget(20, 3))):
        found = rates([AcceptanceCounts.of("heads", budget, played(order, budget, 20_000))])
        for known, true in zip(found, CHANCES, strict=True):
            assert known == pytest.approx(true[: len(known)], abs=0.04)


@pytest.mark.parametrize("budget", [Budget(4, 2), Budget(6, 3), Budget(5, 1), Budget(9, 3)])
def test_tree_prediction_equals_counting(budget: Budget) -> None:
    wide = AcceptanceCounts.of("heads", WIDE, played(WHOLE, WIDE, 20_000))
    order = grow([[-0.5, -1.5, -2.0], [-0.7, -1.3, -3.0], [-0.8, -1.6, -2.3]], 30)
    trees = observed_trees([draft(order)], [wide])["heads"]
    table = CostTable(Curve({1: 1.0, 40: 3.0}), {"heads": DraftCosts(once=0.1)})
    told = trees.predict(table, budget)
    assert told is not None
    real = AcceptanceCounts.of("heads", told.budget, played(order, budget, 20_000, seed=1))
    assert told.tokens_per_cycle == pytest.approx(real.tokens_per_cycle(told.budget.depth), rel=0.02)
    assert told.break_even == pytest.approx(
        table.cycle_seconds("heads", told.budget.depth, told.budget.nodes)
    )


def every_tree(nodes: int) -> set[frozenset[tuple[int, ...]]]:
    """All trees of so many paths of ranks: each with its parent, and with the rank before it."""
    paths = [path for depth in (1, 2, 3) for path in itertools.product(range(3), repeat=depth)]
    trees: set[frozenset[tuple[int, ...]]] = {frozenset()}
    for _ in range(nodes):
        trees = {
            tree | {path}
            for tree in trees
            for path in paths
            if path not in tree
            and (len(path) == 1 or path[:-1] in tree)
            and (path[-1] == 0 or (*path[:-1], path[-1] - 1) in tree)
        }
    return trees


def chance(path: tuple[int, ...]) -> float:
    found = 1.0
    for depth, rank in enumerate(path):
        found *= CHANCES[depth][rank]
    return found


@pytest.mark.parametrize("nodes", [4, 5, 6])
def test_the_tree_that_grows_keeps_most_of_all_trees_of_its_size(nodes: int) -> None:
    counts = [[(round(1e6 * rate), 10**6) for rate in depth] for depth in CHANCES]
    seen = AcceptanceCounts("heads", WIDE, {(39, 3): 10}, [6, 3, 1], ranks=counts)
    trees = observed_trees([draft(None)], [seen])["heads"]
    grown, real = expected_kept(trees.chances, trees._order(Budget(nodes, 3)), Budget(nodes, 3))
    best = max(1 + sum(map(chance, tree)) for tree in every_tree(nodes))
    assert real == Budget(nodes, real.depth) and grown == pytest.approx(best)


def test_width_decides_which_trees_are_offered() -> None:
    wide = AcceptanceCounts.of("heads", WIDE, played(WHOLE, WIDE, 5_000))
    trees = observed_trees([draft(None)], [wide])["heads"]
    free, dear = (
        CostTable(Curve({1: 1.0, 40: seconds}), {"heads": DraftCosts(once=0.1)}) for seconds in (1.0, 40.0)
    )
    offered = trees.best(free, 39)
    assert 0 < len(offered) <= OFFERED and offered[0].budget == Budget(30, 3)
    assert max(entry.budget.nodes for entry in trees.best(dear, 39)) <= 5
    assert max(entry.budget.nodes for entry in trees.best(free, 12)) <= 12
    assert [entry.speedup for entry in offered] == sorted((e.speedup for e in offered), reverse=True)


def test_chains_and_older_bundles_predict_no_tree() -> None:
    chain = AcceptanceCounts("heads", Budget.chain(3), {(3, 3): 10}, [6, 3, 1])
    old = AcceptanceCounts("heads", Budget(8, 3), {(8, 3): 10}, [6, 3, 1])
    assert not observed_trees([draft(None)], [chain, old])


def test_never_accepted_draft_keeps_one_token() -> None:
    seen = AcceptanceCounts("heads", Budget(8, 3), {(8, 3): 10}, [], ranks=[[(0, 10)] * 4, [(0, 0)] * 4])
    table = CostTable(Curve({1: 1.0, 9: 2.0}), {"heads": DraftCosts()})
    for tree in (None, [-1, -1, -1, -1]):
        told = observed_trees([draft(tree)], [seen])["heads"].predict(table, Budget(3, 2))
        assert told is not None and told.tokens_per_cycle == 1 and told.budget == Budget(3, 1)
