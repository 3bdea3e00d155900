"""Trees over the ranked proposals of heads that look 1, 2, … tokens ahead and do not see each other's choice.

A node is a path of ranks: [2, 0] is the third best token of head 1, then the best of head 2. What a head proposes is
the same below every parent, so a tree is known by its paths, and the best tree of m nodes is part of the best one of
m + 1 (Cai et al., Medusa, arXiv 2401.10774, section 2.3.3): one order of growth serves every budget.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from ...speedup.budget import Budget

Parents = list[int]
"""Parent of every node in the order of growth, −1 below the root. The n-th child of a node, counted from 0, is of rank
n."""


def grow(scores: Sequence[Sequence[float]], nodes: int) -> Parents:
    """The `nodes` likeliest paths, likeliest first.

    `scores[k][r]` is the log-probability that rank r of head k + 1 is right, given that its parent was; it must not rise
    with r, so that every path's prefix is before it. −inf and NaN end a head's ranks. Equal scores are taken in the
    order of their parents, then of their ranks.
    """
    parents: Parents = []
    # (−log-probability of the path, parent, rank, depth of the node): the next sibling enters when a node is taken.
    waiting: list[tuple[float, int, int, int]] = []

    def offer(before: float, parent: int, rank: int, depth: int) -> None:
        if depth < len(scores) and rank < len(scores[depth]) and scores[depth][rank] > float("-inf"):
            heapq.heappush(waiting, (before - scores[depth][rank], parent, rank, depth))

    offer(0.0, -1, 0, 0)
    while waiting and len(parents) < nodes:
        cost, parent, rank, depth = heapq.heappop(waiting)
        parents.append(parent)
        offer(cost, len(parents) - 1, 0, depth + 1)
        offer(cost + scores[depth][rank], parent, rank + 1, depth)
    return parents


def within(parents: Sequence[int], budget: Budget) -> tuple[Parents, list[int], list[int]]:
    """(parents, depths from 0, ranks) of the first nodes of an order of growth that a budget has room for.

    They are handed out path by path, the path of first children first: where that is accepted, which is the likeliest,
    its slots lie one behind the other already and need not be moved. A budget without room for branches takes that path
    alone.
    """
    chain = budget.nodes <= budget.depth
    depths: dict[int, int] = {-1: -1}
    children: dict[int, list[int]] = {-1: []}
    for node, parent in enumerate(parents):
        if parent not in children or depths[parent] + 1 >= budget.depth or (chain and children[parent]):
            continue
        if len(depths) > budget.nodes:
            break
        depths[node], children[node] = depths[parent] + 1, []
        children[parent].append(node)
    places: Parents = []
    levels: list[int] = []
    ranks: list[int] = []
    waiting = [(-1, rank, node) for rank, node in enumerate(children[-1])][::-1]
    while waiting:
        place, rank, node = waiting.pop()
        places.append(place)
        levels.append(depths[node])
        ranks.append(rank)
        here = len(places) - 1
        waiting += [(here, below, child) for below, child in enumerate(children[node])][::-1]
    return places, levels, ranks
