"""The arena: layout, growth in place, crops, and no write beyond the end."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vlmexport.runtime.bundle.manifest import DecoderInfo
from vlmexport.runtime.decode.kv import BUCKET, KVArena
from vlmexport.runtime.engines.base import DTYPES, Buffer, View
from vlmexport.runtime.errors import CapacityError


class Memory:
    """Just enough of an engine: numpy memory, direct or copied as a device would."""

    name = "memory"

    def __init__(self, host_memory: bool, static_cache: bool = False):
        self.host_memory, self.static_cache = host_memory, static_cache

    def allocate(self, name: str, shape: tuple[int, ...], dtype: str) -> Buffer:
        flat = np.zeros(int(np.prod(shape)), DTYPES[dtype])
        return Buffer(name, shape, dtype, flat.ctypes.data, flat)

    def view(self, buffer: Buffer, shape: tuple[int, ...], offset: int = 0) -> View:
        return View(buffer, shape, offset).check()

    def read(self, view: View) -> np.ndarray:
        array = view.buffer.data[view.offset : view.offset + view.size].reshape(view.shape)
        return array if self.host_memory else array.copy()

    def write(self, view: View, array: np.ndarray) -> None:
        view.buffer.data[view.offset : view.offset + view.size] = np.asarray(array).reshape(-1)


def info(layers: int = 2, heads: int = 2, size: int = 3) -> DecoderInfo:
    return DecoderInfo(
        num_layers=layers, hidden_size=8, num_heads=4, num_kv_heads=heads, head_dim=size, position="rotary",
        mask_dtype="bool", mask_heads=1, cross_attention=False, cuts=[0, layers],
    )  # fmt: skip


def fill(engine: Memory, arena: KVArena, row: int, start: int, count: int, salt: float) -> None:
    """Write recognisable values at slots start.. of every layer, as a pass would."""
    for layer in range(2):
        for kind, view in enumerate(arena.view(layer)):
            whole = engine.read(view).copy()
            for head in range(2):
                for slot in range(start, start + count):
                    whole[row, head, slot] = salt + 1000 * layer + 100 * kind + 10 * head + slot
            engine.write(view, whole)


@settings(max_examples=30, deadline=None)
@given(st.booleans(), st.integers(1, 3), st.lists(st.integers(1, 60), min_size=1, max_size=8))
def test_growth_keeps_every_valid_row(direct: bool, batch: int, steps: list[int]) -> None:
    engine = Memory(direct)
    arena = KVArena(engine, info(), max_length=480, max_width=64, max_batch=3)
    arena.reset(batch)
    for step in steps:
        arena.reserve(step)
        assert arena.rows % BUCKET == 0 or arena.rows == arena.capacity
        assert arena.rows >= arena.length + step
        for row in range(batch):
            count = max(1, step - (row + 1) % batch)  # the last sequence is the longest
            fill(engine, arena, row, arena.lengths[row], count, 0.25 * row)
            arena.advance(count, row)
    for row in range(batch):
        length = arena.lengths[row]
        for layer in range(2):
            found = arena.read(layer, row)
            for kind, name in enumerate(("key", "value")):
                expected = 0.25 * row + 1000 * layer + 100 * kind
                expected = expected + 10 * np.arange(2)[:, None] + np.arange(length)[None]
                assert np.array_equal(found[name], np.repeat(expected[..., None], 3, -1).astype(np.float32))


def test_growth_leaves_nothing_that_is_not_finite() -> None:
    engine = Memory(True)
    arena = KVArena(engine, info(), 300, 16)
    for buffer in (*arena.keys, *arena.values):
        buffer.data[:] = np.nan
    arena.reserve(16)
    fill(engine, arena, 0, 0, 5, 0.0)
    arena.advance(5)
    arena.reserve(200)
    for layer in range(2):
        for view in arena.view(layer):
            assert np.isfinite(engine.read(view)).all()


def test_static_cache_binds_the_capacity_and_never_moves() -> None:
    arena = KVArena(Memory(False, static_cache=True), info(), 300, 16)
    assert arena.rows == arena.capacity == 316
    arena.advance(300)
    assert arena.reserve(16) is False


def test_capacity_is_checked_before_a_pass() -> None:
    arena = KVArena(Memory(True), info(), max_length=10, max_width=4)
    arena.reserve(4)
    arena.advance(10)
    assert arena.reserve(4) is False
    with pytest.raises(CapacityError, match="width 5 at length 10 needs 15 rows, the buffers hold 14"):
        arena.reserve(5)
    with pytest.raises(CapacityError):
        arena.advance(5)
    with pytest.raises(CapacityError, match="max_batch=1"):
        arena.reset(2)


def test_sequences_have_lengths_of_their_own() -> None:
    arena = KVArena(Memory(True), info(), 50, 4, max_batch=2)
    arena.reset(2)
    arena.advance(20, 0)
    arena.advance(11, 1)
    assert arena.lengths == [20, 11]
    assert arena.length == 20


def test_updates_share_the_address_of_what_they_update() -> None:
    arena = KVArena(Memory(True), info(), 50, 4)
    inputs, outputs = arena.bindings(0, 2)
    assert sorted(outputs) == sorted(f"updated_{name}" for name in inputs)
    for name, view in inputs.items():
        assert outputs[f"updated_{name}"].address == view.address
