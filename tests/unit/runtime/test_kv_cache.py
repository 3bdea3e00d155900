"""The arena: layout, growth in place, crops, and no write beyond the end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vlmexport.runtime.common.errors import CapacityError
from vlmexport.runtime.decoder.kv_cache import BUCKET, KVArena, key_value
from vlmexport.runtime.engines.base import DTYPES, Buffer, Call, Engine, View


class Memory(Engine):
    """Numpy memory, direct or copied as a device would; no graphs."""

    name = "memory"

    def __init__(self, host_memory: bool):
        super().__init__({})
        self.host_memory = host_memory  # type: ignore[misc]

    def allocate(self, name: str, nbytes: int, zeroed: bool = False) -> Buffer:
        data = np.zeros(nbytes, np.uint8)
        return Buffer(name, nbytes, data.ctypes.data, data)

    def _bind(self, graph: str, inputs: Any, outputs: Any) -> Call:
        raise NotImplementedError

    def read(self, view: View) -> np.ndarray:
        dtype = DTYPES[view.dtype]
        start = view.offset * dtype.itemsize
        array = view.buffer.data[start : start + view.nbytes].view(dtype).reshape(view.shape)
        return array if self.host_memory else array.copy()

    def write(self, view: View, array: np.ndarray) -> None:
        start = view.offset * DTYPES[view.dtype].itemsize
        flat = view.buffer.data[start : start + view.nbytes].view(DTYPES[view.dtype])
        flat[:] = np.asarray(array).reshape(-1)


def arena_of(engine: Engine, capacity: int, max_batch: int = 1, **options: Any) -> KVArena:
    """Two layers of two heads of three numbers."""
    return KVArena(engine, [key_value(2, 3)] * 2, "float32", capacity, max_batch, **options)


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
    arena = arena_of(engine, 544, 3)
    arena.reset(batch)
    for step in steps:
        arena.reserve(step)
        assert arena.cache_len % BUCKET == 0 or arena.cache_len == arena.capacity
        assert arena.cache_len >= arena.length + step
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


@pytest.mark.parametrize("direct", [True, False])
def test_growth_leaves_nothing_that_is_not_finite(direct: bool) -> None:
    """On a device whole heads are kept, so that what was bound has to be finite before; what is bound anew is zeros."""
    engine = Memory(direct)
    arena = arena_of(engine, 316)
    for buffer in (buffer for layer in arena.layers for buffer in layer.values()):
        buffer.data.view(np.float32)[:] = np.nan
    arena.reserve(16)
    fill(engine, arena, 0, 0, 5 if direct else arena.cache_len, 0.0)
    arena.advance(5)
    arena.reserve(200)
    for layer in range(2):
        for view in arena.view(layer):
            assert np.isfinite(engine.read(view)).all()


def test_a_device_grows_where_it_is_and_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing passes through the host, and lengths double: whatever is captured is captured for each of them."""
    engine = Memory(False)
    arena = arena_of(engine, 1040, 2)
    arena.reset(2)
    fill(engine, arena, 1, 0, 100, 0.5)
    arena.advance(100, 1)
    passed: list[int] = []
    monkeypatch.setattr(
        engine, "copy", lambda target, source: SimpleNamespace(run=lambda: moved(target, source))
    )

    def moved(target: View, source: View) -> None:
        passed.append(target.nbytes)
        Memory.write(engine, target, Memory.read(engine, source))

    for name in ("read", "write"):
        monkeypatch.setattr(engine, name, lambda *_: pytest.fail("through the host"))
    lengths = []
    for _ in range(90):
        if arena.reserve(10, 1):
            lengths.append(arena.cache_len)
        arena.advance(10, 1)
    assert lengths == [256, 512, 1024] and len(passed) == 3 * 4 * (2 + 4)
    monkeypatch.undo()
    assert (arena.read(0, 1)["key"][1, :100, 0] == 10.5 + np.arange(100)).all()


def test_static_cache_binds_the_capacity_and_never_moves() -> None:
    arena = arena_of(Memory(False), 316, static=True)
    assert arena.cache_len == arena.capacity == 316
    arena.advance(300)
    assert arena.reserve(16) is False


def test_capacity_is_checked_before_a_pass() -> None:
    arena = arena_of(Memory(True), 14)
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
    arena = arena_of(Memory(True), 54, 2)
    arena.reset(2)
    arena.advance(20, 0)
    arena.advance(11, 1)
    assert arena.lengths == [20, 11]
    assert arena.length == 20


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize(("capacity", "batch"), [(54, 3), (131, 2), (14, 1)])
def test_every_sequence_begins_at_an_address_that_the_engine_can_bind(
    static: bool, capacity: int, batch: int
) -> None:
    engine = Memory(True)
    engine.alignment = 256  # type: ignore[misc]
    arena = arena_of(engine, capacity, batch, static=static)
    assert arena.capacity >= capacity and (batch > 1 or arena.capacity == capacity)
    arena.reset(batch)
    for width in (1, 20, 40, capacity):
        if width <= capacity:
            arena.reserve(width)
        for row in range(batch):
            key, value = arena.view(0, row, 1)
            assert (key.address - arena.layers[0]["key_cache"].address) % 256 == 0
            assert (value.address - arena.layers[0]["value_cache"].address) % 256 == 0


def test_updates_share_the_address_of_what_they_update() -> None:
    arena = arena_of(Memory(True), 54)
    inputs, outputs = arena.bindings(0, 2)
    assert sorted(outputs) == sorted(f"updated_{name}" for name in inputs)
    for name, view in inputs.items():
        assert outputs[f"updated_{name}"].address == view.address


@settings(max_examples=40, deadline=None)
@given(
    st.booleans(),
    st.lists(st.tuples(st.sampled_from(["add", "remove", "grow"]), st.integers(1, 90)), max_size=14),
)
def test_sequences_join_and_leave_without_moving_the_others(
    direct: bool, steps: list[tuple[str, int]]
) -> None:
    engine = Memory(direct)
    arena = arena_of(engine, 544, 4)
    arena.reset(0)
    members: list[float] = []
    salt = 0.0
    for kind, number in steps:
        if kind == "add" and arena.batch < 4:
            salt += 0.25
            row = arena.add()
            assert row == len(members)
            members.append(salt)
            arena.reserve(number, row)
            fill(engine, arena, row, 0, number, salt)
            arena.advance(number, row)
        elif kind == "remove" and members:
            row = number % len(members)
            arena.remove(row)
            members[row] = members[-1]
            members.pop()
        elif kind == "grow" and members and arena.length + number <= arena.capacity:
            arena.reserve(number)
        assert arena.batch == len(members)
        for row, expected in enumerate(members):
            for layer in range(2):
                for kind_number, name in enumerate(("key", "value")):
                    found = arena.read(layer, row)[name]
                    slots = np.arange(arena.lengths[row])[None]
                    want = expected + 1000 * layer + 100 * kind_number + 10 * np.arange(2)[:, None] + slots
                    assert np.array_equal(found, np.repeat(want[..., None], 3, -1).astype(np.float32))


def test_a_full_batch_takes_no_more() -> None:
    arena = arena_of(Memory(True), 54, 2)
    arena.add()
    with pytest.raises(CapacityError, match="decodes 2 sequences together"):
        arena.add()
