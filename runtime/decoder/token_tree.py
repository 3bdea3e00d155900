"""Token trees: what a proposer hands to the verifier. A chain is a tree with one branch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np


class TokenTree:
    """Tokens with parents; node 0 is the pending token (the last emitted one), parents precede children.

    `tokens[i]` is an id, `parents[i]` the index of its parent (−1 for the root), `depths[i]` its distance from
    the root. Children of one node carry distinct tokens. Raises `ValueError` for anything else.
    """

    draft_probs: Sequence[np.ndarray] | None = None
    """For a chain whose tokens were drawn: `q[i]` [V], the distribution that token i + 1 came from."""
    unused_draft_probs: Sequence[np.ndarray] | None = None
    """For a chain of likeliest tokens: `rival[i]` [V], what token i + 1 could have been drawn from instead."""

    __slots__ = ("__dict__", "is_chain", "tokens")

    def __init__(self, tokens: Sequence[int], parents: Sequence[int]):
        if len(tokens) != len(parents) or not tokens or parents[0] != -1:
            raise ValueError(f"a tree needs one parent per token and a root first: {tokens!r}, {parents!r}")
        depths = [0]
        seen: set[tuple[int, int]] = set()
        for node in range(1, len(tokens)):
            parent = parents[node]
            if not 0 <= parent < node:
                raise ValueError(f"node {node} has parent {parent}; parents precede their children")
            if (parent, tokens[node]) in seen:
                raise ValueError(f"node {parent} has two children with token {tokens[node]}")
            seen.add((parent, tokens[node]))
            depths.append(depths[parent] + 1)
        self.tokens, self.parents, self.depths = list(tokens), list(parents), depths
        self.is_chain = all(parent == node - 1 for node, parent in enumerate(parents))

    @classmethod
    def chain(cls, tokens: Sequence[int]) -> TokenTree:
        """The pending token followed by drafts in order. The fast way: nothing needs checking."""
        tree = cls.__new__(cls)
        tree.tokens, tree.is_chain = list(tokens), True
        return tree

    def with_tokens(self, tokens: Sequence[int]) -> TokenTree:
        """A tree of this shape over other tokens: what follows from the shape is not worked out again. Raises
        `ValueError` where two children of a node are the same."""
        tree = TokenTree.__new__(TokenTree)
        tree.tokens, tree.is_chain = list(tokens), self.is_chain
        tree.parents, tree.depths, tree.ancestors = self.parents, self.depths, self.ancestors
        if sum(map(len, tree.children)) != tree.proposed:
            raise ValueError("a node has two children with the same token")
        return tree

    @cached_property
    def parents(self) -> list[int]:
        """Those of a chain, made when asked for; a tree has its own."""
        return list(range(-1, len(self.tokens) - 1))

    @cached_property
    def depths(self) -> list[int]:
        """Those of a chain, made when asked for; a tree has its own."""
        return list(range(len(self.tokens)))

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def proposed(self) -> int:
        """Number of drafted tokens: all nodes but the root."""
        return len(self.tokens) - 1

    @property
    def depth(self) -> int:
        """Most drafted tokens on one path."""
        return len(self.tokens) - 1 if self.is_chain else max(self.depths)

    @cached_property
    def ancestors(self) -> np.ndarray:
        """Boolean [nodes, nodes]: entry (i, j) is True when j is i or an ancestor of i."""
        mask = np.eye(len(self), dtype=bool)
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                mask[node] |= mask[parent]
        return mask

    @cached_property
    def children(self) -> list[dict[int, int]]:
        """Per node: token → child index."""
        out: list[dict[int, int]] = [{} for _ in self.tokens]
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                out[parent][self.tokens[node]] = node
        return out
