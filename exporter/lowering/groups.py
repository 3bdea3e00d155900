"""Groups of queries that share a key/value head, folded into the width: nothing of keys and values is repeated.

Queries [batch, heads, width, head_dim] become [batch, kv_heads, groups × width, head_dim]: heads of a group lie side by
side, so that this is a Reshape. The mask repeats its queries once per member of a group. Attention is then one of as many
heads of queries as of keys and values.
"""

from __future__ import annotations

import onnx_ir as ir

from .rewriter import Rewriter, size


class Groups:
    """Folds what the attentions of one graph take; a mask is folded once, where the first needs it."""

    def __init__(self, rewriter: Rewriter) -> None:
        self._write = rewriter
        self._masks: dict[tuple[ir.Value, int], ir.Value] = {}

    def queries(self, query: ir.Value, kv_heads: int, head_dim: int) -> ir.Value:
        """[batch, kv_heads, groups × width, head_dim] of [batch, heads, width, head_dim]."""
        return self._write.add("Reshape", query, self._write.integers(0, kv_heads, -1, head_dim))

    def result(self, hidden_states: ir.Value, heads: int, head_dim: int) -> ir.Value:
        """The way back: [batch, heads, width, head_dim]."""
        return self._write.add("Reshape", hidden_states, self._write.integers(0, heads, -1, head_dim))

    def mask(self, mask: ir.Value, kv_heads: int, groups: int) -> ir.Value:
        """[batch, 1 or kv_heads, groups × width, length] of a mask [batch, 1 or heads, width, length].

        By Expand and not by Tile, which ONNX Runtime's CUDA provider has not for boolean masks.
        """
        if groups == 1:
            return mask
        result = self._masks.get((mask, groups))
        if result is None:
            write, heads = self._write, kv_heads
            result = mask
            if size(mask, 1) == 1:
                result, heads = write.add("Expand", mask, write.integers(1, groups, 1, 1)), 1
            result = write.add("Reshape", result, write.integers(0, heads, -1, 0))
            self._masks[mask, groups] = result
        return result
