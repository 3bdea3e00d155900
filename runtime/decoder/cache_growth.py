"""Caches that grow in place: more slots per head, in the same buffers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..engines.base import DTYPES, Buffer, Call, Engine


class CacheGrowth:
    """Re-strides the caches of an arena, each a buffer of `[sequences, heads, slots, size]` with its (heads, size)."""

    def __init__(self, engine: Engine, caches: Sequence[tuple[Buffer, tuple[int, int]]], dtype: str):
        self._engine, self._caches, self._dtype = engine, caches, dtype
        self._beside: dict[str, Buffer] = {}
        self._calls: dict[tuple[int, int, int], Sequence[Call]] = {}

    def run(self, sequences: int, valid: int, old: int, new: int) -> None:
        """From `old` to `new` slots per head, of which the first `valid` may hold rows."""
        if self._engine.host_memory:
            for buffer, shape in self._caches:
                self._grow_here(buffer, shape, sequences, valid, old, new)
        else:
            for call in self._calls_there(sequences, old, new):
                call.run()

    def _grow_here(
        self, buffer: Buffer, shape: tuple[int, int], sequences: int, valid: int, old: int, new: int
    ) -> None:
        """In the memory itself, last head first so that nothing is overwritten."""
        per_sequence, size = shape
        heads = sequences * per_sequence
        flat = self._engine.read(buffer.view((buffer.nbytes // DTYPES[self._dtype].itemsize,), self._dtype))
        before = flat[: heads * old * size].reshape(heads, old, size)
        after = flat[: heads * new * size].reshape(heads, new, size)
        for head in range(heads - 1, 0, -1):
            after[head, :valid] = before[head, :valid]  # numpy copies overlapping ranges safely
        # Masked slots are multiplied by zero, and 0 × NaN would be NaN: nothing but finite values may stay.
        after[:, valid:] = 0

    def _calls_there(self, sequences: int, old: int, new: int) -> Sequence[Call]:
        """What does it on a device, where every request grows through the same lengths: whole heads, whatever of them is
        valid, so that the calls are always the same."""
        key = sequences, old, new
        calls = self._calls.get(key)
        if calls is None:
            grown = [call for buffer, shape in self._caches for call in self._grow_there(buffer, shape, *key)]
            calls = self._calls[key] = self._engine.repeated(grown)
        return calls

    def _grow_there(
        self, buffer: Buffer, shape: tuple[int, int], sequences: int, old: int, new: int
    ) -> Iterator[Call]:
        """Copies must not overlap: out of the way and back, over zeros."""
        engine, (per_sequence, size), kind = self._engine, shape, self._dtype
        heads = sequences * per_sequence
        moved, zeros = (
            self._aside(name, heads * count * size).view((heads * count * size,), kind)
            for name, count in (("moved", old), ("zeros", new))
        )
        yield engine.copy(moved, buffer.view(moved.shape, kind))
        yield engine.copy(buffer.view(zeros.shape, kind), zeros)
        for head in range(heads if old else 0):
            source = moved.buffer.view((old, size), kind, head * old * size)
            yield engine.copy(buffer.view((old, size), kind, head * new * size), source)

    def _aside(self, name: str, count: int) -> Buffer:
        """Memory of the engine for `count` numbers beside the caches; zeros until somebody writes there."""
        nbytes = count * DTYPES[self._dtype].itemsize
        buffer = self._beside.get(name)
        if buffer is None or buffer.nbytes < nbytes:
            buffer = self._beside[name] = self._engine.allocate(f"cache.{name}", nbytes, zeroed=True)
        return buffer
