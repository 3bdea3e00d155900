"""Which cache slot each new position may see, and the T5 bias that rides on it.

A mask is written for queries at given positions and keys at given positions, because inside a token tree a
cache slot is not a position: node i of a tree at committed length m lies in slot m + i at position m + depth.
"""

from __future__ import annotations

import math

import numpy as np

from ..common.bfloat16 import masked_value, widen
from .token_tree import TokenTree


def relative_position_bucket(
    relative: np.ndarray, num_buckets: int, max_distance: int, bidirectional: bool
) -> np.ndarray:
    """T5 bucket of `relative` = key position − query position; int64, same shape.

    Equals transformers' `T5Attention._relative_position_bucket` bit for bit: half of the buckets are exact, the
    others grow logarithmically (in float32, truncated) up to `max_distance`.
    """
    relative = np.asarray(relative, np.int64)
    buckets = np.zeros(relative.shape, np.int64)
    if bidirectional:
        num_buckets //= 2
        buckets += (relative > 0) * num_buckets
        distance = np.abs(relative)
    else:
        distance = -np.minimum(relative, 0)
    exact = num_buckets // 2
    small = distance < exact
    ratio = np.maximum(distance, 1).astype(np.float32) / np.float32(exact)
    scaled = np.log(ratio).astype(np.float32) / np.float32(math.log(max_distance / exact))
    large = exact + (scaled * np.float32(num_buckets - exact)).astype(np.int64)
    return buckets + np.where(small, distance, np.minimum(large, num_buckets - 1))


def _chain(toeplitz: np.ndarray, start: int, width: int, cache_len: int) -> np.ndarray:
    """The mask [heads, width, cache_len] of a chain, a view."""
    return toeplitz[:, start : start + width, :cache_len]


class Seen(dict[int, np.ndarray]):
    """start → the mask [heads, width, cache_len] of a chain, a view that is made when it is first asked for."""

    def __init__(self, toeplitz: np.ndarray, width: int, cache_len: int):
        super().__init__()
        self._of = toeplitz, width, cache_len

    def __missing__(self, start: int) -> np.ndarray:
        toeplitz, width, cache_len = self._of
        mask = self[start] = _chain(toeplitz, start, width, cache_len)
        return mask


