"""Attention in products, sums and one softmax, over keys and values that lie in one place or in two."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import ml_dtypes
import onnx_ir as ir

from ...runtime.common.errors import ExportError
from .groups import Groups
from .rewriter import Rewriter, given, number_of, refuse_attributes, size

WIDE = ir.DataType.FLOAT
END = (1 << 63) - 1
"""Where a slice ends that goes to the end."""


@dataclass(frozen=True)
class Rows:
    """Keys and values [batch, kv_heads, length, head_dim] and what of them is seen: a boolean or additive mask
    [batch, 1 or heads, width, length], or None for everything."""

    keys: ir.Value
    values: ir.Value
    mask: ir.Value | None


class Attentions:
    """Writes the attentions of one graph; what they make of a mask is made once, where the first needs it."""

    def __init__(self, rewriter: Rewriter) -> None:
        self._write = rewriter
        self._groups = Groups(rewriter)
        self._masks: dict[tuple[ir.Value, ir.DataType | None, int], ir.Value] = {}

    def lower(self, node: ir.Node) -> None:
        """Replaces an Attention over one set of keys and values."""
        mask = node.inputs[3] if len(node.inputs) > 3 else None
        self.replace(node, [Rows(given(node, 1), given(node, 2), mask)])

    def replace(self, node: ir.Node, parts: Sequence[Rows]) -> None:
        """Replaces an Attention by one whose keys and values are those of `parts`, side by side: one softmax over all.

        Groups of queries that share a key/value head are folded (`Groups`): nothing of the cache is repeated. The
        softmax is computed in float32, as transformers does; so is a soft cap of the scores, which comes before the mask.
        Raises ExportError for an attention of another form than the exporter makes.
        """
        write = self._write
        write.before(node)
        refuse_attributes(node, ("scale", "softcap"))
        query = given(node, 0)
        if any(value is not None for value in node.inputs[4:]) or len(query.shape or ()) != 4:
            raise ExportError(
                f"Attention {node.name!r} takes other inputs than queries, keys, values and a mask"
            )
        heads, kv_heads, head_dim = size(query, 1), size(parts[0].keys, 1), size(query, 3)
        groups = heads // kv_heads
        scale = number_of(node, "scale", 1.0 / math.sqrt(head_dim))
        # Scaled first: float16 would overflow in the product where a model divides its scores.
        query = query if scale == 1.0 else write.add("Mul", query, write.constant(scale, query.dtype))
        if groups > 1:
            query = self._groups.queries(query, kv_heads, head_dim)
        softcap = number_of(node, "softcap", 0.0)
        scores = [self._scores(query, part, (kv_heads, groups), softcap) for part in parts]
        joined = scores[0] if len(scores) == 1 else write.add("Concat", *scores, axis=-1)
        weights = write.add("Softmax", joined, axis=-1)
        assert query.dtype is not None
        weights = write.cast(weights, query.dtype)
        seen = [
            write.add("MatMul", own, part.values)
            for own, part in zip(self._apart(weights, parts), parts, strict=True)
        ]
        result = seen[0] if len(seen) == 1 else write.add("Add", *seen)
        if groups > 1:
            result = self._groups.result(result, heads, head_dim)
        write.replace(node, result)

    def _scores(self, query: ir.Value, part: Rows, heads: tuple[int, int], softcap: float) -> ir.Value:
        """float32 [batch, kv_heads, groups × width, length], −inf-like where hidden; `heads` are kv_heads and groups."""
        write, (kv_heads, groups) = self._write, heads
        product = write.add("MatMul", query, write.add("Transpose", part.keys, perm=[0, 1, 3, 2]))
        product = write.cast(product, WIDE)
        if softcap:
            cap = write.constant(softcap, WIDE)
            product = write.add("Mul", write.add("Tanh", write.add("Div", product, cap)), cap)
        if part.mask is None:
            return product
        key = (part.mask, query.dtype, groups)
        if key not in self._masks:
            self._masks[key] = self._groups.mask(self._additive(part.mask, query), kv_heads, groups)
        return write.add("Add", product, self._masks[key])

    def _additive(self, mask: ir.Value, query: ir.Value) -> ir.Value:
        """A mask as float32 to add; hidden entries of a boolean one get half of the lowest number that the type of `query`
        has, which no score reaches and whose sum with a score does not overflow."""
        write = self._write
        if mask.dtype != ir.DataType.BOOL:
            return write.cast(mask, WIDE)
        assert query.dtype is not None
        hidden = float(ml_dtypes.finfo(query.dtype.numpy()).min) / 2
        seen, unseen = write.constant(0.0, WIDE), write.constant(hidden, WIDE)
        made = write.add("Where", mask, seen, unseen, dtype=WIDE)
        made.shape = mask.shape
        return made

    def _apart(self, weights: ir.Value, parts: Sequence[Rows]) -> list[ir.Value]:
        """The weights of the entries of each part, of at most two."""
        if len(parts) == 1:
            return [weights]
        write, keys = self._write, parts[0].keys
        cache_len = None if keys.shape is None else keys.shape[2]
        cut = (
            write.integers(cache_len)
            if isinstance(cache_len, int)
            else write.add("Shape", keys, dtype=ir.DataType.INT64, start=2, end=3)
        )
        axis = write.integers(3)
        return [
            write.add("Slice", weights, write.integers(0), cut, axis),
            write.add("Slice", weights, cut, write.integers(END), axis),
        ]
