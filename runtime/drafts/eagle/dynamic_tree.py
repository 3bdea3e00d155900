"""A tree of drafts that grows level by level (Li et al., EAGLE-2, arXiv 2406.16858, sections 4.1 and 4.2).

At every level the likeliest nodes are expanded; each adds its best continuations as children. At the end the likeliest
nodes of all levels are kept. A node is as likely as its path: the sum of the log-probabilities along it, which no child
exceeds, so what is kept is a tree.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import isfinite

from ...decoder.token_tree import TokenTree
from ...speedup.budget import Budget


def expansions(budget: Budget) -> list[int]:
    """Nodes to expand at every level below the root: in all no more than the tree will have.

    That is EAGLE-2's choice for its own sizes: 10 at each of 6 levels for 60 nodes. A chain expands one at a time.
    """
    levels = budget.depth - 1
    if budget.nodes <= budget.depth:
        return [1] * levels
    each, more = divmod(budget.nodes, max(levels, 1))
    return [each + (level < more) for level in range(levels)]


class Growth:
    """The nodes that were generated so far, in the order in which they were: parents before their children.

    Node 0 is the pending token. A budget without room for branches gives each node one child, the likeliest.
    """

    def __init__(self, pending: int, budget: Budget, ends: Collection[int] = ()):
        """`ends` are tokens behind which nothing is drafted."""
        self._budget, self._ends = budget, ends
        self.chain = budget.nodes <= budget.depth
        self._first = 0
        self.tokens, self.parents, self.scores = [pending], [-1], [0.0]
        self.widths = expansions(budget)
        """Nodes to expand at every level, as far as there are so many."""

    def expand(self, node: int, tokens: Sequence[int], scores: Sequence[float]) -> None:
        """Add children: ids and their log-probabilities, best first. Log-probabilities of −inf add none."""
        for token, score in list(zip(tokens, scores, strict=True))[: 1 if self.chain else None]:
            if isfinite(score):
                self.tokens.append(token)
                self.parents.append(node)
                self.scores.append(self.scores[node] + score)

    def frontier(self, most: int) -> list[int]:
        """The at most `most` likeliest of the nodes that were added since the last call, likeliest first."""
        level = [
            node
            for node in range(self._first, len(self.tokens))
            if node and self.tokens[node] not in self._ends
        ]
        self._first = len(self.tokens)
        return sorted(level, key=lambda node: (-self.scores[node], node))[:most]

    def path(self, node: int) -> list[int]:
        """Nodes from `node` up to, and without, the root."""
        nodes = []
        while node:
            nodes.append(node)
            node = self.parents[node]
        return nodes

    def tree(self) -> TokenTree:
        """The likeliest nodes within the budget, path by path, the likelier child first: where the likeliest path is
        accepted, its slots lie one behind the other.

        Raises `ValueError` where two children of a node are the same token.
        """
        order = sorted(range(1, len(self.tokens)), key=lambda node: (-self.scores[node], node))
        children: dict[int, list[int]] = {}
        for node in order[: self._budget.nodes]:
            children.setdefault(self.parents[node], []).append(node)
        tokens, parents = [self.tokens[0]], [-1]
        waiting = [(0, node) for node in reversed(children.get(0, []))]
        while waiting:
            place, node = waiting.pop()
            tokens.append(self.tokens[node])
            parents.append(place)
            here = len(tokens) - 1
            waiting += [(here, child) for child in reversed(children.get(node, []))]
        return TokenTree.chain(tokens) if self.chain else TokenTree(tokens, parents)
