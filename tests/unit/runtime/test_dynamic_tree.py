"""Trees that grow level by level: what is expanded, what is kept."""

from __future__ import annotations

import math

import numpy as np
import pytest
from vlmexport.runtime.drafts.eagle.dynamic_tree import Growth, expansions
from vlmexport.runtime.speedup.budget import Budget


def test_no_more_nodes_are_expanded_than_the_tree_will_have() -> None:
    assert expansions(Budget(60, 7)) == [10] * 6, "EAGLE-2's own sizes"
    assert expansions(Budget(8, 4)) == [3, 3, 2]
    assert expansions(Budget.chain(4)) == [1, 1, 1]
    assert expansions(Budget.chain(1)) == expansions(Budget(5, 1)) == []
    for depth in range(2, 9):
        for nodes in range(depth + 1, 40):
            assert sum(expansions(Budget(nodes, depth))) == nodes


def grown(budget: Budget, seed: int, ranks: int = 4) -> tuple[Growth, dict[tuple[int, ...], float]]:
    """A tree over random conditional probabilities, and the log-probability of every path that was generated."""
    known: dict[tuple[int, ...], float] = {(): 0.0}
    growth, paths = Growth(99, budget, ends=(3,)), {0: ()}

    def expand(node: int) -> None:
        path = paths[node]
        rng = np.random.default_rng([seed, *path])
        shares = np.sort(rng.dirichlet(np.ones(8)))[::-1][:ranks]
        tokens = rng.permutation(20)[:ranks].tolist()
        before = len(growth.tokens)
        growth.expand(node, tokens, np.log(shares).tolist())
        for child in range(before, len(growth.tokens)):
            paths[child] = (*path, growth.tokens[child])
            known[paths[child]] = known[path] + math.log(shares[child - before])

    expand(0)
    for width in growth.widths:
        for node in growth.frontier(width):
            assert growth.tokens[node] != 3, "nothing follows an end token"
            expand(node)
    del known[()]
    return growth, known


@pytest.mark.parametrize("budget", [Budget(1, 1), Budget(5, 2), Budget(8, 4), Budget(30, 5)], ids=str)
def test_the_likeliest_paths_are_kept(budget: Budget) -> None:
    for seed in range(20):
        growth, known = grown(budget, seed)
        tree = growth.tree()
        found = [()] * len(tree)
        for node in range(1, len(tree)):
            found[node] = (*found[tree.parents[node]], tree.tokens[node])
        best = sorted(known, key=lambda path: -known[path])[: budget.nodes]
        assert set(found[1:]) == set(best) and tree.depth <= budget.depth
        assert tree.tokens[0] == 99
        first = [path for path in found[1:] if len(path) == 1]
        assert first == sorted(first, key=lambda path: -known[path]), "the likelier child comes first"


def test_a_chain_takes_the_likeliest_token_at_each_step() -> None:
    growth = Growth(7, Budget.chain(3))
    for token in (4, 5, 6):
        (node,) = [0] if token == 4 else growth.frontier(1)
        growth.expand(node, [token, 9], [-0.1, -0.2])
    tree = growth.tree()
    assert tree.is_chain and tree.tokens == [7, 4, 5, 6]


def test_equal_scores_keep_parents_before_children() -> None:
    """A token of probability 1 makes its path as likely as its parent's."""
    growth = Growth(7, Budget(2, 2))
    growth.expand(0, [1, 2], [0.0, -math.inf])
    (node,) = growth.frontier(2)
    growth.expand(node, [1, 2], [0.0, -5.0])
    tree = growth.tree()
    assert (tree.tokens, tree.parents) == ([7, 1, 1], [-1, 0, 1])


def test_a_token_twice_below_one_node_is_refused() -> None:
    growth = Growth(7, Budget(3, 2))
    growth.expand(0, [1, 1], [-0.5, -0.7])
    with pytest.raises(ValueError, match="two children"):
        growth.tree()
