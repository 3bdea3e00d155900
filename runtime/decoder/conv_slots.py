"""Which cached rows a causal convolution reads: those of the last tokens before each token, on its way.

In a chain these lie in the slots before. In a token tree they are those of a node's ancestors, wherever they lie: a sibling's
row may stand between. Which slots, and where a sequence had not begun yet, is told to the graphs as they are told masks.
"""

from __future__ import annotations

import numpy as np

from .token_tree import TokenTree


class ChainSlots(dict[int, np.ndarray]):
    """start → the slots [width, kernel − 1] of a chain, a view that is made when it is first asked for."""

    def __init__(self, table: np.ndarray, width: int):
        super().__init__()
        self._table, self._width = table, width

    def __missing__(self, start: int) -> np.ndarray:
        slots = self[start] = self._table[start : start + self._width]
        return slots


class ConvSlots:
    """Fills `conv_slots` int64 `[batch, width, kernel − 1]`: for every token the slots of those before it, the nearest last;
    −1 before the sequence, where a graph takes zeros. The interface is that of `CausalMask`."""

    def __init__(self, capacity: int, kernel: int):
        """For slots below `capacity`, and convolutions over `kernel` tokens."""
        self._back = np.arange(kernel - 1, 0, -1)
        """How far before a token each of its slots is, in a chain."""
        self._table = np.maximum(np.arange(capacity)[:, None] - self._back, -1)
        self._seen: dict[int, ChainSlots] = {}

    def seen(self, width: int, cache_len: int) -> ChainSlots:
        """The slots [width, kernel − 1] of chains by their start, kept for callers that ask again."""
        if width not in self._seen:
            self._seen[width] = ChainSlots(self._table, width)
        return self._seen[width]

    def chain(self, out: np.ndarray, batch_index: int, start: int, width: int) -> None:
        """Fill `out[batch_index]` for `width` new tokens in slots start, start + 1, …"""
        out[batch_index] = self._table[start : start + width]

    def block(self, out: np.ndarray, batch_index: int, start: int, first: int, end: int) -> None:
        """A convolution is causal also where attention is not."""

    def node(self, out: np.ndarray, batch_index: int, start: int, tree: TokenTree, node: int) -> None:
        """Fill `out[batch_index]` for one node of a tree whose root takes slot `start`, and tokens that pad its pass: they
        read what it reads."""
        out[batch_index] = self._of_nodes(start, tree, [node])

    def tree(self, out: np.ndarray, batch_index: int, start: int, tree: TokenTree) -> None:
        """Fill `out[batch_index]` for the nodes of a tree whose root takes slot `start`; padding reads what the root
        reads."""
        count, target = len(tree), out[batch_index]
        target[:count] = self._of_nodes(start, tree, range(count))
        target[count:] = target[0]

    def _of_nodes(self, start: int, tree: TokenTree, nodes: list[int] | range) -> np.ndarray:
        """[nodes, kernel − 1] of some nodes of a tree: before the root lie the slots before it."""
        before = np.empty((len(nodes), len(self._back)), np.int64)
        for row, node in enumerate(nodes):
            above = node
            for column in range(len(self._back) - 1, -1, -1):
                # Above the root, −1, stand the tokens before it: −2, −3, …
                above = tree.parents[above] if above >= 0 else above - 1
                before[row, column] = above
        return np.maximum(before + start, -1)
