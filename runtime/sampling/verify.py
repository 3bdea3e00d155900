"""Which drafted tokens survive: pure functions of a token tree and the target's answers.

Two entry points: `verify_draws` for proposals that are a deterministic function of what was already fixed (chains and trees: one draw y ~ p per visited node, descend
when y is a child, else emit y; the emitted stream equals plain sampling with the same uniforms), and
`verify_sampled` for chains whose tokens were drawn from q (Leviathan et al. 2023: accept with min(1, p/q),
else draw from the residual max(p − q, 0)).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ..decoder.token_tree import TokenTree
from .sampler import draw


class Verdict(NamedTuple):
    """Outcome of one verification."""

    path: list[int]
    """Accepted nodes below the root, from the root down: tree indices."""
    token: int
    """The target's own token after the path: a correction, or the bonus after a leaf."""
    evaluated: int
    """Drafted positions that were judged: accepted ones, and the one that was rejected if any."""


def verify_draws(tree: TokenTree, choose: Callable[[int, int], int]) -> Verdict:
    """Draw-and-match. `choose(node, depth)` draws the target's token after `node`; it is called once per depth."""
    node, path = 0, []
    if tree.is_chain:
        tokens, last = tree.tokens, len(tree.tokens) - 1
        while True:
            token = choose(node, node)
            if node == last:
                return Verdict(path, token, node)
            if token != tokens[node + 1]:
                return Verdict(path, token, node + 1)
            node += 1
            path.append(node)
    children = tree.children
    while True:
        token = choose(node, len(path))
        child = children[node].get(token)
        if child is None:
            return Verdict(path, token, len(path) + (1 if children[node] else 0))
        node = child
        path.append(node)


def ranks(tree: TokenTree, path: Sequence[int]) -> list[tuple[int, int]]:
    """(children, which of them was right, counted from 0) of every node that was judged, the root first; as many as there
    are where none was. Children stand in the order of their rank, likeliest first."""
    counts, node = [], 0
    for child in path:
        children = list(tree.children[node].values())
        counts.append((len(children), children.index(child)))
        node = child
    last = len(tree.children[node])
    return [*counts, (last, last)] if last else counts


@np.errstate(all="ignore")
def verify_sampled(
    tree: TokenTree,
    target: Callable[[int], np.ndarray],
    proposal: Sequence[np.ndarray],
    uniforms: Sequence[tuple[float, float]],
) -> Verdict:
    """A chain whose token i + 1 was drawn from `proposal[i]` [V]; `target(i)` [V] is p after node i,
    asked of nodes that are reached, once each.

    Both are the distributions after temperature, top-k, top-p and min-p. `uniforms[i]` is one uniform for accepting
    and one for the residual or bonus at depth i. Accepts when u·q(x) < p(x): no division, p = 0 never accepted.
    """
    if not tree.is_chain:
        raise ValueError("sampled proposals are verified as chains")
    path: list[int] = []
    for node in range(tree.proposed):
        token, p, q = tree.tokens[node + 1], target(node), proposal[node]
        accept, redraw = uniforms[node]
        if not accept * q[token] < p[token]:
            residual = np.maximum(p - q, 0)
            return Verdict(path, draw(residual if residual.sum() > 1e-12 else p, redraw), node + 1)
        path.append(node + 1)
    last = tree.proposed
    return Verdict(path, draw(target(last), uniforms[last][1]), last)


def verify_forced(
    tree: TokenTree, choose: Callable[[int, int], int], uniforms: Sequence[float], rate: float
) -> Verdict:
    """Accept one token per depth with probability `rate`, whatever it is: for timing random weights only.

    The output is not text. In a tree the first child of each accepted node is the one that is judged. A rejected
    position, or the bonus, takes the target's token.
    """
    node, path = 0, []
    while True:
        child = node + 1 if tree.is_chain else next(iter(tree.children[node].values()), len(tree))
        if child >= len(tree):
            return Verdict(path, choose(node, len(path)), len(path))
        if uniforms[len(path)] >= rate:
            return Verdict(path, choose(node, len(path)), len(path) + 1)
        node = child
        path.append(node)
