"""The key/value arena: one per session, written in place by every graph, bound by address.

Capacity is `max_length + max_width` rows per sequence: a pass may write `max_width` rows beyond the longest
sequence before the runtime lowers the length again. ONNX's `Attention` costs as much as the bound buffer is
long, so on engines without a static cache a view of 128·n rows is bound and re-strided when it grows.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..bundle.manifest import DecoderInfo
from ..engines.base import Buffer, Engine, View
from ..errors import CapacityError

BUCKET = 128
"""Rows by which the bound view grows."""


class KVArena:
    """K and V of every decoder layer, and how many rows of each sequence are valid.

    Layout of one layer while `rows` are bound: `[batch, kv_heads, rows, head_dim]`, contiguous from the start
    of a buffer of `max_batch × kv_heads × capacity × head_dim` elements.
    """

    def __init__(
        self,
        engine: Engine,
        decoder: DecoderInfo,
        max_length: int,
        max_width: int,
        max_batch: int = 1,
        cache_dtype: str = "float32",
    ):
        self.capacity = max_length + max_width
        self.max_batch = max_batch
        self.lengths = [0] * max_batch
        """Valid rows per sequence. The first entry is the length of a single request."""
        self.batch = 1
        self.rows = 0
        self._engine, self._decoder = engine, decoder
        shape = (max_batch, decoder.num_kv_heads, self.capacity, decoder.head_dim)
        self.keys: list[Buffer] = []
        self.values: list[Buffer] = []
        for layer in range(decoder.num_layers):
            self.keys.append(engine.allocate(f"key_cache.{layer}", shape, cache_dtype))
            self.values.append(engine.allocate(f"value_cache.{layer}", shape, cache_dtype))
        self.reset()

    @property
    def length(self) -> int:
        """Longest valid length of the batch, in rows."""
        return max(self.lengths[: self.batch])

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in (*self.keys, *self.values))

    def reset(self, batch: int = 1) -> None:
        """Start a request of `batch` sequences with nothing cached."""
        if not 1 <= batch <= self.max_batch:
            raise CapacityError(
                f"batch of {batch} sequences; the session was loaded with max_batch={self.max_batch}"
            )
        self.batch = batch
        self.lengths[:] = [0] * self.max_batch
        self.rows = self.capacity if self._engine.static_cache else min(BUCKET, self.capacity)

    def reserve(self, width: int) -> bool:
        """Make room for a pass of `width` new rows; True when the bound views changed.

        Raises `CapacityError` before anything is written when the pass would leave the buffers.
        """
        needed = max(self.lengths[: self.batch]) + width
        if needed > self.capacity:
            raise CapacityError(
                f"a pass of width {width} at length {needed - width} needs {needed} rows, the buffers hold "
                f"{self.capacity}; load the session with a larger max_length"
            )
        if needed <= self.rows:
            return False
        self._grow(min(-(-needed // BUCKET) * BUCKET, self.capacity))
        return True

    def advance(self, count: int, row: int = 0) -> None:
        """Declare `count` rows just written by a pass as valid."""
        length = self.lengths[row] + count
        if count < 0 or length > self.capacity:
            raise CapacityError(f"sequence {row} cannot grow by {count} rows to {length} of {self.capacity}")
        self.lengths[row] = length

    def view(self, layer: int, batch: int | None = None, rows: int | None = None) -> tuple[View, View]:
        """Key and value views `[batch, kv_heads, rows, head_dim]` of one layer, as currently laid out."""
        decoder = self._decoder
        shape = (
            self.batch if batch is None else batch,
            decoder.num_kv_heads,
            self.rows if rows is None else rows,
            decoder.head_dim,
        )
        return self._engine.view(self.keys[layer], shape), self._engine.view(self.values[layer], shape)

    def bindings(self, first: int, end: int) -> tuple[dict[str, View], dict[str, View]]:
        """Inputs `key_cache.i value_cache.i` and outputs `updated_*` (same addresses) of layers first..end−1."""
        inputs: dict[str, View] = {}
        outputs: dict[str, View] = {}
        for layer in range(first, end):
            key, value = self.view(layer)
            inputs[f"key_cache.{layer}"] = outputs[f"updated_key_cache.{layer}"] = key
            inputs[f"value_cache.{layer}"] = outputs[f"updated_value_cache.{layer}"] = value
        return inputs, outputs

    def read(self, layer: int, row: int = 0) -> Mapping[str, np.ndarray]:
        """Copies of the valid rows of one sequence, `[kv_heads, length, head_dim]`; for tests and tools."""
        key, value = self.view(layer)
        length = self.lengths[row]
        return {
            "key": self._engine.read(key)[row, :, :length].copy(),
            "value": self._engine.read(value)[row, :, :length].copy(),
        }

    def _grow(self, rows: int) -> None:
        """Re-stride from `self.rows` to `rows` per head, last head first so that nothing is overwritten."""
        decoder, old = self._decoder, self.rows
        heads = self.batch * decoder.num_kv_heads
        valid = max(self.lengths[: self.batch])
        in_place = getattr(self._engine, "host_memory", False)
        for buffer in (*self.keys, *self.values):
            whole = self._engine.view(buffer, (buffer.size,))
            flat = self._engine.read(whole)
            if not in_place:
                flat = np.array(flat)
            before = flat[: heads * old * decoder.head_dim].reshape(heads, old, decoder.head_dim)
            after = flat[: heads * rows * decoder.head_dim].reshape(heads, rows, decoder.head_dim)
            for head in range(heads - 1, 0, -1):
                after[head, :valid] = before[head, :valid]  # numpy copies overlapping ranges safely
            # Masked rows are multiplied by zero, and 0 × NaN would be NaN: nothing but finite values may stay.
            after[:, valid:] = 0
            if not in_place:
                self._engine.write(whole, flat)
        self.rows = rows
