"""Trees over the ranked proposals of heads that look 1, 2, … tokens ahead and do not see each other's choice.

A node is a path of ranks: [2, 0] is the third best token of head 1, then the best of head 2. What a head proposes is
the same below every parent, so a tree is known by its paths, and the best tree of m nodes is part of the best one of
m + 1 (Cai et al., Medusa, arXiv 2401.10774, section 2.3.3): one order of growth serves every budget.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from ..speculate.budget import Budget

Parents = list[int]
"""Parent of every node in the order of growth, −1 below the root. The n-th child of a node, counted from 0, is of rank n."""


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
    its rows lie one behind the other already and need not be moved. A budget without room for branches takes that path
    alone.
    """
    chain = budget.nodes <= budget.depth
    kept: Parents = []
    depths: list[int] = []
    ranks: list[int] = []
    places: dict[int, int] = {-1: -1}
    children: dict[int, int] = {}
    for node, parent in enumerate(parents):
        rank = children.get(parent, 0)
        children[parent] = rank + 1
        place = places.get(parent)
        if place is None or (chain and rank > 0):
            continue
        depth = 0 if place < 0 else depths[place] + 1
        if depth >= budget.depth:
            continue
        if len(kept) == budget.nodes:
            break
        places[node] = len(kept)
        kept.append(place)
        depths.append(depth)
        ranks.append(rank)
    order = _path_by_path(kept)
    moved = {-1: -1} | {node: place for place, node in enumerate(order)}
    return [moved[kept[node]] for node in order], [depths[n] for n in order], [ranks[n] for n in order]


def _path_by_path(parents: Parents) -> list[int]:
    """The nodes in depth-first order, first children first."""
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        children.setdefault(parent, []).append(node)
    order: list[int] = []
    waiting = children.get(-1, [])[::-1]
    while waiting:
        node = waiting.pop()
        order.append(node)
        waiting += children.get(node, [])[::-1]
    return order
