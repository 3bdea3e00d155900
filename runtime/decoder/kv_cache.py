"""Arenas of cached rows, keys and values above all: written in place by every graph, bound by address.

The decoder's own arena holds `max_length + max_width` slots per sequence: a pass may write `max_width` slots beyond the
longest sequence before the runtime lowers the length again. ONNX's `Attention` costs as much as the bound buffer is
long, so on engines without a static cache a view of few slots is bound and re-strided when it grows. Cross-attention
and drafts with layers of their own keep their keys and values in further arenas.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import gcd

import numpy as np

from ..common.errors import CapacityError
from ..engines.base import DTYPES, Buffer, Engine, View
from ..graphs.values import KEY_VALUE
from .cache_growth import CacheGrowth

BUCKET = 128
"""Slots by which the bound view grows."""

BATCH_BUCKET = 32
"""The same where sequences are decoded together: they pay for unused slots each, and bind again once for all of them."""


def cache_len_step(alignment: int, slot_bytes: int) -> int:
    """Slots of which every multiple ends at an address that is a multiple of `alignment`."""
    return alignment // gcd(alignment, slot_bytes)


LayerShapes = Mapping[str, tuple[int, int]]
"""The caches of one layer: name → (heads, size of a row), as `layer_caches` (`runtime/graphs/values.py`) says."""


def key_value(heads: int, head_dim: int) -> LayerShapes:
    """The caches of a layer with attention."""
    return dict.fromkeys(KEY_VALUE, (heads, head_dim))


class KVArena:
    """Cached rows of some layers for the sequences of a batch, and how many slots of each sequence are valid. Layers with
    attention have keys and values; others have what their kind needs, in slots as well.

    Layout of one cache while `cache_len` slots are bound: `[batch, heads, cache_len, size]`, contiguous from the
    start of a buffer of `max_batch × heads × capacity × size` elements: sequences can join and leave without moving
    the others.
    """

    def __init__(
        self,
        engine: Engine,
        layers: Sequence[LayerShapes],
        dtype: str,
        capacity: int,
        max_batch: int = 1,
        *,
        bucket: int = BUCKET,
        static: bool = False,
        prefix: str = "",
    ):
        """`layers`: the caches of each. `prefix` comes before `key_cache.i` in the names of the buffers; the bound view has
        a multiple of `bucket` slots, or, when `static`, always the whole capacity. With several sequences both are
        rounded up, so that each begins at an address that the engine can bind."""
        item = DTYPES[dtype].itemsize
        # The alignment is a power of two, and so is each of these: the largest is a multiple of the others.
        rows = {shape for layer in layers for shape in layer.values()}
        units = [cache_len_step(engine.alignment, heads * size * item) for heads, size in rows]
        self._unit = 1 if max_batch == 1 else max(units)
        capacity, bucket = self.aligned(capacity), self.aligned(bucket)
        self.capacity, self.max_batch = capacity, max_batch
        self.lengths = [0] * max_batch
        """Valid slots by sequence; 0 beyond the first `batch`."""
        self.batch = 1
        self.staged = 0
        """1 while one more sequence lies behind the batch, in no pass."""
        self.cache_len = 0
        """Slots per head in the bound views."""
        self._engine, self._bucket, self._dtype, self._static = engine, bucket, dtype, static
        self.layers: list[dict[str, Buffer]] = [{} for _ in layers]
        """The caches of each layer, by name."""
        for name in dict.fromkeys(name for layer in layers for name in layer):
            for number, layer in enumerate(layers):
                if name in layer:
                    heads, size = layer[name]
                    nbytes = max_batch * heads * capacity * size * item
                    buffer = engine.allocate(f"{prefix}{name}.{number}", nbytes, zeroed=True)
                    self.layers[number][name] = buffer
        self._shapes = layers
        self._buffers = [
            (buffer, shapes[name])
            for layer, shapes in zip(self.layers, layers, strict=True)
            for name, buffer in layer.items()
        ]
        self._growth = CacheGrowth(engine, self._buffers, dtype)
        self.reset()

    def aligned(self, cache_len: int) -> int:
        """At least `cache_len` slots per head, with which every sequence begins at an address that the engine can
        bind."""
        return -(-cache_len // self._unit) * self._unit

    @property
    def length(self) -> int:
        """Longest valid length of the batch, in slots."""
        return max(self.lengths)

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer, _ in self._buffers)

    def reset(self, batch: int = 1) -> None:
        """Start with `batch` sequences that have nothing cached."""
        if not 0 <= batch <= self.max_batch:
            raise CapacityError(
                f"batch of {batch} sequences; the session was loaded with max_batch={self.max_batch}"
            )
        self.batch, self.staged = batch, 0
        self.lengths[:] = [0] * self.max_batch
        self.cache_len = self.capacity if self._static else min(self._bucket, self.capacity)

    def clear(self, batch_index: int) -> None:
        """Zero the place of sequence `batch_index`: it left numbers that are not finite, and 0 × NaN is NaN where slots
        are masked."""
        for buffer, shape in self._buffers:
            own = self._view(buffer, shape, batch_index, 1)
            self._engine.write(own, np.zeros(own.shape, DTYPES[self._dtype]))

    def add(self) -> int:
        """A further sequence with nothing cached; returns its place, the last one."""
        assert not self.staged, "a further sequence while one is staged"
        if self.batch == self.max_batch:
            raise CapacityError(f"the session decodes {self.max_batch} sequences together, not one more")
        self.lengths[self.batch] = 0
        self.batch += 1
        return self.batch - 1

    def stage(self) -> None:
        """Leave the last sequence where it is, and out of the batch."""
        self.batch, self.staged = self.batch - 1, 1

    def unstage(self) -> int:
        """Take it back into the batch; returns its place."""
        self.batch, self.staged = self.batch + 1, 0
        return self.batch - 1

    def moves(self, batch_index: int) -> Iterator[tuple[int, int]]:
        """(place, the place of who takes it) for what moves when sequence `batch_index` leaves: the last one, then the one
        that is staged."""
        last = self.batch - 1
        if batch_index != last:
            yield batch_index, last
        if self.staged:
            yield last, self.batch

    def remove(self, batch_index: int) -> None:
        """Forget sequence `batch_index`; `moves` says who takes its place."""
        for target, source in self.moves(batch_index):
            self._move(target, source)
            self.lengths[target] = self.lengths[source]
        self.batch -= 1
        self.lengths[self.batch + self.staged] = 0

    def _move(self, target: int, source: int) -> None:
        """Copy the caches of the sequence in place `source` to place `target`."""
        valid = self.lengths[source]
        for buffer, shape in self._buffers:
            to, own = self._view(buffer, shape, target, 1), self._view(buffer, shape, source, 1)
            if self._engine.host_memory:  # what lies behind the valid slots is finite, whoever's it was
                self._engine.read(to)[:, :, :valid] = self._engine.read(own)[:, :, :valid]
            else:
                self._engine.copy(to, own).run()

    def reserve(self, width: int, batch_index: int | None = None) -> bool:
        """Make room for a pass of `width` new slots of sequence `batch_index`, or of all; True when the bound views
        changed.

        Raises `CapacityError` before anything is written when the pass would leave the buffers.
        """
        needed = (max(self.lengths) if batch_index is None else self.lengths[batch_index]) + width
        if needed <= self.cache_len:
            return False
        if needed > self.capacity:
            raise CapacityError(
                f"a pass of width {width} at length {needed - width} needs {needed} rows, the buffers hold "
                f"{self.capacity}; load the session with a larger max_length"
            )
        cache_len = -(-needed // self._bucket) * self._bucket
        if not self._engine.host_memory:
            # What is captured there, and copied to grow, is so for every length anew.
            cache_len = max(cache_len, 2 * self.cache_len)
        self._grow(min(cache_len, self.capacity))
        return True

    def advance(self, count: int, batch_index: int = 0) -> None:
        """Declare `count` slots just written by a pass as valid."""
        length = self.lengths[batch_index] + count
        if count < 0 or length > self.capacity:
            raise CapacityError(
                f"sequence {batch_index} cannot grow by {count} rows to {length} of {self.capacity}"
            )
        self.lengths[batch_index] = length

    def views(self, layer: int, batch_index: int = 0, batch: int | None = None) -> dict[str, View]:
        """Views `[batch, heads, cache_len, size]` of the caches of one layer by name, for sequences
        batch_index..batch_index + batch − 1."""
        count = self.batch - batch_index if batch is None else batch
        return {
            name: self._view(buffer, self._shapes[layer][name], batch_index, count)
            for name, buffer in self.layers[layer].items()
        }

    def view(self, layer: int, batch_index: int = 0, batch: int | None = None) -> tuple[View, View]:
        """The keys and the values of `views`, of a layer with attention."""
        keys, values = self.views(layer, batch_index, batch).values()
        return keys, values

    def bindings(
        self, first: int, end: int, batch_index: int = 0, batch: int | None = None
    ) -> tuple[dict[str, View], dict[str, View]]:
        """Inputs `key_cache.i value_cache.i …` and outputs `updated_*` (same addresses) of layers first..end−1."""
        inputs: dict[str, View] = {}
        outputs: dict[str, View] = {}
        for layer in range(first, end):
            for name, view in self.views(layer, batch_index, batch).items():
                inputs[f"{name}.{layer}"] = outputs[f"updated_{name}.{layer}"] = view
        return inputs, outputs

    def read(self, layer: int, batch_index: int = 0) -> Mapping[str, np.ndarray]:
        """Copies of the valid slots of one sequence, `[heads, length, size]` of `key`, `value` or what the layer has; for
        tests and tools."""
        length = self.lengths[batch_index]
        return {
            name.removesuffix("_cache"): self._engine.read(view)[0, :, :length].copy()
            for name, view in self.views(layer, batch_index, 1).items()
        }

    def store(self, layer: int, batch_index: int, key: View, value: View) -> None:
        """Copy `[1, heads, n, head_dim]` to the first n slots of a sequence (cross-attention, once per request)."""
        engine = self._engine
        for target, source in zip(self.view(layer, batch_index, 1), (key, value), strict=True):
            _, heads, count, size = source.shape
            if engine.host_memory:
                engine.read(target)[:, :, :count] = engine.read(source)
                continue
            for head in range(heads):  # on the device: the slots of a head lie together in both
                to = target.buffer.view(
                    (count, size), self._dtype, target.offset + head * self.cache_len * size
                )
                own = source.buffer.view((count, size), self._dtype, source.offset + head * count * size)
                engine.copy(to, own).run()

    def _view(self, buffer: Buffer, shape: tuple[int, int], batch_index: int, batch: int) -> View:
        heads, size = shape
        return buffer.view(
            (batch, heads, self.cache_len, size), self._dtype, batch_index * heads * self.cache_len * size
        )

    def _grow(self, cache_len: int) -> None:
        """Re-stride from `self.cache_len` to `cache_len` slots per head."""
        self._growth.run(self.batch + self.staged, self.length, self.cache_len, cache_len)
        self.cache_len = cache_len