class CausalMask:
    """Fills decoder masks `[batch, heads, width, cache_len]`, boolean (True = visible) or float (bias, or masked).

    One row of values by distance is computed at load; a chain is then slice copies of a strided view of it.
    `table` is the `[num_buckets, heads]` relative bias as it is stored, or None for a mask without bias. With a
    `window` a position sees so many, itself included (transformers' `sliding_window_overlay`).
    """

    def __init__(
        self,
        capacity: int,
        heads: int,
        dtype: np.dtype,
        table: np.ndarray | None = None,
        max_distance: int = 128,
        window: int | None = None,
        *,
        whole_blocks: bool = False,
    ):
        """With `whole_blocks` a block sees all of itself, whatever the window."""
        self._capacity = capacity
        self.positions = np.arange(capacity, dtype=np.int64)
        """0..capacity − 1, to slice positions and indices from."""
        self._boolean, self._whole_blocks = dtype == np.bool_, whole_blocks
        self._hidden = False if self._boolean else masked_value(dtype)
        # by_distance[h, capacity − 1 + (key − query)]; keys after the query are hidden
        by_distance = np.full((heads, 2 * capacity - 1), self._hidden, dtype)
        distances = np.arange(1 - capacity, 1)
        if table is None:
            by_distance[:, :capacity] = True if self._boolean else 0
        else:
            buckets = relative_position_bucket(distances, table.shape[0], max_distance, bidirectional=False)
            by_distance[:, :capacity] = widen(table, dtype)[buckets].T
        if window is not None:
            by_distance[:, : max(0, capacity - window)] = self._hidden
        self._by_distance = by_distance
        self._cache_len, self._seen = 0, dict[int, Seen]()
        head_step, step = by_distance.strides
        # toeplitz[h, query, key] = by_distance[h, capacity − 1 + key − query], without a copy
        self._toeplitz = np.lib.stride_tricks.as_strided(
            by_distance[:, capacity - 1 :],
            (heads, capacity, capacity),
            (head_step, -step, step),
            writeable=False,
        )

    def seen(self, width: int, cache_len: int) -> Seen:
        """The masks [heads, width, cache_len] of chains by their start, kept for callers that ask again; of the last
        `cache_len` asked for."""
        if cache_len != self._cache_len:
            self._cache_len, self._seen = cache_len, {}
        seen = self._seen.get(width)
        if seen is None:
            seen = self._seen[width] = Seen(self._toeplitz, width, cache_len)
        return seen

    def chain(self, out: np.ndarray, batch_index: int, start: int, width: int) -> None:
        """Fill `out[batch_index]` for `width` new positions start, start + 1, …; slot = position."""
        out[batch_index] = _chain(self._toeplitz, start, width, out.shape[3])

    def block(self, out: np.ndarray, batch_index: int, start: int, first: int, end: int) -> None:
        """Show the positions first..end − 1 of a chain from `start` on, which `out[batch_index]` holds, those of them that
        come later, or all of them. Boolean masks only."""
        assert self._boolean and start <= first < end <= start + out.shape[2], "a pass holds whole blocks"
        shown = np.ones((end - first, end - first), bool)
        out[batch_index, :, first - start : end - start, first:end] |= (
            shown if self._whole_blocks else np.triu(shown)
        )

    @property
    def distance_bias(self) -> np.ndarray:
        """[distances + 1, heads]: what a query adds for a visible key that many positions before it, and in the last row
        what hides one."""
        table = self._by_distance[:, self._capacity - 1 :: -1].T
        return np.concatenate([table, np.full_like(table[:1], self._hidden)])

    def node(self, out: np.ndarray, batch_index: int, start: int, tree: TokenTree, node: int) -> None:
        """Fill `out[batch_index]` for one node of a tree whose root takes slot and position `start`, and rows that pad its
        pass: they see what it sees."""
        target = out[batch_index, :, 0]
        depths = np.asarray(tree.depths)
        target[:, start + node + 1 :] = self._hidden
        target[:, :start] = self._toeplitz[:, start + depths[node], :start]
        before = slice(start, start + node + 1)
        inside = self._by_distance[:, self._capacity - 1 + depths[: node + 1] - depths[node]]
        target[:, before] = np.where(tree.ancestors[node, : node + 1], inside, self._hidden)
        out[batch_index, :, 1:] = target[:, None]

    def tree(self, out: np.ndarray, batch_index: int, start: int, tree: TokenTree) -> None:
        """Fill `out[batch_index]` for the nodes of a tree whose root takes slot and position `start`."""
        count, cache_len = len(tree), out.shape[3]
        visible = tree.ancestors
        depths = np.asarray(tree.depths)
        target = out[batch_index]
        target[:, :, start + count :] = self._hidden
        target[:, :count, :start] = self._toeplitz[:, start + depths, :start]
        inside = self._by_distance[:, self._capacity - 1 + depths[None, :] - depths[:, None]]
        target[:, :count, start : start + count] = np.where(visible, inside, self._hidden)
        if (
            count < target.shape[1]
        ):  # padding positions see what the root sees, so that no row of the mask is empty
            target[:, count:, :] = target[:, :1, :]
        assert cache_len >= start + count


def relations(tree: TokenTree, width: int) -> tuple[np.ndarray, np.ndarray]:
    """(`depths` int64 [width], `ancestors` bool [width, width]) of a tree as the `mask` graph takes them: nodes beyond
    its end see what the root sees, so that no row is empty."""
    count = len(tree)
    depths, ancestors = np.zeros(width, np.int64), np.zeros((width, width), bool)
    depths[:count] = tree.depths
    ancestors[:count, :count] = tree.ancestors
    ancestors[count:, 0] = True
    return depths, ancestors


def encoder_mask(
    out: np.ndarray, lengths: list[int], table: np.ndarray | None = None, max_distance: int = 128
) -> None:
    """Fill a float encoder mask `[batch, heads, source, source]`: bidirectional bias, hidden at padding."""
    source = out.shape[2]
    if table is None:
        out[...] = 0
    else:
        relative = np.arange(1 - source, source)
        buckets = relative_position_bucket(relative, table.shape[0], max_distance, bidirectional=True)
        by_distance = np.ascontiguousarray(widen(table, out.dtype)[buckets].T)
        head_step, step = by_distance.strides
        out[...] = np.lib.stride_tricks.as_strided(
            by_distance[:, source - 1 :], out.shape[1:], (head_step, -step, step), writeable=False
        )
    for batch_index, length in enumerate(lengths):
        out[batch_index, :, :, length:] = masked_value(out.dtype)
